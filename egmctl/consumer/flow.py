"""Flow control, since no NVLink QoS exists: bytes in flight, chunked transfers, a rate. All off unless asked for."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from egmctl.consumer.errors import InvalidRequest
from egmctl.consumer.host_copy import Completion, Copier, Fragment, Group

__all__ = ["FlowOptions", "Throttle"]


@dataclass(frozen=True)
class FlowOptions:
    """``max_in_flight_bytes`` over all transfers of a store, ``chunk_bytes`` at most in one piece, ``rate_limit`` in
    bytes a second (a second's worth may pass in one burst at first). 0 is off."""

    max_in_flight_bytes: int = 0
    chunk_bytes: int = 0
    rate_limit: int = 0

    def __post_init__(self) -> None:
        if min(self.max_in_flight_bytes, self.chunk_bytes, self.rate_limit) < 0:
            raise InvalidRequest("a flow limit is negative", hint="0 switches a limit off")

    @property
    def active(self) -> bool:
        return bool(self.max_in_flight_bytes or self.chunk_bytes or self.rate_limit)

    @property
    def piece(self) -> int:
        """The largest piece that is submitted at once; 0 is any."""
        limits = [n for n in (self.max_in_flight_bytes, self.chunk_bytes, self.rate_limit) if n]
        return min(limits) if limits else 0


def _pieces(fragments: Sequence[Fragment], limit: int) -> Iterator[tuple[list[Fragment], int]]:
    """Groups of fragments of at most ``limit`` bytes each; a larger fragment is cut."""
    piece: list[Fragment] = []
    size = 0
    for destination, source, nbytes in fragments:
        done = 0
        while done < nbytes:
            take = min(limit - size, nbytes - done)
            piece.append((destination + done, source + done, take))
            done += take
            size += take
            if size == limit:
                yield piece, size
                piece, size = [], 0
    if piece:
        yield piece, size


class Throttle:
    """Submits copies no faster than the options allow; shared by all threads of a store."""

    def __init__(
        self,
        options: FlowOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options = options
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._queue: deque[tuple[Completion, int]] = deque()
        self._in_flight = 0
        self._tokens = float(options.rate_limit)
        self._filled = clock()

    @property
    def in_flight(self) -> int:
        """Bytes submitted and not yet known to be done."""
        with self._lock:
            return self._in_flight

    def copy(
        self,
        copier: Copier,
        fragments: Sequence[Fragment],
        *,
        device: int | None,
        stream: int | None,
        before: Callable[[], None] | None = None,
    ) -> Completion:
        """As ``copier.copy``; waits while a limit is reached. ``before`` is called ahead of each piece; what it raises
        is raised here once the pieces already submitted are over."""
        if not self._options.active:
            if before is not None:
                before()
            return copier.copy(fragments, device=device, stream=stream)
        submitted: list[Completion] = []
        limit = self._options.piece
        try:
            for piece, nbytes in _pieces(fragments, limit):
                self._reserve(nbytes)
                entered = False
                try:
                    if before is not None:
                        before()
                    completion = copier.copy(piece, device=device, stream=stream)
                    submitted.append(completion)
                    with self._lock:
                        self._queue.append((completion, nbytes))
                        entered = True
                finally:
                    if not entered:
                        with self._lock:
                            self._in_flight -= nbytes
        except BaseException:
            Group(submitted).wait(None)
            raise
        return submitted[0] if len(submitted) == 1 else Group(submitted)

    def _reserve(self, nbytes: int) -> None:
        rate = self._options.rate_limit
        if rate:
            with self._lock:
                now = self._clock()
                self._tokens = min(float(rate), self._tokens + (now - self._filled) * rate) - nbytes
                self._filled = now
                debt = -self._tokens / rate  # whoever comes next waits for this one's share as well
            if debt > 0:
                self._sleep(debt)
        limit = self._options.max_in_flight_bytes
        while True:
            with self._lock:
                while self._queue and (not limit or self._queue[0][0].done()):
                    self._in_flight -= self._queue.popleft()[1]
                if not limit or self._in_flight + nbytes <= limit:
                    self._in_flight += nbytes
                    return
                oldest = self._queue[0] if self._queue else None
            if oldest is None:  # reserved by threads about to submit
                self._sleep(0.0005)
                continue
            try:
                oldest[0].wait(0.05)
            except Exception:  # noqa: S110 - its owner is told; here only its end matters
                pass
