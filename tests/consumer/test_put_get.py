"""Put and get of host buffers against a real Master and real shared memory."""

from __future__ import annotations

import time

import pytest

from egmctl.consumer import EgmStore, Timing
from egmctl.consumer.errors import (
    InvalidBuffer,
    InvalidRequest,
    NoSpace,
    ObjectBusy,
    ObjectExists,
    ObjectNotFound,
    StoreClosed,
    TransferTimeout,
)
from egmctl.consumer.keylocks import Held
from egmctl.errors import EgmError
from tests.consumer.mini_provider import MiniProvider
from tests.consumer.support import Memory, PausingCopier, fill, payload, until
from tests.support.master import Master

MIB = 1 << 20


def test_what_was_put_is_got_and_lies_in_the_providers_chunk(
    store: EgmStore, memory: Memory, provider: MiniProvider
) -> None:
    data = payload("a", 300_001)
    assert store.put_from("a", memory.write(data), len(data)) == len(data)
    assert store.get_into("a", memory.address + 8 * MIB, MIB) == len(data)
    assert memory.read(len(data), 8 * MIB) == data
    heads = [bytes.fromhex(provider.order("peek", chunk=index, offset=0, nbytes=len(data))) for index in (0, 1)]
    assert data in heads


def test_both_versions_of_the_master_are_understood(any_master: Master) -> None:
    with MiniProvider(any_master.address, chunks=[32 * MIB]), EgmStore.connect(any_master.address) as store:
        memory = Memory(MIB)
        store.register_buffer(memory.address, MIB)
        memory.write(payload("x", MIB))
        keys = [f"k{index}" for index in range(50)]
        assert store.batch_put_from(keys, [memory.address] * 50, [20_000] * 50) == [20_000] * 50
        assert all(store.get(key) == payload("x", 20_000) for key in keys)
        with store.session(keys) as session:
            assert session.unchanged()
        store.remove("k0", force=True)
        assert store.batch_exists(["k0", "k1"]) == [False, True]


def test_bytes_go_in_and_come_out(store: EgmStore) -> None:
    for data in (b"x", bytearray(payload("b", 5000)), memoryview(payload("c", 9 * MIB))):
        store.put(f"k{len(data)}", data)
        assert store.get(f"k{len(data)}") == bytes(data)
        assert store.size_of(f"k{len(data)}") == len(data)


@pytest.mark.parametrize("count", [1, 16, 17, 300])
def test_a_batch_answers_each_key_by_itself(store: EgmStore, memory: Memory, count: int) -> None:
    keys = [f"key-{index}" for index in range(count)]
    sizes = [1 + 97 * index for index in range(count)]
    starts = [32_768 * index for index in range(count)]
    for key, size, start in zip(keys, sizes, starts, strict=True):
        memory.write(payload(key, size), start)
    addresses = [memory.address + start for start in starts]
    assert store.batch_put_from(keys, addresses, sizes) == sizes
    again = store.batch_put_from([*keys[:1], "new"], addresses[:1] * 2, [sizes[0], 10])
    assert isinstance(again[0], ObjectExists)
    assert again[1] == 10
    memory.write(bytes(memory.nbytes))
    got = store.batch_get_into([*keys, "missing"], [*addresses, addresses[0]], [32_768] * (count + 1))
    assert got[:-1] == sizes
    assert isinstance(got[-1], ObjectNotFound)
    for key, size, start in zip(keys, sizes, starts, strict=True):
        assert memory.read(size, start) == payload(key, size), key


def test_a_key_twice_in_a_batch_is_put_once(store: EgmStore, memory: Memory) -> None:
    first, second = store.batch_put_from(["k", "k"], [memory.address] * 2, [100, 100])
    assert first == 100
    assert isinstance(second, ObjectExists)


