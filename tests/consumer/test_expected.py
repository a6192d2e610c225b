"""Chunks of the operation before are taken hold of while the Master answers: a guess, that may be wrong in any way."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from egmctl.consumer import EgmStore, Timing
from egmctl.consumer.errors import InvalidBuffer, ObjectBusy, ObjectExists, ObjectNotFound
from egmctl.consumer.keylocks import Held, KeyLocks
from egmctl.consumer.pins import Pins
from egmctl.errors import EgmError
from egmctl.mooncake.master import ReplicateConfig
from tests.consumer.mini_provider import MiniProvider
from tests.consumer.support import Memory, PausingCopier, payload
from tests.support.master import Master

MIB = 1 << 20


def users(store: EgmStore) -> list[int]:
    return [entry.users for entry in store._engine.mappings._entries.values()]


def expected(store: EgmStore) -> Pins:
    pins = store._engine.pins()
    pins.expect(store._engine.usual)
    return pins


def test_what_was_used_before_is_held_and_let_go_of_with_the_operation(store: EgmStore) -> None:
    store.put("k", payload("k", MIB))
    assert len(store._engine.usual) == 1
    pins = expected(store)
    assert users(store) == [1]
    pins.expect(store._engine.usual)
    assert users(store) == [1]
    (place,) = store._engine.master.locate(["k"])()[0].places  # type: ignore[union-attr]
    assert pins.near(place, time.monotonic()) is not None
    assert pins.confirm() == set()
    pins.close()
    assert users(store) == [0]
    assert store._engine.mappings.imports == 1


def one_chunk(provider: MiniProvider, number: int) -> ReplicateConfig:
    return ReplicateConfig(preferred_segments=(f"{provider.endpoint}/numa0/{number}",))


def test_a_guess_follows_what_is_really_used_and_does_not_keep_it_from_being_mapped(master: Master) -> None:
    """Four chunks used once are not expected ever after, in the place of those in use."""
    with (
        MiniProvider(master.address, chunks=[2 * MIB] * 8) as provider,
        EgmStore.connect(master.address, timing=Timing(retry=2.0), max_mappings=5) as store,
    ):
        for at in range(8):
            store.put(f"k{at}", payload(f"k{at}", 1000), config=one_chunk(provider, at))
        places = [each.places[0].address for each in store._engine.master.locate([f"k{at}" for at in range(8)])()]  # type: ignore[union-attr]
        assert len(set(places)) == len({place // (2 * MIB) for place in places}) == 8
        memory = Memory(8000)
        store.register_buffer(memory.address, memory.nbytes)
        store.batch_get_into([f"k{at}" for at in range(4)], [memory.address + 1000 * at for at in range(4)], [1000] * 4)
        for at in range(4, 8):
            store.get(f"k{at}")
        before = store._engine.mappings.imports
        for turn in range(20):
            assert store.get(f"k{4 + turn % 4}") == payload(f"k{4 + turn % 4}", 1000)
        assert store._engine.mappings.imports == before
        assert {start for _, start in store._engine.usual} <= {place // (2 * MIB) * (2 * MIB) for place in places[4:]}


def test_a_guess_makes_room_for_what_has_to_be_mapped(master: Master) -> None:
    with (
        MiniProvider(master.address, chunks=[2 * MIB] * 2) as provider,
        EgmStore.connect(master.address, timing=Timing(retry=2.0), max_mappings=1) as store,
    ):
        for at in range(2):
            store.put(f"k{at}", payload(f"k{at}", 1000), config=one_chunk(provider, at))
        most = []
        mapped = store._engine.bindings.map_chunk

        def map_chunk(*chunk: Any) -> Any:
            most.append(store._engine.mappings.count)
            return mapped(*chunk)

        store._engine.bindings.map_chunk = map_chunk  # type: ignore[method-assign]
        for turn in range(6):
            assert store.get(f"k{turn % 2}") == payload(f"k{turn % 2}", 1000)
        assert most
        assert max(most) == 1


def test_what_was_only_expected_counts_for_nothing(master: Master) -> None:
    """It is neither kept while a transfer goes on, nor is a copy doubted because it goes."""
    copier = PausingCopier()
    copier.armed = False
    with (
        MiniProvider(master.address, chunks=[2 * MIB] * 2) as provider,
        EgmStore.connect(master.address, timing=Timing(retry=2.0), copier=copier) as store,
    ):
        for at in range(2):
            store.put(f"k{at}", payload(f"k{at}", 1000), config=one_chunk(provider, at))
        memory = Memory(1000)
        store.register_buffer(memory.address, 1000)
        store.get("k0")
        assert len(store._engine.usual) == 1
        transfer = store.get_into_async("k1", memory.address, 1000)
        assert sorted(users(store)) == [0, 1]
        assert transfer.result() == 1000
        pins = store._engine.pins()
        store.get("k0")
        pins.expect(store._engine.usual)
        assert sorted(users(store)) == [0, 1]
        assert pins.used() == []
        assert pins.watched
        assert pins.confirm() == set()
        pins.expect_no_more()
        assert users(store) == [0, 0]
        pins.close()


def test_what_is_not_mapped_any_more_is_not_imported_for_a_guess(store: EgmStore) -> None:
    store.put("k", payload("k", MIB))
    store._engine.mappings.drop(lambda key: True)
    pins = expected(store)
    assert users(store) == []
    assert store._engine.mappings.imports == 1
    pins.close()
    assert store.get("k") == payload("k", MIB)


def test_a_provider_that_is_gone_is_not_asked_for_a_guess(master: Master) -> None:
    with EgmStore.connect(master.address, timing=Timing(retry=2.0, bind=30.0)) as store:
        with MiniProvider(master.address, chunks=[16 * MIB]) as first:
            store.put("k", payload("k", MIB))
            ((endpoint, _),) = store._engine.usual
            first.kill()
        with MiniProvider(master.address, chunks=[16 * MIB]) as second:
            began = time.monotonic()
            pins = expected(store)
            assert time.monotonic() - began < 1.0
            assert users(store) in ([], [0])
            pins.close()
            store.remove("k", force=True)
            for at in range(20):  # some are given space of the one that is gone, until the Master forgets it
                try:
                    store.put(f"new-{at}", payload("new", 1000))
                    break
                except EgmError:
                    time.sleep(1)
            assert store.get(f"new-{at}") == payload("new", 1000)
            assert second.endpoint != endpoint


def test_a_binding_made_after_the_question_is_no_answer_to_it(store: EgmStore) -> None:
    store.put("k", payload("k", MIB))
    asked = store._engine.master.locate(["k"])
    asked()
    (binding,) = store._engine.bindings.known()
    binding.bound_at = time.monotonic()  # as if it had been bound anew meanwhile
    pins = expected(store)
    at, spots = asked.columns()
    assert list(at) == [0]
    for column in (3, 4):
        assert pins.line_up(spots, spots.sizes, asked.asked_at, column) is None
    assert pins.line_up(spots, spots.sizes, time.monotonic(), 3) is not None
    assert pins.line_up(spots, [size + 1 for size in spots.sizes], time.monotonic(), 3) is None
    pins.close()
    assert users(store) == [0]


def test_chunks_that_share_a_part_of_the_address_space_are_told_apart(master: Master) -> None:
    """Chunks smaller than the parts by which they are found."""
    with (
        MiniProvider(master.address, chunks=[2 * MIB] * 6),
        EgmStore.connect(master.address, timing=Timing(retry=2.0)) as store,
    ):
        memory, back = Memory(6 * MIB), Memory(6 * MIB)
        for each in (memory, back):
            store.register_buffer(each.address, each.nbytes)
        size = 128 << 10
        data = b"".join(payload(f"part-{at}", size) for at in range(40))
        memory.write(data)
        keys = [f"k{at}" for at in range(40)]
        at = [memory.address + n * size for n in range(40)]
        for _ in range(3):
            assert store.batch_put_from(keys, at, [size] * 40) == [size] * 40
            places = {each.places[0].address // (2 * MIB) for each in store._engine.master.locate(keys)()}  # type: ignore[union-attr]
            assert len(places) > 1
            back.write(bytes(len(data)))
            assert store.batch_get_into(keys, [back.address + n * size for n in range(40)], [size] * 40) == [size] * 40
            assert back.read(len(data)) == data
            for key in keys:
                store.remove(key, force=True)


def test_a_batch_over_providers_whose_names_differ_in_length_is_lined_up_as_well(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = next(port for port in range(9999, 5000, -1) if _is_free(port))
    lined: list[bool] = []
    line_up = Pins.line_up

    def noted(*arguments: Any) -> Any:
        found = line_up(*arguments)
        lined.append(found is not None)
        return found

    with (
        MiniProvider(master.address, chunks=[16 * MIB], port=short) as one,
        MiniProvider(master.address, chunks=[16 * MIB]) as other,
        EgmStore.connect(master.address, timing=Timing(retry=2.0)) as store,
    ):
        assert len(one.endpoint) < len(other.endpoint)
        count, size = 40, 64 << 10
        memory, back = Memory(count * size), Memory(count * size)
        for each in (memory, back):
            store.register_buffer(each.address, each.nbytes)
        data = b"".join(payload(f"part-{at}", size) for at in range(count))
        memory.write(data)
        at = [size * number for number in range(count)]
        for turn in range(2):  # the second with both bound
            if turn:
                monkeypatch.setattr(Pins, "line_up", noted)
            keys = [f"{turn}-{number}" for number in range(count)]
            assert store.batch_put_from(keys, [memory.address + each for each in at], [size] * count) == [size] * count
            assert store.batch_get_into(keys, [back.address + each for each in at], [size] * count) == [size] * count
            assert back.read(len(data)) == data
            back.write(bytes(len(data)))
        endpoints = {each.places[0].endpoint for each in store._engine.master.locate(keys)()}  # type: ignore[union-attr]
        assert endpoints == {one.endpoint, other.endpoint}
    assert lined
    assert all(lined)


def test_what_is_there_already_or_missing_leaves_the_others_of_a_batch_be(
    store: EgmStore, memory: Memory, master: Master
) -> None:
    count, size = 60, 32 << 10
    data = b"".join(payload(f"part-{at}", size) for at in range(count))
    memory.write(data)
    back = Memory(count * size)
    store.register_buffer(back.address, back.nbytes)
    there = {f"k{at}" for at in range(0, count, 7)}
    for key in there:
        store.put(key, payload(key, size))
    keys = [f"k{at}" for at in range(count)]
    results = store.batch_put_from(keys, [memory.address + size * at for at in range(count)], [size] * count)
    assert [isinstance(each, ObjectExists) for each in results] == [key in there for key in keys]
    assert {each for each in results if not isinstance(each, EgmError)} == {size}
    gone = {f"k{at}" for at in range(0, count, 5)}
    two = store.put_from("two", memory.address, 2 * size)
    for key in gone:
        store.remove(key, force=True)
    capacities = [size] * count
    capacities[3] = size + 1000  # larger than the object
    asked = [*keys[:40], "two", *keys[41:]]  # and one that is larger than its buffer
    got = store.batch_get_into(asked, [back.address + size * at for at in range(count)], capacities)
    for at, (key, result) in enumerate(zip(asked, got, strict=True)):
        if key == "two":
            assert isinstance(result, InvalidBuffer)
            assert str(two) in result.message
        elif key in gone:
            assert isinstance(result, ObjectNotFound)
        else:
            assert result == size, key
            wanted = payload(key, size) if key in there else payload(f"part-{at}", size)
            assert back.read(size, size * at) == wanted, key
    assert users(store) == [0] * len(users(store))
    assert len(store._locks) == 0


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_keys_are_free_when_whoever_held_them_is_gone_without_a_word() -> None:
    locks = KeyLocks()
    held = Held()
    locks.acquire(["a", "b"], 1.0, held)
    assert len(locks) == 2
    with pytest.raises(ObjectBusy, match="another put"):
        locks.acquire({"b", "c"}, 0.01, Held())
    assert len(locks) == 2
    del held
    assert len(locks) == 0
    other = Held()
    locks.acquire({"b", "c"}, 0.01, other)
    waited: list[Any] = []
    waiting = Held()
    thread = threading.Thread(target=lambda: waited.append(locks.acquire(["c"], 10.0, waiting)))
    thread.start()
    locks.release(other)
    locks.release(other)
    thread.join(5)
    assert waited == [None]
    assert len(locks) == 1
