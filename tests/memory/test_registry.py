"""What may be published is registered first, and registration refuses what a consumer could not use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from egmctl.errors import EgmError
from egmctl.memory import Chunk, ChunkSpec, ProviderMemory, ReleaseError, Share, linux, provider_memory
from egmctl.memory.base import MemoryKind
from egmctl.memory.driver import install_driver
from egmctl.memory.registry import RegistrationError, Registry
from tests.model.config import Config
from tests.model.driver import ModelDriver

UNIT = 16 << 20
KINDS: list[MemoryKind] = ["cuda-fabric", "cuda-posix", "shm"]


@pytest.fixture(params=KINDS)
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ProviderMemory]:
    driver = ModelDriver(Config(directory=tmp_path / "memory", nodes=(0,)))
    install_driver(lambda: driver)
    memory = provider_memory(request.param, total_bytes=2 * UNIT)
    try:
        yield memory
    finally:
        for chunk in memory.chunks():
            memory.release(chunk)
        memory.close()
        install_driver(None)


@pytest.fixture
def chunks(memory: ProviderMemory) -> list[Chunk]:
    return [memory.create(ChunkSpec(index, 0, UNIT), lambda _: None) for index in (0, 1)]


@dataclass
class Part:
    """A chunk as it should not be."""

    spec: ChunkSpec
    address: int
    handle: Share

    def share(self) -> Share:
        return self.handle

    def host_view(self) -> memoryview:
        raise NotImplementedError


def test_registered_chunks_are_what_is_published_with_their_handles(chunks: list[Chunk]) -> None:
    registry = Registry()
    registry.register_remote(chunks[::-1])
    assert [chunk for chunk, _ in registry.remote()] == chunks
    kind = chunks[0].share().kind
    assert {len(handle) for _, handle in registry.remote()} == ({64} if kind == "cuda-fabric" else {0})
    registry.unregister_remote()
    registry.unregister_remote()
    assert registry.remote() == []
    registry.register_remote(chunks)


def test_local_only_memory_is_never_among_what_is_published(chunks: list[Chunk]) -> None:
    registry = Registry()
    registry.register_local("workspace", 1 << 45, 4096)
    registry.register_remote(chunks)
    assert [chunk.address for chunk, _ in registry.remote()] == [chunk.address for chunk in chunks]


def test_a_range_registered_already_or_overlapping_one_is_refused_and_nothing_changes(chunks: list[Chunk]) -> None:
    registry = Registry()
    registry.register_remote(chunks[:1])
    with pytest.raises(RegistrationError, match="registered already"):
        registry.register_remote([chunks[1], chunks[0]])
    assert [chunk for chunk, _ in registry.remote()] == chunks[:1]
    for start, nbytes in ((0, 1), (UNIT - 1, 1), (-1, 2), (-4096, UNIT + 8192)):
        with pytest.raises(RegistrationError, match="overlaps chunk 0"):
            registry.register_local("workspace", chunks[0].address + start, nbytes)
    registry.register_local("before", chunks[0].address - 4096, 4096)
    with pytest.raises(RegistrationError, match="no range"):
        registry.register_local("nothing", chunks[0].address, 0)
    registry.unregister_local(chunks[0].address - 4096)
    registry.register_remote(chunks[1:])


def test_a_range_that_is_not_mapped_to_its_end_is_refused(chunks: list[Chunk]) -> None:
    registry = Registry()
    whole = chunks[1]
    hole = linux.reserve(UNIT, 4096)
    try:
        share = Share("shm", 0, UNIT, fd=os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(RegistrationError, match=f"only 0 of its {UNIT} bytes"):
            registry.register_remote([Part(ChunkSpec(7, 0, UNIT), hole, share)])
        assert share.fd is not None
        os.close(share.fd)
    finally:
        linux.unmap(hole, UNIT)
    beyond = Part(ChunkSpec(8, 0, 1 << 40), whole.address, whole.share())
    with pytest.raises(RegistrationError, match="are mapped"):
        registry.register_remote([beyond])
    if beyond.handle.fd is not None:
        os.close(beyond.handle.fd)
    assert registry.remote() == []


def test_memory_that_cannot_be_exported_is_refused_at_registration(chunks: list[Chunk]) -> None:
    registry = Registry()
    address, spec = chunks[0].address, chunks[0].spec
    for share, match in (
        (Share("cuda-posix", 0, UNIT), "without a handle"),
        (Share("cuda-fabric", 0, UNIT), "without a handle"),
        (Share("cuda-fabric", 0, UNIT, fabric=bytes(32)), "32 bytes, not 64"),
        (Share("cuda-fabric", 0, UNIT // 2, fabric=bytes(64)), "of its"),
    ):
        with pytest.raises(RegistrationError, match=match):
            registry.register_remote([Part(spec, address, share)])
    registry.register_remote(chunks)


def test_a_released_chunk_cannot_be_registered(memory: ProviderMemory, chunks: list[Chunk]) -> None:
    memory.release(chunks[0])
    with pytest.raises(EgmError, match=r"mapped|released"):
        Registry().register_remote(chunks[:1])


def test_a_release_is_refused_while_registered(chunks: list[Chunk]) -> None:
    registry = Registry()
    registry.register_remote(chunks)
    with pytest.raises(ReleaseError, match="still registered") as caught:
        registry.check_release(chunks[0])
    assert caught.value.exit_code == 4
    registry.unregister_remote([0])
    registry.check_release(chunks[0])
    with pytest.raises(ReleaseError):
        registry.check_release(chunks[1])


def test_descriptors_taken_to_look_at_a_chunk_are_closed_again(chunks: list[Chunk]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        registry = Registry()
        registry.register_remote(chunks)
    assert len(os.listdir("/proc/self/fd")) == before