def test_an_object_may_be_laid_together_from_parts_and_spread_over_others(store: EgmStore, memory: Memory) -> None:
    data = payload("parts", 10_000)
    memory.write(data[:3000], 0)
    memory.write(data[3000:3001], 5000)
    memory.write(data[3001:], 8000)
    at = memory.address
    assert store.batch_put_from_multi_buffers(["p"], [[(at, 3000), (at + 5000, 1), (at + 8000, 6999)]]) == [10_000]
    target = at + MIB
    parts = [(target, 4096), (target + 8192, 4096), (target + 32_768, 4096)]
    assert store.batch_get_into_multi_buffers(["p"], [parts]) == [10_000]
    read = memory.read(4096, MIB) + memory.read(4096, MIB + 8192) + memory.read(1808, MIB + 32_768)
    assert read == data
    assert memory.read(1, MIB + 32_768 + 1808) == b"\0"


def test_a_range_is_read_and_a_range_outside_is_refused(store: EgmStore, memory: Memory) -> None:
    data = payload("range", 5000)
    store.put("r", data)
    assert store.get_range("r", 100, 900, memory.address) == 900
    assert memory.read(900) == data[100:1000]
    for offset, length in ((4500, 501), (-1, 10), (5001, 0)):
        with pytest.raises(InvalidRequest):
            store.get_range("r", offset, length, memory.address)


def test_exists_remove_and_their_errors(store: EgmStore, master: Master) -> None:
    assert store.batch_exists(["x", "y"]) == [False, False]
    store.put("x", b"1")
    assert store.exists("x")
    with pytest.raises(ObjectBusy):  # exists granted a lease
        store.remove("x")
    store.remove("x", force=True)
    assert not store.exists("x")
    with pytest.raises(ObjectNotFound):
        store.remove("x")
    with pytest.raises(ObjectNotFound):
        store.size_of("x")


def test_only_registered_memory_is_touched(store: EgmStore, memory: Memory) -> None:
    other = Memory(4096)
    store.put("k", payload("k", 2000))
    with pytest.raises(InvalidBuffer):
        store.put_from("n", other.address, 4096)
    with pytest.raises(InvalidBuffer):
        store.get_into("k", memory.address + memory.nbytes - 1000, 2000)
    with pytest.raises(InvalidBuffer, match="2000"):
        store.get_into("k", memory.address, 1999)
    store.unregister_buffer(memory.address)
    with pytest.raises(InvalidBuffer):
        store.get_into("k", memory.address, 2000)
    assert not store.exists("n")


def test_an_object_has_a_name_and_at_least_one_byte(store: EgmStore, memory: Memory) -> None:
    for key, nbytes in (("", 10), ("k", 0)):
        with pytest.raises(InvalidRequest):
            store.put_from(key, memory.address, nbytes)
    with pytest.raises(InvalidRequest):
        store.put("k", b"")
    with pytest.raises(InvalidRequest):
        store.batch_put_from(["a", "b"], [memory.address], [1])


def test_a_full_pool_says_no_space_after_its_retries() -> None:
    with (
        Master(lease_ttl=60) as master,
        MiniProvider(master.address, chunks=[32 * MIB]),
        EgmStore.connect(master.address, timing=Timing(no_space=0.5)) as store,
    ):
        with pytest.raises(NoSpace):
            fill(store)
        assert store.exists("k5")
        started = time.monotonic()
        with pytest.raises(NoSpace) as error:
            store.put("more", bytes(4 * MIB))
        assert time.monotonic() - started >= 0.5
        assert error.value.number == -200
        assert "NO_AVAILABLE_HANDLE" in str(error.value)
        assert error.value.hint


def test_eviction_is_waited_for(master: Master, provider: MiniProvider) -> None:
    with EgmStore.connect(master.address) as store:
        memory = Memory(MIB)
        store.register_buffer(memory.address, memory.nbytes)
        for index in range(100):  # 64 fit; the rest has to evict, which the Master answers with -200 at first
            assert store.put_from(f"e{index}", memory.address, MIB) == MIB


