"""Copies by the CPU, between host memory and chunks mapped here, and the interface every copier keeps.

``ctypes.memmove`` lets go of Python's lock while it runs, so other threads copy at the same time; one large copy is
split over a few threads, since one core does not fill a memory bus.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Protocol

from egmctl.units import MIB

__all__ = ["Completion", "Copier", "Done", "Fragment", "Group", "HostCopier"]

Fragment = tuple[int, int, int]
"""(destination address, source address, bytes)."""

SPLIT_FROM = 8 * MIB
"""Copies larger than this use several threads; below it, handing over costs more than it saves."""
INLINE_UP_TO = 1 * MIB
"""Copies up to this are done before `HostCopier.copy` returns."""


class Completion(Protocol):
    """The end of a copy. Both may be called any number of times, from any thread."""

    def wait(self, timeout: float | None = None) -> bool:
        """True when done, False when ``timeout`` seconds passed first; raises what the copy failed with."""

    def done(self) -> bool:
        """Without waiting; a copy that failed is done."""


class Copier(Protocol):
    """Copies fragments. ``device`` is the GPU whose engines are used, ``stream`` a stream to be ordered after.

    One whose copies go on after `copy` returns also has ``quiesce()``: until none runs that was begun before.
    """

    def copy(
        self, fragments: Sequence[Fragment], *, device: int | None = None, stream: int | None = None
    ) -> Completion: ...


class Done:
    """A copy that is over."""

    def wait(self, timeout: float | None = None) -> bool:
        return True

    def done(self) -> bool:
        return True


class Group:
    """Several copies as one."""

    def __init__(self, parts: Sequence[Completion]) -> None:
        self._parts = tuple(parts)

    def wait(self, timeout: float | None = None) -> bool:
        """All are waited for, also when one has failed; the first failure is then raised."""
        until = None if timeout is None else time.monotonic() + timeout
        failure: Exception | None = None
        finished = True
        for part in self._parts:
            try:
                left = None if until is None else max(0.0, until - time.monotonic())
                finished = part.wait(left) and finished
            except Exception as error:
                failure = failure or error
        if failure is not None and finished:
            raise failure
        return finished

    def done(self) -> bool:
        return all(part.done() for part in self._parts)


class _Futures:
    def __init__(self, futures: list[Future[None]]) -> None:
        self._futures = futures

    def wait(self, timeout: float | None = None) -> bool:
        if wait(self._futures, timeout).not_done:
            return False
        for future in self._futures:
            future.result()
        return True

    def done(self) -> bool:
        return all(future.done() for future in self._futures)


def _move(fragments: Sequence[Fragment]) -> None:
    for destination, source, nbytes in fragments:
        ctypes.memmove(destination, source, nbytes)


class _Share:
    """A part of a copy, done once, by whoever claims it first."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self._unclaimed = [fragments]
        self.future: Future[None] = Future()

    def drop(self) -> None:
        """Nobody need do it any more; whoever has begun goes on."""
        if self._unclaimed:
            with suppress(IndexError):
                self._unclaimed.pop()
                self.future.set_result(None)

    def run(self) -> None:
        try:
            fragments = self._unclaimed.pop()
        except IndexError:
            return
        try:
            _move(fragments)
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(None)


class HostCopier:
    """Copies by the CPU. ``threads`` share large copies (the smaller of 4 and the CPUs, unless given)."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads if threads else min(4, len(os.sched_getaffinity(0)))
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: set[Future[None]] = set()
        self._lock = threading.Lock()

    def copy(
        self, fragments: Sequence[Fragment], *, device: int | None = None, stream: int | None = None
    ) -> Completion:
        """Small copies are over on return; larger ones run in threads of the copier."""
        total = sum(nbytes for _, _, nbytes in fragments)
        if total <= INLINE_UP_TO:
            _move(fragments)
            return Done()
        shares = [_Share(each) for each in self._shares(fragments, total)]
        try:
            for share in shares:
                self._under_way.add(share.future)
                share.future.add_done_callback(self._under_way.discard)
                self._hand_over(share)
        except BaseException:
            for share in shares:
                share.drop()
            wait([share.future for share in shares])  # they use memory that may be unmapped after this
            raise
        return _Futures([share.future for share in shares])

    def quiesce(self) -> None:
        """Until no copy runs that was begun before, also one that nobody has a handle of."""
        wait(list(self._under_way))

    def _hand_over(self, share: _Share) -> None:
        try:
            self._executor().submit(share.run)
        except RuntimeError:  # no more threads, or closed; what it has queued before it failed finds nothing to do
            share.run()

    def _shares(self, fragments: Sequence[Fragment], total: int) -> list[list[Fragment]]:
        if total <= SPLIT_FROM or self._threads == 1:
            return [list(fragments)]
        # 64-byte multiples, so that no two threads write one cache line of an aligned buffer
        limit = -(-total // self._threads) + 63 & ~63
        shares: list[list[Fragment]] = [[]]
        room = limit
        for destination, source, nbytes in fragments:
            done = 0
            while done < nbytes:
                if not room:
                    shares.append([])
                    room = limit
                piece = min(room, nbytes - done)
                shares[-1].append((destination + done, source + done, piece))
                done += piece
                room -= piece
        return shares

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="egm-copy")
            return self._pool

    def close(self) -> None:
        """Waits for copies under way."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
