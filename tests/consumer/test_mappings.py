"""The cache of imports: once, bounded, by identity, and never under a user's feet."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

from egmctl.consumer.errors import StoreClosed
from egmctl.consumer.mappings import Lease, MappingCache
from egmctl.errors import EgmError, FailedError
from egmctl.memory.base import ReleaseError


class Fake:
    def __init__(self, nbytes: int = 10) -> None:
        self.address = 1 << 40
        self.nbytes = nbytes
        self.closed = 0
        self.failing = False

    def close(self) -> None:
        if self.failing:
            raise ReleaseError("cuMemUnmap: no")
        self.closed += 1


def test_one_import_serves_any_number_of_threads_and_keeps_no_other_key_waiting() -> None:
    cache = MappingCache()
    begun, go = threading.Event(), threading.Event()
    imports = []

    def slow() -> Fake:
        imports.append(1)
        begun.set()
        assert go.wait(10)
        return Fake()

    leases = []
    threads = [
        threading.Thread(target=lambda: leases.append(cache.acquire("slow", 10, slow)), daemon=True) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    cache.acquire("other", 10, Fake).release()  # while the slow one is still at it
    go.set()
    for thread in threads:
        thread.join(10)
    assert len(leases) == 8
    assert len(imports) == 1
    assert len({id(lease.mapping) for lease in leases}) == 1
    assert cache.imports == 2


def test_a_failed_import_leaves_nothing_and_is_tried_again_the_next_time() -> None:
    cache = MappingCache()

    def fail() -> Fake:
        time.sleep(0.05)
        raise FailedError("cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE (1)")

    errors = []

    def ask() -> None:
        try:
            cache.acquire("k", 10, fail)
        except EgmError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(errors) == 4
    assert (cache.count, cache.nbytes) == (0, 0)
    assert cache.acquire("k", 10, Fake).mapping.nbytes == 10


def test_an_interrupted_import_wakes_those_that_wait_for_it() -> None:
    cache = MappingCache()
    begun = threading.Event()
    outcome = []

    def interrupted() -> Fake:
        begun.set()
        time.sleep(0.1)
        raise KeyboardInterrupt

    def wait() -> None:
        begun.wait(10)
        try:
            cache.acquire("k", 10, Fake).release()
        except EgmError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        cache.acquire("k", 10, interrupted)
    thread.join(10)
    assert not thread.is_alive()
    assert outcome
    assert cache.count == 0


def test_idle_mappings_beyond_the_bounds_go_the_least_recently_used_first() -> None:
    made = {key: Fake(100) for key in "abcd"}
    cache = MappingCache(max_bytes=250)
    for key in "abab":
        cache.acquire(key, 100, lambda key=key: made[key]).release()
    cache.acquire("a", 100, lambda: made["a"]).release()
    cache.acquire("c", 100, lambda: made["c"]).release()
    assert [made[key].closed for key in "abcd"] == [0, 1, 0, 0]
    assert cache.nbytes == 200
    few = MappingCache(max_count=1)
    few.acquire("a", 1, lambda: made["d"]).release()
    few.acquire("b", 1, Fake).release()
    assert made["d"].closed == 1
    assert few.count == 1


def test_a_mapping_in_use_is_kept_whatever_the_bounds_and_goes_when_idle() -> None:
    first, second = Fake(100), Fake(100)
    cache = MappingCache(max_bytes=100)
    one = cache.acquire("a", 100, lambda: first)
    two = cache.acquire("b", 100, lambda: second)
    assert (first.closed, second.closed) == (0, 0)
    one.release()
    one.release()  # twice is once
    assert first.closed == 1
    two.release()
    assert second.closed == 0
    assert cache.nbytes == 100


def test_dropped_mappings_go_at_once_when_idle_and_with_their_last_user_otherwise() -> None:
    idle, used, again = Fake(), Fake(), Fake()
    cache = MappingCache()
    cache.acquire(("e", 1), 10, lambda: idle).release()
    one = cache.acquire(("e", 2), 10, lambda: used)
    two = cache.acquire(("e", 2), 10, Fake)
    cache.drop(lambda key: key[0] == "e")  # type: ignore[index]
    assert (idle.closed, used.closed) == (1, 0)
    fresh = cache.acquire(("e", 2), 10, lambda: again)  # the old one is not given out any more
    assert fresh.mapping is again
    one.release()
    assert used.closed == 0
    two.release()
    assert used.closed == 1
    fresh.release()
    assert cache.count == 1
    cache.close()
    assert (cache.count, cache.nbytes) == (0, 0)
    with pytest.raises(StoreClosed):
        cache.acquire("x", 1, Fake)


def test_what_could_not_be_unmapped_is_tried_again_by_close() -> None:
    stubborn = Fake()
    stubborn.failing = True
    cache = MappingCache(max_count=1)
    cache.acquire("a", 10, lambda: stubborn).release()
    cache.acquire("b", 10, Fake).release()  # does not fail for the other one's sake
    with pytest.raises(ReleaseError):
        cache.close()
    stubborn.failing = False
    cache.close()
    assert stubborn.closed == 1


def test_one_that_cannot_be_unmapped_does_not_keep_the_others_mapped() -> None:
    mappings = [Fake(), Fake(), Fake()]
    cache = MappingCache()
    for number, mapping in enumerate(mappings):
        mapping.failing = True
        cache.acquire(number, 10, lambda mapping=mapping: mapping).release()  # type: ignore[misc]
    cache.drop(lambda key: True)
    mappings[1].failing = mappings[2].failing = False
    with pytest.raises(ReleaseError):
        cache.close()
    assert [mapping.closed for mapping in mappings] == [0, 1, 1]
    mappings[0].failing = False
    cache.close()
    assert [mapping.closed for mapping in mappings] == [1, 1, 1]


def test_what_a_failed_import_could_not_undo_is_undone_by_close() -> None:
    left = Fake()

    def fail() -> Fake:
        error = ReleaseError("cuMemUnmap: no")
        error.left = left  # type: ignore[assignment]
        raise error

    cache = MappingCache()
    with pytest.raises(ReleaseError):
        cache.acquire("k", 10, fail)
    assert cache.count == 0
    cache.close()
    assert left.closed == 1


def test_an_interrupt_just_behind_an_import_loses_neither_the_mapping_nor_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = MappingCache()
    made, again = Fake(), Fake()
    held: list[Lease] = []

    def interrupted(future: object, mapping: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Future, "set_result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.acquire("k", 10, lambda: made, held)
    assert cache.count == cache.nbytes == 0
    cache.release(held)
    assert not made.closed  # it is not known who holds it: with the cache it goes
    cache.acquire("k", 10, lambda: again, held)
    assert cache.at_hand("k", held) is not None
    assert cache.at_hand("other", held) is None
    cache.release(held)
    cache.release(held)
    cache.close()
    assert (made.closed, again.closed) == (1, 1)
