"""Handles of gets and puts that were begun and not waited for. A copy's end alone is never the whole answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from egmctl.consumer.context import keeps_device
from egmctl.consumer.errors import StoreClosed, TransferTimeout
from egmctl.consumer.rounds import Round
from egmctl.errors import EgmError

__all__ = ["BatchTransfer", "Transfer"]


class BatchTransfer:
    """Several gets or several puts under way. `result` must be called, or the store closed: until then a put holds its
    key and its space, and a get the chunk it reads."""

    def __init__(
        self,
        round_: Round[Any, Any],
        finish: Callable[[], list[int | EgmError]],
        release: Callable[[], None],
    ) -> None:
        self._round = round_
        self._driver = round_.driver
        self._finish = finish
        self._release = release
        self._lock = threading.Lock()
        self._results: list[int | EgmError] | None = None
        self._abandoned = False

    def begin(self) -> None:
        """What the store does first; not under way before it returns."""
        with self._lock:
            if not self._abandoned:
                self._round.begin()

    @keeps_device
    def done(self) -> bool:
        """Whether the copies are over, without waiting. What they are worth only `result` says."""
        return self._results is not None or self._abandoned or self._round.done()

    @keeps_device
    def result(self, timeout: float | None = None) -> list[int | EgmError]:
        """Bytes of each object, or its error. Waits up to ``timeout`` seconds for the copies (`TransferTimeout`; it may
        be called again), then checks lease, identity and Master, publishes puts, repeats gets where that is allowed."""
        with self._lock:
            if self._results is not None:
                return list(self._results)
            if self._abandoned:
                raise StoreClosed("the transfer was abandoned", hint="a put was not published; start it again")
            if not self._round.wait(timeout):
                raise TransferTimeout(f"not finished within {timeout:g} s", hint="call result() again")
            try:
                self._results = self._finish()
            except BaseException:
                self._abandoned = True
                self._round.abandon(torn=True)
                raise
            finally:
                self._release()
            return list(self._results)

    @keeps_device
    def abandon(self, *, torn: bool = False) -> None:
        """Wait for the copies, give a put's space back, believe nothing. After `result` it does nothing. ``torn``: by
        an interrupt, after which copies may run that nobody noted."""
        with self._lock:
            if self._results is None and not self._abandoned:
                self._abandoned = True
                try:
                    self._round.abandon(torn=torn)
                finally:
                    self._release()


class Transfer:
    """One get or put under way: as `BatchTransfer`, for one object."""

    def __init__(self, batch: BatchTransfer) -> None:
        self._batch = batch

    def done(self) -> bool:
        """Whether the copy is over, without waiting. What it is worth only `result` says."""
        return self._batch.done()

    def result(self, timeout: float | None = None) -> int:
        """Bytes put or got; raises what it failed with. See `BatchTransfer.result`."""
        return single(self._batch.result(timeout))

    def abandon(self) -> None:
        """See `BatchTransfer.abandon`."""
        self._batch.abandon()


def single(results: Sequence[int | EgmError]) -> int:
    """The result of the only item; raises its error."""
    (result,) = results
    if isinstance(result, EgmError):
        raise result
    return result


def all_or_raise(results: Sequence[int | EgmError]) -> list[int]:
    """All results, or the first error."""
    sizes = []
    for result in results:
        if isinstance(result, EgmError):
            raise result
        sizes.append(result)
    return sizes