def test_puts_of_one_key_wait_for_each_other(master: Master, provider: MiniProvider) -> None:
    copier = PausingCopier()
    with EgmStore.connect(master.address, copier=copier) as store:
        memory = Memory(2 * MIB)
        store.register_buffer(memory.address, memory.nbytes)
        first = store.put_from_async("k", memory.address, MIB)
        assert copier.paused.wait(10)
        assert not first.done()
        with pytest.raises(TransferTimeout):
            first.result(timeout=0.05)
        with pytest.raises(ObjectBusy):
            store._locks.acquire(["k"], 0.05, Held())
        assert store.put_from("other", memory.address, 10) == 10  # other keys are not kept waiting
        assert not store.exists("k")
        copier.go.set()
        assert first.result() == MIB
        assert first.result() == MIB
        assert store.exists("k")
        with pytest.raises(ObjectExists):
            store.put_from("k", memory.address, MIB)


def test_a_key_that_another_client_is_writing_is_busy_not_there(master: Master, provider: MiniProvider) -> None:
    copier = PausingCopier()
    with EgmStore.connect(master.address, copier=copier) as store, EgmStore.connect(master.address) as other:
        memory = Memory(MIB)
        store.register_buffer(memory.address, memory.nbytes)
        pending = store.put_from_async("k", memory.address, MIB)
        with pytest.raises(ObjectBusy):
            other.put("k", b"mine")
        with pytest.raises(ObjectBusy):
            other.get("k")
        copier.go.set()
        pending.result()
        with pytest.raises(ObjectExists):
            other.put("k", b"mine")


def test_async_batches_are_published_by_result_alone(store: EgmStore, memory: Memory) -> None:
    keys = [f"a{index}" for index in range(40)]
    for index, key in enumerate(keys):
        memory.write(payload(key, 5000), 8192 * index)
    addresses = [memory.address + 8192 * index for index in range(40)]
    transfer = store.batch_put_from_async(keys, addresses, [5000] * 40)
    until(transfer.done)
    assert not any(store.batch_exists(keys))
    assert transfer.result() == [5000] * 40
    memory.write(bytes(MIB))
    fetched = store.batch_get_into_async([*keys, "no"], [*addresses, memory.address + MIB], [8192] * 41)
    results = fetched.result(10)
    assert results[:-1] == [5000] * 40
    assert isinstance(results[-1], ObjectNotFound)
    assert all(memory.read(5000, 8192 * index) == payload(key, 5000) for index, key in enumerate(keys))
    assert not store._outstanding


def test_closing_a_store_gives_back_what_was_not_published(master: Master, provider: MiniProvider) -> None:
    with EgmStore.connect(master.address) as other:
        with EgmStore.connect(master.address) as store:
            memory = Memory(MIB)
            store.register_buffer(memory.address, memory.nbytes)
            transfer = store.put_from_async("k", memory.address, MIB)
        with pytest.raises(StoreClosed):
            transfer.result()
        with pytest.raises(StoreClosed):
            store.put("x", b"1")
        assert other.put("k", b"mine") == 4  # the key is free again: it was revoked


def test_a_put_that_is_interrupted_is_revoked(master: Master, provider: MiniProvider) -> None:
    class Interrupting:
        def copy(self, fragments: object, **_: object) -> object:
            raise KeyboardInterrupt

    with EgmStore.connect(master.address, copier=Interrupting()) as store:  # type: ignore[arg-type]
        memory = Memory(MIB)
        store.register_buffer(memory.address, memory.nbytes)
        with pytest.raises(KeyboardInterrupt):
            store.put_from("k", memory.address, MIB)
        assert len(store._locks) == 0
        with EgmStore.connect(master.address) as other:
            assert other.put("k", b"mine") == 4


def test_a_master_that_is_not_there_is_named() -> None:
    with pytest.raises(EgmError, match=r"127\.0\.0\.1:1"):
        EgmStore.connect("127.0.0.1:1")
