"""GPU memory to every kind of pool and back: on a model of the driver, and on a real GPU where there is one."""

from __future__ import annotations

import ctypes
import random
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from egmctl.consumer import EgmStore, Timing
from egmctl.consumer.copy import CopyOptions, install_kernels
from egmctl.consumer.copy.arrays import DeviceArray
from egmctl.consumer.errors import (
    AmbiguousSegment,
    BadOffset,
    InvalidBuffer,
    InvalidRequest,
    ObjectNotFound,
    ProviderGone,
    StaleAllocation,
    Unreachable,
)
from egmctl.consumer.host_copy import Completion
from egmctl.memory.driver import CudaError, Driver, install_driver
from tests.consumer.mini_provider import MiniProvider
from tests.consumer.support import Memory, payload, until
from tests.model import kernels as model_kernels
from tests.model.config import Config
from tests.model.driver import ModelDriver
from tests.support.master import Master

MIB = 1 << 20
KINDS = ("shm", "cuda-posix", "cuda-fabric")


@dataclass
class Gpu:
    """The driver, what another process has to be given to see the same machine, and buffers of its memory."""

    driver: Driver
    environment: dict[str, str]
    cache: Path
    model: ModelDriver | None = None
    held: list[tuple[str, int]] = field(default_factory=list)

    def hbm(self, nbytes: int, device: int = 0) -> int:
        self.driver.use_device(device)
        self.held.append(("hbm", self.driver.mem_alloc(nbytes)))
        return self.held[-1][1]

    def pinned(self, nbytes: int) -> int:
        self.driver.use_device(0)
        self.held.append(("pinned", self.driver.host_alloc(nbytes)))
        return self.held[-1][1]

    def write(self, address: int, data: bytes) -> int:
        self.driver.use_device(0)
        buffer = ctypes.create_string_buffer(data, len(data))
        self.driver.memcpy(address, ctypes.addressof(buffer), len(data))
        return address

    def read(self, address: int, nbytes: int) -> bytes:
        self.driver.use_device(0)
        buffer = ctypes.create_string_buffer(nbytes)
        self.driver.memcpy(ctypes.addressof(buffer), address, nbytes)
        return buffer.raw

    def free(self) -> None:
        self.driver.use_device(0)
        for kind, address in self.held:
            (self.driver.mem_free if kind == "hbm" else self.driver.host_free)(address)


