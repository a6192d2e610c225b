"""What callers and the Master give: kinds of integers, lists that change, batches of nothing, less space than asked."""

from __future__ import annotations

import time
from typing import Any

import pytest

from egmctl.consumer import EgmStore, Timing, engine, master_link
from egmctl.consumer.errors import InterruptedPut, InvalidRequest, NoSpace
from egmctl.errors import EgmError
from egmctl.mooncake import caller
from tests.consumer.mini_provider import MiniProvider
from tests.consumer.support import Background, Memory, PausingCopier
from tests.support.master import Master

MIB = 1 << 20


def test_integers_of_other_kinds_are_taken_and_a_provider_that_died_is_not_believed(
    master: Master, provider: MiniProvider
) -> None:
    import numpy as np

    copier = PausingCopier()
    copier.armed = False
    with EgmStore.connect(master.address, copier=copier, timing=Timing(retry=1.0)) as store:
        memory = Memory(8 * MIB)
        store.register_buffer(memory.address, memory.nbytes)
        keys = np.array([f"k{at}" for at in range(3)])
        addresses = np.arange(memory.address, memory.address + 3 * MIB, MIB)
        sizes = np.full(3, MIB)
        assert store.batch_put_from(keys, addresses, sizes) == [MIB] * 3
        copier.armed = True
        reading = Background(lambda: store.batch_get_into(keys, addresses, sizes))
        assert copier.paused.wait(10)
        provider.kill()
        copier.go.set()
        assert all(isinstance(each, EgmError) for each in reading.result())


def test_a_batch_of_nothing_is_over_at_once(store: EgmStore) -> None:
    assert store.batch_put_from_async([], [], []).result() == []
    assert store.batch_get_into_async([], [], []).result() == []
    assert store.batch_put_from([], [], []) == store.batch_get_into([], [], []) == []


def test_what_is_no_integer_is_said_so(store: EgmStore, memory: Memory) -> None:
    with pytest.raises(InvalidRequest, match="integers"):
        store.batch_put_from(["k"], ["there"], [10])  # type: ignore[list-item]


def test_what_a_caller_does_to_its_lists_meanwhile_changes_nothing(store: EgmStore, memory: Memory) -> None:
    memory.write(b"A" * 4096 + b"B" * 4096)
    keys, addresses, sizes = ["one"], [memory.address], [4096]
    transfer = store.batch_put_from_async(keys, addresses, sizes)
    keys[0], addresses[0] = "two", memory.address + 4096
    store._engine.master._client.rpc._link.fail("cut off")  # type: ignore[union-attr]
    assert transfer.result() == [4096]
    assert (store.exists("one"), store.exists("two")) == (True, False)
    assert store.get("one") == b"A" * 4096


def test_integers_of_narrow_kinds_are_not_added_up(store: EgmStore, memory: Memory) -> None:
    import numpy as np

    class Number:
        def __index__(self) -> int:
            return 64

    count = 2100
    sizes = np.full(count, 64, dtype=np.int8)
    assert store.batch_put_from([f"n{at}" for at in range(count)], [memory.address] * count, sizes) == [64] * count  # type: ignore[arg-type]
    assert store.batch_put_from_multi_buffers(["pair"], [[(memory.address, np.int32(4096))]]) == [4096]  # type: ignore[list-item]
    assert store.batch_put_from(["own"], [memory.address], [Number()]) == [64]  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match="integers"):
        store.batch_put_from(["float"], [memory.address], [64.0])  # type: ignore[list-item]


@pytest.mark.parametrize("columns", [True, False], ids=["as columns", "one by one"])
def test_less_space_than_was_asked_for_is_given_back(
    store: EgmStore, memory: Memory, monkeypatch: pytest.MonkeyPatch, columns: bool
) -> None:
    store.put_from("before", memory.address, 100)  # the chunk is in use, as it mostly is
    given = caller.read_spots
    places = master_link._memory
    shortened = []

    def short(wanted: bytes, body: bytes) -> Any:
        spots = given(wanted, body)
        if spots is None or not columns:
            return None
        shortened.append(spots)
        return spots._replace(sizes=[1] * len(spots.sizes))

    def short_places(rows: Any, status: int) -> Any:
        found, elsewhere = places(rows, status)
        shortened.append(found)
        return tuple(place._replace(nbytes=1) for place in found), elsewhere

    with monkeypatch.context() as patch:
        patch.setattr(caller, "read_spots", short)
        patch.setattr(master_link, "_memory", short_places)
        if not columns:
            patch.setattr(master_link, "spots_of", lambda rows, status: ((), None))
        for result in store.batch_put_from(["y", "z"], [memory.address] * 2, [4096] * 2):
            assert isinstance(result, InterruptedPut)
            assert "less space" in result.message
            assert result.facts["revoked"]
    assert shortened
    assert not store.exists("y")


def test_a_size_that_was_refused_is_asked_for_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chunks:
        def largest_chunk(self) -> int:
            return 100

    oversize = engine.Oversize(Chunks())  # type: ignore[arg-type]
    now = time.monotonic()
    monkeypatch.setattr(engine.time, "monotonic", lambda: now)
    oversize.note(200)
    assert oversize.active
    assert isinstance(oversize.refusal("k", 200), NoSpace)
    now += 60
    assert not oversize.active
    assert oversize.refusal("k", 200) is None
