"""What a store leaves as it was: the caller's current GPU, and other objects when an object fits nowhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from egmctl.consumer import EgmStore, Timing
from egmctl.consumer.copy import CopyOptions, install_kernels
from egmctl.consumer.errors import NoSpace
from egmctl.memory.driver import install_driver
from tests.consumer.mini_provider import MiniProvider
from tests.consumer.support import Memory, payload
from tests.model import kernels as model_kernels
from tests.model.config import Config
from tests.model.driver import ModelDriver
from tests.support.master import Master

MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Iterator[ModelDriver]:
    model = ModelDriver(Config(directory=tmp_path))
    install_driver(lambda: model)
    install_kernels(model_kernels._make)
    yield model
    install_kernels(None)
    install_driver(None)


def test_the_callers_current_gpu_stays_current_whatever_the_store_does(
    master: Master, model: ModelDriver, tmp_path: Path
) -> None:
    environment = {**model.config.to_env(), "EGMCTL_SEAMS": "tests.model.driver:install"}
    with (
        MiniProvider(master.address, chunks=[16 * MIB], kind="cuda-posix", environment=environment),
        EgmStore.connect(master.address, devices=[0], copy_options=CopyOptions(cache=tmp_path / "c.json")) as store,
    ):
        model.use_device(0)
        buffer = model.mem_alloc(MIB)
        model.use_device(1)
        mine = model.current_context()
        store.register_buffer(buffer, MIB)
        assert model.current_context() == mine
        store.put_from("k", buffer, 100_000)
        assert model.current_context() == mine
        transfer = store.get_into_async("k", buffer, MIB)
        assert model.current_context() == mine
        transfer.result()
        assert model.current_context() == mine
        store.gather_into("k", [0, 1000], 100, buffer)
        with store.session(["k"]) as session:
            session.read_into("k", 0, buffer, 100)
            session.gather([0], 100, buffer)
            assert model.current_context() == mine
        assert model.current_context() == mine
        model.use_device(0)
        model.mem_free(buffer)


def test_an_object_larger_than_any_chunk_is_refused_without_evicting_others_again(master: Master) -> None:
    with (
        MiniProvider(master.address, chunks=[16 * MIB, 16 * MIB]),
        EgmStore.connect(master.address, timing=Timing(no_space=5.0)) as store,
    ):
        store.put("small", payload("small", 100_000))
        memory = Memory(20 * MIB)
        store.register_buffer(memory.address, memory.nbytes)
        asked = store._engine.master._client
        starts: list[object] = []
        original = asked.prepare_batch_put_start

        def counted(*arguments: Any) -> Any:
            starts.append(arguments)
            return original(*arguments)

        asked.prepare_batch_put_start = counted  # type: ignore[assignment,method-assign]
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(NoSpace, match="more than any chunk"):
                store.put_from("large", memory.address, 20 * MIB)
            assert time.monotonic() - began < 2.0, "it was tried again although it can never fit"
        assert len(starts) == 1
        assert store.get("small") == payload("small", 100_000)
        store.put_from("fits", memory.address, 8 * MIB)


def test_a_session_reads_several_parts_in_one_call(store: EgmStore, memory: Memory) -> None:
    store.put("a", payload("a", 100_000))
    store.put("b", payload("b", 50_000))
    with store.session(["a", "b"]) as session:
        reads = [("a", 500, memory.address, 1000), ("b", 0, memory.address + 1000, 2000), ("a", 0, memory.address, 0)]
        assert session.batch_read_into(reads) == 3000
    assert memory.read(3000) == payload("a", 100_000)[500:1500] + payload("b", 50_000)[:2000]


def test_large_copies_of_one_direction_follow_each_other_and_arrive_whole(
    master: Master, model: ModelDriver, tmp_path: Path
) -> None:
    environment = {**model.config.to_env(), "EGMCTL_SEAMS": "tests.model.driver:install"}
    size = 16 * MIB
    with (
        MiniProvider(master.address, chunks=[64 * MIB], kind="cuda-posix", environment=environment),
        EgmStore.connect(master.address, devices=[0], copy_options=CopyOptions(cache=tmp_path / "c.json")) as store,
    ):
        model.use_device(0)
        buffer = model.mem_alloc(4 * size)
        store.register_buffer(buffer, 4 * size)
        content = [payload(f"large {number}", size) for number in range(2)]
        for number, data in enumerate(content):
            held = Memory(size)
            model.memcpy(buffer + number * size, held.write(data), size)
        puts = [store.put_from_async(f"k{number}", buffer + number * size, size) for number in range(2)]
        assert [put.result() for put in puts] == [size, size]
        gets = [store.get_into_async(f"k{number}", buffer + (2 + number) * size, size) for number in range(2)]
        assert [get.result() for get in gets] == [size, size]
        for number, data in enumerate(content):
            held = Memory(size)
            model.memcpy(held.address, buffer + (2 + number) * size, size)
            assert held.read(size) == data
        pool = store._engine.device_copier._pools[0]  # type: ignore[union-attr]
        assert set(pool._lanes) == {(False, 0), (True, 0)}, "one stream for each direction"
        model.mem_free(buffer)
