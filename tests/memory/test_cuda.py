"""The CUDA memory kinds, on the model everywhere and, for cuda-posix, on the real driver where there is a GPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from egmctl import steps
from egmctl.errors import EgmError, FailedError, PreflightError
from egmctl.memory import ChunkSpec, ReleaseError, Share, import_share, provider_memory
from egmctl.memory.base import MemoryKind
from egmctl.memory.cuda import CudaProvider
from egmctl.memory.driver import CudaError, get_driver, install_driver
from egmctl.memory.probe import probe
from tests.memory.contract import ROOT
from tests.model.config import Config, Fault
from tests.model.driver import ModelDriver

UNIT = 16 << 20
NODE = 0


def nothing(_: int) -> None:
    pass


def use_model(config: Config) -> ModelDriver:
    driver = ModelDriver(config)
    install_driver(lambda: driver)
    return driver


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    install_driver(None)
    steps.watch(None)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(directory=tmp_path / "machine")


@pytest.fixture(
    params=["model cuda-fabric", "model cuda-posix", pytest.param("real cuda-posix", marks=pytest.mark.gpu)]
)
def kind(request: pytest.FixtureRequest, config: Config) -> Iterator[MemoryKind]:
    side, kind = request.param.split()
    if side == "real":
        try:
            if get_driver().device_count() == 0:
                pytest.skip("no GPU here")
        except CudaError as error:
            pytest.skip(f"no CUDA driver here: {error.message}")
        yield kind
        return
    model = use_model(config)
    yield kind
    assert model.leaks() == {}


def released(memory: CudaProvider) -> None:
    for chunk in memory.chunks():
        memory.release(chunk)
    memory.close()


def test_a_chunk_is_memory_at_an_aligned_address_that_the_cpu_may_use(kind: MemoryKind) -> None:
    memory = CudaProvider(kind, 2 * UNIT)
    done: list[int] = []
    chunk = memory.create(ChunkSpec(0, NODE, 2 * UNIT), done.append)
    assert done == [2 * UNIT]
    assert chunk.address % UNIT == 0
    view = chunk.host_view()
    view[0] = view[-1] = 7
    assert len(view) == 2 * UNIT
    del view
    released(memory)
    with pytest.raises(FailedError, match="released"):
        chunk.host_view()
    with pytest.raises(FailedError, match="released"):
        chunk.share()


def test_an_import_has_the_same_bytes_for_the_gpu(kind: MemoryKind) -> None:
    memory = CudaProvider(kind, UNIT)
    chunk = memory.create(ChunkSpec(0, NODE, UNIT), nothing)
    share = chunk.share()
    mapping = import_share(share, devices=[0])
    if share.fd is not None:
        os.close(share.fd)
    assert mapping.address != chunk.address
    assert mapping.device_address == mapping.address
    driver = get_driver()
    driver.use_device(0)
    hbm = driver.mem_alloc(UNIT)
    driver.memset(hbm, 0x33, UNIT)
    driver.memcpy(mapping.address, hbm, UNIT)
    assert chunk.host_view() == b"\x33" * UNIT
    driver.mem_free(hbm)
    mapping.close()
    mapping.close()
    with pytest.raises(FailedError, match="closed"):
        _ = mapping.address
    released(memory)


def test_an_import_without_gpus_is_for_the_cpu(kind: MemoryKind) -> None:
    memory = CudaProvider(kind, UNIT)
    chunk = memory.create(ChunkSpec(0, NODE, UNIT), nothing)
    share = chunk.share()
    mapping = import_share(share, devices=[])
    if share.fd is not None:
        os.close(share.fd)
    mapping.host_view()[:3] = b"cpu"
    assert bytes(chunk.host_view()[:3]) == b"cpu"
    assert mapping.device_address is None
    mapping.close()
    released(memory)


def test_an_address_is_never_used_for_another_chunk(kind: MemoryKind) -> None:
    memory = CudaProvider(kind, 2 * UNIT)
    seen = set()
    for _ in range(5):
        chunk = memory.create(ChunkSpec(0, NODE, UNIT), nothing)
        assert chunk.address not in seen
        seen.add(chunk.address)
        memory.release(chunk)
    memory.close()


def test_releasing_twice_is_success_and_closing_early_is_refused(kind: MemoryKind) -> None:
    memory = CudaProvider(kind, UNIT)
    chunk = memory.create(ChunkSpec(0, NODE, UNIT), nothing)
    assert memory.owned() == [ChunkSpec(0, NODE, UNIT)]
    with pytest.raises(ReleaseError, match="1 chunks still exist"):
        memory.close()
    memory.release(chunk)
    memory.release(chunk)
    assert memory.owned() == []
    memory.close()
    memory.close()


def test_a_size_that_is_no_multiple_of_the_granularity_is_refused(kind: MemoryKind) -> None:
    memory = CudaProvider(kind, UNIT)
    with pytest.raises(FailedError, match="granularity 2097152"):
        memory.create(ChunkSpec(0, NODE, UNIT + 4096), nothing)
    assert memory.owned() == []
    memory.close()


def test_a_node_that_does_not_exist_is_an_error_that_says_so(kind: MemoryKind) -> None:
    memory = CudaProvider(kind, UNIT)
    with pytest.raises(CudaError) as caught:
        memory.create(ChunkSpec(3, 63, UNIT), nothing)
    assert caught.value.name == "CUDA_ERROR_INVALID_VALUE"
    assert "node 63" in str(caught.value).lower()
    assert f"doctor --for {kind}" in caught.value.hint
    assert memory.owned() == []
    memory.close()


_PEER = """
import os, socket, sys
from egmctl import seams
seams.load()
from egmctl.memory import Share, import_share
peer = socket.socket(fileno=int(sys.argv[1]))
message, descriptors, _, _ = socket.recv_fds(peer, 64, 1)
kind = sys.argv[2]
fabric = message if kind == "cuda-fabric" else None
share = Share(kind, 0, 16 << 20, fd=descriptors[0] if descriptors else None, fabric=fabric)
mapping = import_share(share, devices=[])
peer.sendall(bytes(mapping.host_view()[:4]))
peer.recv(1)
peer.sendall(bytes(mapping.host_view()[:4]))
mapping.close()
"""


def start_peer(kind: str, config: Config) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    if isinstance(get_driver(), ModelDriver):
        env.update(config.to_env())
    command = [sys.executable, "-c", _PEER, str(theirs.fileno()), kind]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)
    theirs.close()
    ours.settimeout(60)
    return process, ours


def send_share(peer: socket.socket, share: Share) -> None:
    if share.fd is not None:
        socket.send_fds(peer, [b"x"], [share.fd])
        os.close(share.fd)
    else:
        assert share.fabric is not None
        peer.sendall(share.fabric)


def test_another_process_imports_the_chunk_and_keeps_it_after_its_release(kind: MemoryKind, config: Config) -> None:
    memory = CudaProvider(kind, UNIT)
    chunk = memory.create(ChunkSpec(0, NODE, UNIT), nothing)
    chunk.host_view()[:4] = b"mine"
    process, peer = start_peer(kind, config)
    send_share(peer, chunk.share())
    assert peer.recv(4) == b"mine"
    memory.release(chunk)
    peer.sendall(b"x")
    assert peer.recv(4) == b"mine", "an importer's mapping keeps the old bytes: identity is not the address"
    assert process.wait(60) == 0
    peer.close()
    memory.close()


def test_a_fabric_handle_of_released_memory_leads_nowhere(config: Config) -> None:
    use_model(config)
    memory = CudaProvider("cuda-fabric", UNIT)
    chunk = memory.create(ChunkSpec(0, NODE, UNIT), nothing)
    share = chunk.share()
    memory.release(chunk)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        import_share(share, devices=[0])
    memory.close()


_PROVIDER = """
import sys, time
from egmctl import seams
seams.load()
from egmctl.memory import ChunkSpec, provider_memory
memory = provider_memory("cuda-fabric", total_bytes=16 << 20)
chunk = memory.create(ChunkSpec(0, 0, 16 << 20), lambda _: None)
chunk.host_view()[:4] = sys.argv[1].encode()
sys.stdout.buffer.write(chunk.share().fabric + chunk.address.to_bytes(8, "little"))
sys.stdout.flush()
time.sleep(120)
"""


def start_provider(config: Config, text: str) -> tuple[subprocess.Popen[bytes], Share, int]:
    env = {**os.environ, **config.to_env(), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", _PROVIDER, text], stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None
    answer = process.stdout.read(72)
    return process, Share("cuda-fabric", 0, UNIT, fabric=answer[:64]), int.from_bytes(answer[64:], "little")


def stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(30)
    assert process.stdout is not None
    process.stdout.close()


def test_a_restarted_provider_has_the_same_address_and_an_old_mapping_still_the_old_bytes(config: Config) -> None:
    use_model(config)
    first, old_share, old_address = start_provider(config, "old!")
    mapping = import_share(old_share, devices=[], address=None)
    stop(first)
    second, new_share, new_address = start_provider(config, "new!")
    try:
        assert new_address == old_address
        assert bytes(mapping.host_view()[:4]) == b"old!"
        assert new_share.fabric != old_share.fabric
        with pytest.raises(CudaError):
            import_share(old_share, devices=[])
        fresh = import_share(new_share, devices=[])
        assert bytes(fresh.host_view()[:4]) == b"new!"
        fresh.close()
    finally:
        mapping.close()
        stop(second)


def test_a_handle_can_repeat_after_a_driver_reload(config: Config) -> None:
    config.reuse_handles = True
    use_model(config)
    first, old_share, _ = start_provider(config, "old!")
    mapping = import_share(old_share, devices=[])
    stop(first)
    second, new_share, _ = start_provider(config, "new!")
    try:
        assert new_share.fabric == old_share.fabric, "so a handle alone is no identity"
        assert bytes(mapping.host_view()[:4]) == b"old!"
    finally:
        mapping.close()
        stop(second)


def test_fabric_memory_of_another_host_is_for_gpus_alone(config: Config) -> None:
    provider, share, _ = start_provider(replace(config, host="host-b"), "far!")
    model = use_model(config)
    try:
        mapping = import_share(share, devices=[0])
        with pytest.raises(FailedError, match="CPU has no access"):
            mapping.host_view()
        mapping.close()
        with pytest.raises(CudaError, match="NOT_SUPPORTED"):
            import_share(share, devices=[])
        assert model.leaks() == {}
    finally:
        stop(provider)


def test_every_visible_gpu_gets_access(config: Config) -> None:
    model = use_model(config)
    memory = CudaProvider("cuda-posix", UNIT)
    chunk = memory.create(ChunkSpec(0, NODE, UNIT), nothing)
    for device in range(len(config.devices)):
        model.use_device(device)
        model.memset(chunk.address, device, UNIT)
    released(memory)
    only_first = CudaProvider("cuda-posix", UNIT, devices=[0])
    chunk = only_first.create(ChunkSpec(0, NODE, UNIT), nothing)
    model.use_device(1)
    with pytest.raises(CudaError):
        model.memset(chunk.address, 1, UNIT)
    released(only_first)
    assert model.leaks() == {}


def test_the_rdma_flag_is_used_where_the_driver_takes_it_and_left_out_where_not(config: Config) -> None:
    for taken in (True, False):
        config.rdma = taken
        model = use_model(config)
        memory = CudaProvider("cuda-posix", 2 * UNIT)
        for index in range(2):
            memory.create(ChunkSpec(index, NODE, UNIT), nothing)
        assert model.calls.count("mem_create") == (2 if taken else 3), "asked once, then known"
        released(memory)


def test_a_forced_address_is_taken_or_refused(config: Config) -> None:
    model = use_model(config)
    memory = CudaProvider("cuda-posix", UNIT, address_hint=0x2B0000000000)
    assert memory.create(ChunkSpec(0, NODE, UNIT), nothing).address == 0x2B0000000000
    second = CudaProvider("cuda-posix", UNIT, address_hint=0x2B0000000000)
    with pytest.raises(FailedError, match="instead"):
        second.create(ChunkSpec(0, NODE, UNIT), nothing)
    chunk = memory.chunks()[0]
    share = chunk.share()
    with pytest.raises(FailedError, match="taken"):
        import_share(share, devices=[], address=chunk.address)
    assert share.fd is not None
    os.close(share.fd)
    released(memory)
    assert model.leaks() == {}


def test_no_memory_left_on_the_node_is_said_with_the_drivers_name(config: Config) -> None:
    config.node_bytes = {0: UNIT}
    model = use_model(config)
    memory = CudaProvider("cuda-posix", 2 * UNIT)
    memory.create(ChunkSpec(0, NODE, UNIT), nothing)
    with pytest.raises(CudaError) as caught:
        memory.create(ChunkSpec(1, NODE, UNIT), nothing)
    assert "CUDA_ERROR_OUT_OF_MEMORY (2)" in caught.value.message
    assert caught.value.where == "chunk 1, NUMA node 0"
    assert "smaller capacity" in caught.value.hint
    assert memory.owned() == [ChunkSpec(0, NODE, UNIT)]
    released(memory)
    assert model.leaks() == {}


def test_without_a_driver_or_a_gpu_the_kind_is_refused(config: Config) -> None:
    install_driver(lambda: ModelDriver(replace(config, driver_missing=True)))
    with pytest.raises(PreflightError, match="DRIVER_NOT_FOUND"):
        provider_memory("cuda-fabric", total_bytes=UNIT)
    use_model(replace(config, devices=()))
    with pytest.raises(PreflightError, match="CUDA_ERROR_NO_DEVICE") as caught:
        provider_memory("cuda-posix", total_bytes=UNIT)
    assert 'memory = "shm"' in caught.value.hint


@pytest.fixture
def in_children(config: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Children get the machine as it is configured when `apply` is called."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return config


def apply(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in config.to_env().items():
        monkeypatch.setenv(name, value)
    install_driver(lambda: ModelDriver(config))


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({}, "ok"),
        ({"fabric": "not-permitted"}, "not-permitted"),
        ({"fabric": "not-supported"}, "not-supported"),
        ({"node_bytes": {0: 0}}, "out-of-memory"),
        ({"nodes": (1,)}, "not-supported"),
        ({"crash_nodes": (0,)}, "crashed"),
        ({"driver_missing": True}, "no-driver"),
        ({"refuse_nodes": {0: ("CUDA_ERROR_UNKNOWN", 999)}}, "failed"),
    ],
)
def test_a_probe_keeps_its_outcomes_apart(
    in_children: Config, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], outcome: str
) -> None:
    apply(replace(in_children, **change), monkeypatch)
    result = probe("cuda-fabric", 0)
    assert result.outcome == outcome
    assert result.ok == (outcome == "ok")
    assert result.detail
    assert result.numa_node == 0


def test_a_probe_that_hangs_ends_at_its_time_limit(in_children: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(replace(in_children, hang_nodes=(0,)), monkeypatch)
    began = time.monotonic()
    result = probe("cuda-posix", 0, timeout=1.0)
    assert result.outcome == "timeout"
    assert time.monotonic() - began < 20


def test_a_probe_leaves_nothing(in_children: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    apply(replace(in_children, leaks=tmp_path / "leaks"), monkeypatch)
    assert probe("cuda-posix", 1).ok
    (line,) = (tmp_path / "leaks").read_text().splitlines()
    assert json.loads(line)["total"] == 0


def test_sizes_that_do_not_fit_are_refused_before_the_first_chunk(config: Config) -> None:
    model = use_model(config)
    memory = CudaProvider("cuda-fabric", 2 * UNIT)
    memory.preflight([ChunkSpec(0, 0, UNIT), ChunkSpec(1, 1, UNIT)])
    with pytest.raises(FailedError, match="not a multiple of the granularity"):
        memory.preflight([ChunkSpec(0, 0, UNIT), ChunkSpec(1, 1, UNIT + 4096)])
    assert "mem_create" not in model.calls


def test_a_handle_is_in_no_text(config: Config) -> None:
    use_model(config)
    memory = CudaProvider("cuda-fabric", UNIT)
    chunk = memory.create(ChunkSpec(0, NODE, UNIT), nothing)
    share = chunk.share()
    assert share.fabric is not None
    texts = [repr(share), repr(chunk), str(memory.owned())]
    forged = Share("cuda-fabric", 0, UNIT, fabric=share.fabric[:-1] + bytes([share.fabric[-1] ^ 1]))
    with pytest.raises(CudaError) as caught:
        import_share(forged, devices=[0])
    texts += [str(caught.value), repr(caught.value), json.dumps(caught.value.document())]
    for text in texts:
        assert share.fabric.hex()[:16] not in text.lower()
    released(memory)


def test_shm_chunks_are_registered_for_the_gpus_that_ask(config: Config) -> None:
    model = use_model(config)
    memory = provider_memory("shm", total_bytes=UNIT)
    chunk = memory.create(ChunkSpec(0, 0, UNIT), nothing)
    share = chunk.share()
    assert share.fd is not None
    mapping = import_share(share, devices=[0, 1])
    os.close(share.fd)
    assert mapping.device_address == mapping.address
    assert model.leaks() == {"registrations": 1}
    mapping.close()
    assert model.leaks() == {}
    memory.release(chunk)
    memory.close()


def test_a_shm_mapping_that_cannot_be_unregistered_stays_and_is_closed_later(config: Config) -> None:
    config.faults = [Fault("host_unregister")]
    model = use_model(config)
    memory = provider_memory("shm", total_bytes=UNIT)
    chunk = memory.create(ChunkSpec(0, 0, UNIT), nothing)
    share = chunk.share()
    assert share.fd is not None
    mapping = import_share(share, devices=[0])
    os.close(share.fd)
    with pytest.raises(EgmError):
        mapping.close()
    assert len(mapping.host_view()) == UNIT, "still mapped: the GPU may still use it"
    mapping.close()
    assert model.leaks() == {}
    memory.release(chunk)
    memory.close()


@pytest.mark.parametrize("obeys", [True, False], ids=["where asked", "where the driver likes"])
def test_ranges_to_be_avoided_are_avoided_and_nothing_more_stays_reserved(
    config: Config, obeys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = use_model(config)
    if not obeys:
        real = model.address_reserve
        monkeypatch.setattr(model, "address_reserve", lambda nbytes, alignment=0, hint=0: real(nbytes, alignment))
    ranges: list[tuple[int, int]] = []
    for _ in range(4):
        memory = CudaProvider("cuda-fabric", 2 * UNIT, avoid=ranges)
        chunks = [memory.create(ChunkSpec(index, 0, UNIT), lambda _: None) for index in (0, 1)]
        for chunk in chunks:
            here = (chunk.address, chunk.address + UNIT)
            assert all(end <= here[0] or here[1] <= start for start, end in ranges)
        assert model.leaks()["reservations"] == 1
        ranges += [(chunk.address, chunk.address + UNIT) for chunk in chunks]
        for chunk in chunks:
            memory.release(chunk)
        memory.close()
    memory = CudaProvider("cuda-fabric", UNIT, avoid=[(0, 1 << 62)])
    with pytest.raises(PreflightError, match="published before"):
        memory.create(ChunkSpec(0, 0, UNIT), lambda _: None)
    memory.close()
    assert model.leaks() == {}