@pytest.fixture(params=["model", pytest.param("gpu", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Gpu]:
    if request.param == "gpu":
        try:
            from egmctl.memory.driver import get_driver

            install_driver(None)
            driver = get_driver()
            driver.use_device(0)
        except CudaError as error:
            pytest.skip(f"no GPU here: {error}")
        gpu = Gpu(driver, {}, tmp_path / "copy.json")
        yield gpu
        gpu.free()
        return
    config = Config(directory=tmp_path / "machine")
    config.directory.mkdir()
    model = ModelDriver(config)
    install_driver(lambda: model)
    install_kernels(model_kernels._make)
    environment = {**config.to_env(), "EGMCTL_SEAMS": "tests.model.driver:install"}
    gpu = Gpu(model, environment, tmp_path / "copy.json", model)
    try:
        yield gpu
        gpu.free()
        assert model.leaks() == {}, "something of the driver was left"
    finally:
        install_kernels(None)
        install_driver(None)


def provide(master: Master, gpu: Gpu, kind: str, **options: object) -> MiniProvider:
    """Fabric memory as of another host: nothing but its endpoint says whether it lives."""
    if kind == "cuda-fabric":
        if gpu.model is None:
            pytest.skip("fabric memory needs an NVLink domain")
        options.setdefault("host_id", "f" * 32)
    protocol = "nvlink" if kind == "cuda-fabric" else "tcp"
    given: dict[str, object] = {"chunks": [32 * MIB, 32 * MIB], "kind": kind, "protocol": protocol, **options}
    return MiniProvider(master.address, environment=gpu.environment, **given)  # type: ignore[arg-type]


def open_store(master: Master, gpu: Gpu, **options: object) -> EgmStore:
    options.setdefault("timing", Timing(retry=1.0))
    return EgmStore.connect(master.address, devices=[0], copy_options=CopyOptions(cache=gpu.cache), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_gpu_memory_goes_to_every_kind_of_pool_and_back(master: Master, gpu: Gpu, kind: str) -> None:
    with provide(master, gpu, kind), open_store(master, gpu) as store:
        for buffer in (gpu.hbm(8 * MIB), gpu.pinned(8 * MIB)):
            store.register_buffer(buffer, 8 * MIB)
            keys = [f"{buffer}-{index}" for index in range(40)]
            sizes = [1 + random.Random(index).randrange(90_000) for index in range(40)]
            addresses = [buffer + 100_000 * index for index in range(40)]
            for key, size, address in zip(keys, sizes, addresses, strict=True):
                gpu.write(address, payload(key, size))
            assert store.batch_put_from(keys, addresses, sizes) == sizes
            gpu.write(buffer, bytes(4 * MIB))
            assert store.batch_get_into(keys, addresses, [100_000] * 40) == sizes
            for key, size, address in zip(keys, sizes, addresses, strict=True):
                assert gpu.read(address, size) == payload(key, size)
            assert store.get_range(keys[5], 100, 50, buffer + 3) == 50
            assert gpu.read(buffer + 3, 50) == payload(keys[5], sizes[5])[100:150]
        assert store._engine.mappings.imports <= 2


@pytest.mark.parametrize("kind", ["shm", "cuda-posix"])
def test_pageable_memory_reaches_pools_of_this_host(master: Master, gpu: Gpu, kind: str) -> None:
    with provide(master, gpu, kind), open_store(master, gpu) as store:
        memory = Memory(MIB)
        store.register_buffer(memory.address, MIB)
        store.put_from("k", memory.write(payload("k", 500_000)), 500_000)
        assert store.get("k") == payload("k", 500_000)
        buffer = gpu.hbm(MIB)
        store.register_buffer(buffer, MIB)
        store.get_into("k", buffer, MIB)
        assert gpu.read(buffer, 500_000) == payload("k", 500_000)


def test_pageable_memory_does_not_reach_another_host_and_nothing_is_staged(master: Master, gpu: Gpu) -> None:
    with provide(master, gpu, "cuda-fabric"), open_store(master, gpu) as store:
        memory = Memory(MIB)
        store.register_buffer(memory.address, MIB)
        with pytest.raises(InvalidBuffer, match="another host"):
            store.put_from("k", memory.address, MIB)
        assert not store.exists("k")


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_between_gpu_memory_and_a_pool_goes_in_one_step(master: Master, gpu: Gpu, kind: str) -> None:
    with provide(master, gpu, kind), open_store(master, gpu) as store:
        audit = store.audit()
        for buffer in (gpu.hbm(2 * MIB), gpu.pinned(2 * MIB)):
            store.register_buffer(buffer, 2 * MIB)
            store.put_from(f"k{buffer}", buffer, 2 * MIB)
            store.get_into(f"k{buffer}", buffer, 2 * MIB)
        assert (audit.direct, audit.other) == (8 * MIB, 0)


def test_a_store_without_a_gpu_says_that_cuda_memory_needs_one(master: Master, gpu: Gpu) -> None:
    with (
        provide(master, gpu, "cuda-posix"),
        EgmStore.connect(master.address) as store,
        pytest.raises(Unreachable, match="without a GPU"),
    ):
        store.put("k", b"1")


def test_a_buffer_of_a_gpu_that_was_not_named_is_refused(master: Master, gpu: Gpu) -> None:
    if gpu.driver.device_count() < 2:
        pytest.skip("needs two GPUs")
    with open_store(master, gpu) as store:
        buffer = gpu.hbm(MIB, device=1)
        with pytest.raises(InvalidBuffer, match="GPU 1"):
            store.register_buffer(buffer, MIB)


@pytest.mark.parametrize("kind", KINDS)
def test_entries_are_gathered_at_offsets_that_lie_on_the_gpu(master: Master, gpu: Gpu, kind: str) -> None:
    data = payload("g", 2 * MIB)
    with provide(master, gpu, kind), open_store(master, gpu) as store:
        buffer, numbers = gpu.hbm(4 * MIB), gpu.hbm(64 * 1024)
        store.register_buffer(buffer, 4 * MIB)
        gpu.write(buffer, data)
        store.put_from("g", buffer, len(data))
        offsets = [random.randrange(0, 2 * MIB - 656) for _ in range(300)]
        gpu.write(numbers, array("q", offsets).tobytes())
        wanted = b"".join(data[offset : offset + 656] for offset in offsets)
        for given, count in ((numbers, 300), (DeviceArray(numbers, 300), None), (offsets, None)):
            gpu.write(buffer, bytes(len(wanted)))
            assert store.gather_into("g", given, 656, buffer, count=count) == len(wanted)
            assert gpu.read(buffer, len(wanted)) == wanted
        gpu.write(numbers, array("q", [0, 2 * MIB - 655]).tobytes())
        with pytest.raises(BadOffset):
            store.gather_into("g", numbers, 656, buffer, count=2)
        with pytest.raises(InvalidRequest, match="count"):
            store.gather_into("g", numbers, 656, buffer)
        assert len(store._engine.mappings._entries) <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_scatter_writes_into_its_own_put_alone(master: Master, gpu: Gpu, kind: str) -> None:
    with provide(master, gpu, kind), open_store(master, gpu) as store:
        buffer, numbers = gpu.hbm(MIB), gpu.hbm(4096)
        store.register_buffer(buffer, MIB)
        source = payload("s", 4000)
        gpu.write(buffer, source)
        gpu.write(numbers, array("q", [9000, 0, 5000, 2000]).tobytes())
        assert store.scatter_from("s", 10_000, numbers, 1000, buffer, count=4) == 10_000
        wanted = bytearray(10_000)
        for at, offset in enumerate([9000, 0, 5000, 2000]):
            wanted[offset : offset + 1000] = source[1000 * at : 1000 * (at + 1)]
        store.get_into("s", buffer, MIB)
        assert gpu.read(buffer, 10_000) == bytes(wanted)
        gpu.write(numbers, array("q", [0, 9001]).tobytes())
        with pytest.raises(BadOffset):
            store.scatter_from("bad", 10_000, numbers, 1000, buffer, count=2)
        assert not store.exists("bad")


def test_a_session_reads_into_gpu_memory(master: Master, gpu: Gpu) -> None:
    with provide(master, gpu, "cuda-posix"), open_store(master, gpu) as store:
        store.put("k", payload("k", 300_000))
        buffer = gpu.hbm(MIB)
        store.register_buffer(buffer, MIB)
        with store.session(["k"]) as session:
            session.read_into("k", 1000, buffer, 2000)
            assert gpu.read(buffer, 2000) == payload("k", 300_000)[1000:3000]
            session.gather([0, 299_000], 1000, buffer)
            assert gpu.read(buffer, 2000) == payload("k", 300_000)[:1000] + payload("k", 300_000)[299_000:]


def test_a_copy_is_ordered_after_what_its_stream_holds(master: Master, gpu: Gpu) -> None:
    with provide(master, gpu, "cuda-posix"), open_store(master, gpu) as store:
        source, staged, stream = gpu.hbm(8 * MIB), gpu.hbm(8 * MIB), gpu.driver.stream_create()
        store.register_buffer(staged, 8 * MIB)
        gpu.write(source, payload("late", 8 * MIB))
        if gpu.model is not None:
            gpu.model.config.copy_delay = 0.2
        gpu.driver.memcpy_async(staged, source, 8 * MIB, stream)  # stands for the kernel that makes the data
        transfer = store.put_from_async("k", staged, 8 * MIB, stream=stream)
        assert transfer.result() == 8 * MIB
        if gpu.model is not None:
            gpu.model.config.copy_delay = 0.0
        assert store.get("k") == payload("late", 8 * MIB)
        gpu.driver.use_device(0)
        gpu.driver.stream_synchronize(stream)
        gpu.driver.stream_destroy(stream)


def test_a_copy_by_the_cpu_is_ordered_after_what_its_stream_holds(master: Master, gpu: Gpu) -> None:
    if gpu.model is None:
        pytest.skip("work that the host does on a stream is queued on the model alone")
    with provide(master, gpu, "shm"), open_store(master, gpu) as store:
        gpu.driver.use_device(0)
        memory, stream = Memory(MIB), gpu.driver.stream_create()
        store.register_buffer(memory.address, MIB)
        for work in (store.put_from, store.put_from_async):
            memory.write(bytes(MIB))
            gpu.model._stream(stream).put(lambda: (time.sleep(0.2), memory.write(payload("late", MIB)))[0])
            transfer = work("k", memory.address, MIB, stream=stream)
            assert (transfer if isinstance(transfer, int) else transfer.result()) == MIB
            assert store.get("k") == payload("late", MIB)
            store.remove("k", force=True)
        gpu.driver.stream_destroy(stream)


def test_a_stream_without_a_gpu_to_order_by_is_refused(master: Master) -> None:
    with MiniProvider(master.address, chunks=[16 * MIB]), EgmStore.connect(master.address) as store:
        memory = Memory(MIB)
        store.register_buffer(memory.address, MIB)
        with pytest.raises(InvalidRequest, match="stream"):
            store.put_from("k", memory.address, MIB, stream=1)
        assert not store.exists("k")


def test_nothing_is_written_for_a_put_that_is_refused_beside_others(master: Master, gpu: Gpu) -> None:
    with provide(master, gpu, "cuda-fabric"), open_store(master, gpu) as store:
        buffer, memory = gpu.hbm(MIB), Memory(MIB)
        store.register_buffer(buffer, MIB)
        store.register_buffer(memory.address, MIB)
        store.put_from("first", buffer, 100)  # binds the pool
        copier, written = store._engine.device_copier, []
        assert copier is not None
        original = copier.copy

        def copy(fragments: Sequence[tuple[int, int, int]], **options: Any) -> Completion:
            written.extend(fragments)
            return original(fragments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copier, "copy", copy)
            good, bad = store.batch_put_from_multi_buffers(
                ["good", "bad"], [[(buffer, 1000)], [(buffer, 2000), (memory.address, 3000)]]
            )
        assert good == 1000
        assert isinstance(bad, InvalidBuffer)
        assert [nbytes for _, _, nbytes in written] == [1000]
        assert not store.exists("bad")


@pytest.mark.parametrize("kind", ["shm", "cuda-posix"])
def test_an_idle_mapping_goes_with_its_provider_from_a_thread_that_has_no_context(
    master: Master, gpu: Gpu, kind: str
) -> None:
    with provide(master, gpu, kind) as provider, open_store(master, gpu) as store:
        store.put("k", b"x" * 1000)
        assert store._engine.mappings.count == 1
        provider.kill()
        until(lambda: store._engine.mappings.count == 0)  # noticed by the watching thread: the store is idle
        until(lambda: store._engine.mappings._unclosed == [])
        if gpu.model is not None:
            until(lambda: gpu.model.leaks() == {})  # type: ignore[union-attr]


# fabric memory of another host: no socket to watch, and the endpoint is asked again after each copy


def test_a_remote_provider_that_ends_during_a_copy_makes_it_fail(master: Master, gpu: Gpu) -> None:
    with provide(master, gpu, "cuda-fabric") as provider, open_store(master, gpu) as store:
        buffer = gpu.hbm(MIB)
        store.register_buffer(buffer, MIB)
        store.put_from("k", gpu.write(buffer, payload("k", MIB)), MIB)
        assert store.get_into("k", buffer, MIB) == MIB
        provider.kill()
        with pytest.raises(ProviderGone):
            store.get_into("k", buffer, MIB)
        with pytest.raises(ProviderGone):
            store.put_from("n", buffer, MIB)
        assert not store.exists("n")


@pytest.mark.parametrize("egm", [True, False], ids=["ours", "stock"])
def test_a_remote_provider_reborn_at_the_same_place_is_told_by_nonce_or_handle(gpu: Gpu, egm: bool) -> None:
    with (
        Master(client_ttl=3) as master,
        provide(master, gpu, "cuda-fabric", chunks=[32 * MIB], egm=egm) as first,
        open_store(master, gpu, timing=Timing(retry=0.5, stock_expiry=6.0)) as store,
    ):
        buffer = gpu.hbm(MIB)
        store.register_buffer(buffer, MIB)
        store.put_from("k", gpu.write(buffer, payload("old", MIB)), MIB)
        store.get_into("k", buffer, MIB)
        first.kill()
        second = provide(
            master, gpu, "cuda-fabric", chunks=[32 * MIB], egm=egm, port=first.port, exclusive=False, mount=False
        )
        second.start()
        try:
            assert second.addresses == first.addresses, "the driver gives the same address again"
            second.order("fill", chunk=0, value=0xEE)
            # Old segments are still listed: whatever is located there is not believed.
            with pytest.raises(AmbiguousSegment):
                store.get_into("k", buffer, MIB)
            until(lambda: _gone(store, buffer), 15)
            second.order("mount")
            second.order("exclusive", value=True)
            until(lambda: store.batch_put_from(["n"], [buffer], [MIB]) == [MIB])
            assert second.order("peek", chunk=0, offset=0, nbytes=64) != "ee" * 64
        finally:
            second.close()


def _gone(store: EgmStore, buffer: int) -> bool:
    (result,) = store.batch_get_into(["k"], [buffer], [MIB])
    assert not isinstance(result, int), "bytes of another allocation were returned as the object's"
    return isinstance(result, ObjectNotFound)


def test_a_remote_handle_changed_during_a_copy_is_noticed(master: Master, gpu: Gpu) -> None:
    with provide(master, gpu, "cuda-fabric", egm=False) as provider, open_store(master, gpu) as store:
        buffer = gpu.hbm(MIB)
        store.register_buffer(buffer, MIB)
        store.put_from("k", gpu.write(buffer, payload("k", MIB)), MIB)
        binding = store._engine.bindings.get(provider.endpoint)
        place = store._engine.master.locate(["k"])()[0].places[0]  # type: ignore[union-attr]
        chunk = binding.chunk(place.address, place.nbytes)
        assert store._engine.bindings.confirm(binding, [chunk])
        provider.order("withdraw", chunk=chunk.number if chunk.number >= 0 else 0)
        provider.order("withdraw", chunk=1)
        assert not store._engine.bindings.confirm(binding, [chunk])
        with pytest.raises(StaleAllocation):
            store.get_into("k", buffer, MIB)


def test_a_store_measures_a_gpu_once_and_the_next_one_knows(master: Master, gpu: Gpu) -> None:
    with open_store(master, gpu) as store:
        assert store.calibrate()
        assert not store.calibrate()
    assert gpu.cache.exists()
    with open_store(master, gpu) as store:
        assert not store.calibrate()
    with EgmStore.connect(master.address) as store:
        assert not store.calibrate()


@pytest.mark.parametrize("kind", ["cuda-posix"])
def test_verify_and_bench_connect_to_a_pool_with_its_gpus_measured(
    master: Master, gpu: Gpu, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from types import SimpleNamespace

    from egmctl.bench.target import Target

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    mooncake = SimpleNamespace(metadata_server="P2PHANDSHAKE", tenant_id="default")
    target = Target(SimpleNamespace(master=master.address), SimpleNamespace(mooncake=mooncake))  # type: ignore[arg-type]
    with target.connect((0,)):
        assert (tmp_path / "mine" / "egmctl" / "copy.json").exists()
