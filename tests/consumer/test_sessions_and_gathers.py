"""Sessions: located once, read often. Gathers and scatters: many small entries, every offset checked."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest

from egmctl.consumer import EgmStore
from egmctl.consumer.errors import (
    BadOffset,
    InvalidBuffer,
    InvalidRequest,
    LeaseExpired,
    ObjectNotFound,
    ProviderGone,
    StaleAllocation,
    StoreClosed,
)
from tests.consumer.mini_provider import MiniProvider
from tests.consumer.support import Memory, payload
from tests.support.master import Master

MIB = 1 << 20


def test_a_session_reads_parts_without_asking_the_master(
    store: EgmStore, memory: Memory, provider: MiniProvider, master: Master
) -> None:
    keys = [f"k{index}" for index in range(20)]
    for key in keys:
        store.put(key, payload(key, 10_000))
    with store.session(keys) as session:
        assert session.sizes == dict.fromkeys(keys, 10_000)
        assert 0 < session.lease_left <= 2
        master.pause()  # whoever asked it now would wait for ever
        try:
            for index, key in enumerate(keys):
                assert session.read_into(key, 100 * index, memory.address, 500) == 500
                assert memory.read(500) == payload(key, 10_000)[100 * index : 100 * index + 500]
        finally:
            master.resume()
        assert session.unchanged()
        assert session.renew() == ()


def test_a_session_refuses_what_is_not_in_it(store: EgmStore, memory: Memory) -> None:
    store.put("k", payload("k", 1000))
    with store.session(["k"]) as session:
        for offset, nbytes in ((999, 2), (-1, 5), (0, 1001)):
            with pytest.raises(InvalidRequest):
                session.read_into("k", offset, memory.address, nbytes)
        with pytest.raises(InvalidRequest):
            session.read_into("other", 0, memory.address, 1)
        with pytest.raises(InvalidBuffer):
            session.read_into("k", 0, memory.address + memory.nbytes, 1)
    with pytest.raises(StoreClosed):
        session.read_into("k", 0, memory.address, 1)
    with pytest.raises(ObjectNotFound), store.session(["k", "missing"]):
        pass
    with pytest.raises(InvalidRequest), store.session([]):
        pass
    assert store._engine.mappings.count <= 2


def test_a_session_ends_with_its_provider_and_with_its_master(
    store: EgmStore, memory: Memory, provider: MiniProvider, master: Master
) -> None:
    store.put("k", payload("k", 1000))
    with store.session(["k"]) as session:
        master.restart()
        provider.order("mount")
        with pytest.raises(StaleAllocation):
            session.read_into("k", 0, memory.address, 10)
        store.put("k", payload("new", 1000))
        assert session.renew() == ("k",)  # another object, and said so
        session.read_into("k", 0, memory.address, 1000)
        assert memory.read(1000) == payload("new", 1000)
        provider.kill()
        with pytest.raises((ProviderGone, LeaseExpired)):
            session.read_into("k", 0, memory.address, 10)


def test_a_session_tells_of_an_object_replaced_by_force_when_asked(store: EgmStore, memory: Memory) -> None:
    store.put("k", payload("old", 1000))
    with store.session(["k"]) as session:
        store.remove("k", force=True)
        store.put("k", payload("new", 1000))
        assert not session.unchanged()
        assert session.renew() == ("k",)
        session.read_into("k", 0, memory.address, 1000)
        assert memory.read(1000) == payload("new", 1000)


def test_a_gather_brings_the_entries_side_by_side(store: EgmStore, memory: Memory) -> None:
    data = payload("g", 3 * MIB)
    store.put("g", data)
    offsets = [random.randrange(0, 3 * MIB - 656) for _ in range(500)]
    for given in (offsets, np.array(offsets), np.array(offsets, dtype=np.int32)):
        memory.write(bytes(656 * 500))
        assert store.gather_into("g", given, 656, memory.address) == 656 * 500
        assert memory.read(656 * 500) == b"".join(data[offset : offset + 656] for offset in offsets)
    assert store.gather_into("g", [], 656, memory.address) == 0


def test_a_gather_over_several_objects_is_told_which_one_each_entry_is_in(store: EgmStore, memory: Memory) -> None:
    keys = ["a", "b", "c"]
    datas = [payload(key, 5000 + 1000 * index) for index, key in enumerate(keys)]
    for key, data in zip(keys, datas, strict=True):
        store.put(key, data)
    objects = [2, 0, 1, 2, 2]
    offsets = [6990, 0, 17, 0, 6980]
    assert store.gather_into(keys, offsets, 10, memory.address, objects=objects) == 50
    wanted = [datas[number][offset : offset + 10] for number, offset in zip(objects, offsets, strict=True)]
    assert memory.read(50) == b"".join(wanted)
    with store.session(keys) as session:
        session.gather(offsets, 10, memory.address, objects=np.array(objects))
        assert memory.read(50) == b"".join(wanted)
        session.gather([1, 2], 10, memory.address, keys=["b"])
        assert memory.read(20) == datas[1][1:11] + datas[1][2:12]
    for wrong in ({"objects": [3] * 5}, {"objects": [-1] * 5}):
        with pytest.raises(BadOffset):
            store.gather_into(keys, offsets, 10, memory.address, **wrong)
    for wrong in ({}, {"objects": [0]}):
        with pytest.raises(InvalidRequest):
            store.gather_into(keys, offsets, 10, memory.address, **wrong)


@pytest.mark.parametrize("bad", [-1, 991, 1000, 1 << 40, -(1 << 62)])
def test_a_bad_offset_is_an_error_and_nothing_is_read(store: EgmStore, memory: Memory, bad: int) -> None:
    store.put("g", payload("g", 1000))
    store.put("neighbour", payload("n", 1000))
    memory.write(bytes(100))
    with pytest.raises(BadOffset) as error:
        store.gather_into("g", [0, 990, bad], 10, memory.address)
    assert error.value.facts["entry"] == 2
    assert memory.read(100) == bytes(100)


def test_a_gather_stays_inside_its_buffer(store: EgmStore, memory: Memory) -> None:
    store.put("g", payload("g", 1000))
    with pytest.raises(InvalidBuffer):
        store.gather_into("g", [0, 1], 10, memory.address + memory.nbytes - 19)
    with pytest.raises(InvalidRequest):
        store.gather_into("g", [0], 0, memory.address)


def test_scattered_entries_make_an_object_whose_rest_is_zero(store: EgmStore, memory: Memory) -> None:
    for index in range(64):  # the space that the scatter will get has held other objects
        store.put(f"old{index}", payload("old", MIB))
    for index in range(64):
        with suppress(ObjectNotFound):  # evicted
            store.remove(f"old{index}", force=True)
    source = payload("s", 40)
    memory.write(source)
    assert store.scatter_from("s", 1000, [990, 0, 500, 17], 10, memory.address) == 1000
    wanted = bytearray(1000)
    for at, offset in enumerate([990, 0, 500, 17]):
        wanted[offset : offset + 10] = source[10 * at : 10 * at + 10]
    assert store.get("s") == bytes(wanted)


@pytest.mark.parametrize("bad", [-1, 991, 1 << 40])
def test_a_scatter_outside_its_object_writes_and_publishes_nothing(
    store: EgmStore, memory: Memory, provider: MiniProvider, bad: int
) -> None:
    for chunk in (0, 1):
        provider.order("fill", chunk=chunk, value=0x11)
    with pytest.raises(BadOffset):
        store.scatter_from("s", 1000, [0, bad], 10, memory.address)
    assert not store.exists("s")
    for chunk in (0, 1):
        assert set(provider.order("peek", chunk=chunk, offset=0, nbytes=MIB)) == {"1"}
