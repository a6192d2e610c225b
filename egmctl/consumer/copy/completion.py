"""The end of a copy on a GPU, as a caller sees it: an event, and for a gather the error word."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from egmctl.consumer.copy.pool import Borrowed
from egmctl.consumer.errors import BadOffset
from egmctl.errors import EgmError
from egmctl.memory.driver import CudaError

__all__ = ["Finished", "Submitted"]

_HOT = 100e-6  # seconds for which the event is looked at again and again: a nap alone would take as long
_PROMPT_HOT = 1e-3  # the same for a copy that is soon over
_NAP = 0.004  # of what has been waited: the end is seen that much late, at most
_LONGEST_NAP = 1e-3


class Finished:
    """A copy of nothing."""

    def wait(self, timeout: float | None = None) -> bool:
        return True

    def done(self) -> bool:
        return True

    def order(self, stream: int) -> None:
        """Nothing is left to wait for."""


class Submitted:
    """A copy that was queued; over when all of ``events`` are. ``keep`` is held until then (arrays that it reads).
    ``prompt`` says that nothing but the link holds it up, and that not for long: its end is then looked for often.

    A gather's bad offset is found by the kernel: ``wait`` raises `BadOffset`, and what the gather wrote is not to be
    used. `order` lets a stream go on after the copy, but only ``wait`` says whether it was good.
    """

    def __init__(
        self,
        borrowed: Borrowed,
        events: Sequence[int],
        keep: Any = None,
        what: tuple[str, int] = ("copy", 0),
        *,
        prompt: bool = False,
    ) -> None:
        self._borrowed = borrowed
        self._events = tuple(events)
        self._keep = keep
        self._what = what
        self._prompt = prompt
        self._lock = threading.Lock()
        self._over = False
        self._error: EgmError | None = None

    def done(self) -> bool:
        """Without waiting; a copy that failed is done."""
        if self._over:
            return True
        pool = self._borrowed.pool
        pool.enter()
        try:
            for event in self._events:
                if not pool.driver.event_query(event):
                    return False
        except CudaError as error:
            self._finish(error)
            return True
        self._finish(None)
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """True when done, False when ``timeout`` seconds passed first, also when the device stands still. Other threads
        run meanwhile. Without a timeout the driver waits, for as long as the device takes.

        Raises `BadOffset` for an entry outside its object, `CudaError` when the device failed.
        """
        if not self._over:
            if timeout is None:
                self.settle()
            elif not self._look_until(timeout):
                return False
        if self._error is not None:
            raise self._error
        return True

    def _look_until(self, timeout: float) -> bool:
        """The driver has no wait that ends: the events are looked at, with naps that are short against what has been
        waited, so that a copy's end is not slept over."""
        hot = _PROMPT_HOT if self._prompt else _HOT
        began = time.monotonic()
        while not self.done():
            waited = time.monotonic() - began
            if waited >= timeout:
                return False
            time.sleep(0.0 if waited < hot else min(waited * _NAP, timeout - waited, _LONGEST_NAP))
        return True

    def settle(self) -> None:
        """Wait without raising what the copy failed with."""
        if self._over:
            return
        pool = self._borrowed.pool
        pool.enter()
        try:
            for event in self._events:
                pool.driver.event_synchronize(event)
        except CudaError as error:
            self._finish(error)
            return
        self._finish(None)

    def order(self, stream: int) -> None:
        """What is queued on ``stream`` from now on starts after this copy."""
        # an event given back meanwhile only makes the stream wait longer
        if not self._over:
            pool = self._borrowed.pool
            pool.enter()
            for event in self._events:
                pool.driver.stream_wait_event(stream, event)

    def _finish(self, error: CudaError | None) -> None:
        with self._lock:
            if self._over:
                return
            if error is not None:
                # the device's context is lost, and with it what was borrowed
                self._error = error
                self._over = True
                self._borrowed.pool.forget(self)
                self._borrowed.pool.lose()
                return
            word = self._borrowed.word
            if word is not None and word.raised():
                self._borrowed.pool.driver.use_device(self._borrowed.pool.device)
                try:
                    first = word.first_bad(self._borrowed.pool.driver)
                    self._error = BadOffset(
                        f"entry {first} lies outside its object",
                        where=f"{self._what[0]} of {self._what[1]} entries",
                        hint="offsets are bytes from the start of the object; an entry must end inside it",
                        facts={"entry": first},
                    )
                except CudaError as failure:
                    self._error = failure
            self._over = True
            self._keep = None
        self._borrowed.pool.forget(self)
        self._borrowed.give_back()
