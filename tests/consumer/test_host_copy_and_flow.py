"""Copies by the CPU, and their limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from egmctl.consumer.errors import InvalidRequest
from egmctl.consumer.flow import FlowOptions, Throttle
from egmctl.consumer.host_copy import Completion, Done, Fragment, Group, HostCopier
from tests.consumer.support import Memory, payload

MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, MIB, MIB + 1, 8 * MIB + 1, 20 * MIB + 7])
@pytest.mark.parametrize("threads", [1, 3])
def test_copies_of_any_size_arrive_whole(nbytes: int, threads: int) -> None:
    source, destination = Memory(nbytes + 64), Memory(nbytes + 64)
    source.write(payload("x", nbytes), 3)
    copier = HostCopier(threads)
    done = copier.copy([(destination.address + 5, source.address + 3, nbytes)])
    assert done.wait(10)
    assert done.done()
    assert destination.read(nbytes + 6) == bytes(5) + payload("x", nbytes) + b"\0"
    copier.close()
    copier.close()


def test_many_fragments_are_shared_out_without_loss() -> None:
    source, destination = Memory(12 * MIB), Memory(12 * MIB)
    source.write(payload("y", 12 * MIB))
    copier = HostCopier(4)
    size = 100_003
    fragments = [
        (destination.address + at, source.address + at, min(size, 12 * MIB - at)) for at in range(0, 12 * MIB, size)
    ]
    assert copier.copy(fragments).wait(10)
    assert destination.read(12 * MIB) == payload("y", 12 * MIB)
    copier.close()


def test_where_no_thread_can_be_had_nothing_is_copied_after_the_copy_is_said_to_be_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nbytes = 12 * MIB
    source, destination = Memory(nbytes), Memory(nbytes)
    source.write(payload("z", nbytes))
    copier = HostCopier(4)
    start, started = threading.Thread.start, []

    def only_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as few:
        few.setattr(threading.Thread, "start", only_one)
        assert copier.copy([(destination.address, source.address, nbytes)]).wait(10)
    assert started
    assert destination.read(nbytes) == payload("z", nbytes)
    destination.write(bytes(nbytes))  # stands for the next owner of the memory
    copier.close()
    assert destination.read(nbytes) == bytes(nbytes)


def test_a_group_waits_for_all_its_parts_also_when_one_failed() -> None:
    late = Slow(0.1)

    class Failed(Done):
        def wait(self, timeout: float | None = None) -> bool:
            raise InvalidRequest("failed")

    group = Group([Failed(), late])
    with pytest.raises(InvalidRequest):
        group.wait(None)
    assert late.done()


class Slow:
    """A copy that is over some time after it was begun."""

    def __init__(self, seconds: float) -> None:
        self._end = threading.Event()
        self._timer = threading.Timer(seconds, self._end.set)
        self._timer.daemon = True
        self._timer.start()

    def wait(self, timeout: float | None = None) -> bool:
        return self._end.wait(timeout)

    def done(self) -> bool:
        return self._end.is_set()


class Recording:
    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.pieces: list[int] = []
        self.running: list[tuple[Completion, int]] = []
        self.most = 0

    def copy(
        self, fragments: Sequence[Fragment], *, device: int | None = None, stream: int | None = None
    ) -> Completion:
        nbytes = sum(fragment[2] for fragment in fragments)
        self.pieces.append(nbytes)
        self.running = [(each, size) for each, size in self.running if not each.done()]
        completion: Completion = Slow(self.seconds) if self.seconds else Done()
        self.running.append((completion, nbytes))
        self.most = max(self.most, sum(size for _, size in self.running))
        return completion


def _copy(throttle: Throttle, copier: Recording, fragments: Sequence[Fragment]) -> Completion:
    return throttle.copy(copier, fragments, device=None, stream=None)


def test_flow_control_is_off_unless_asked_for() -> None:
    copier = Recording()
    _copy(Throttle(FlowOptions()), copier, [(0, 0, 10 * MIB)])
    assert copier.pieces == [10 * MIB]


def test_transfers_are_cut_into_chunks() -> None:
    copier = Recording()
    _copy(Throttle(FlowOptions(chunk_bytes=1000)), copier, [(0, 0, 2500), (9000, 9000, 300)])
    assert copier.pieces == [1000, 1000, 800]


def test_no_more_than_so_many_bytes_are_in_flight_over_all_threads() -> None:
    copier = Recording(0.03)
    throttle = Throttle(FlowOptions(max_in_flight_bytes=1000, chunk_bytes=400))
    threads = [threading.Thread(target=_copy, args=(throttle, copier, [(0, 0, 2000)])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sum(copier.pieces) == 6000
    assert copier.most <= 1000


def test_a_rate_is_kept_after_one_burst() -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    throttle = Throttle(FlowOptions(rate_limit=1_000_000, chunk_bytes=100_000), clock=lambda: now[0], sleep=sleep)
    _copy(throttle, Recording(), [(0, 0, 5_000_000)])
    assert now[0] - 100.0 == pytest.approx(4.0, rel=0.01)


def test_what_stops_a_transfer_waits_for_the_pieces_already_begun() -> None:
    copier = Recording(0.05)
    calls = []

    def stop() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise InvalidRequest("stop")

    throttle = Throttle(FlowOptions(chunk_bytes=10))
    with pytest.raises(InvalidRequest):
        throttle.copy(copier, [(0, 0, 100)], device=None, stream=None, before=stop)
    assert copier.pieces == [10, 10]
    assert all(completion.done() for completion, _ in copier.running)
    time.sleep(0)
    assert throttle.in_flight <= 20


def test_negative_limits_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        FlowOptions(rate_limit=-1)
