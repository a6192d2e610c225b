"""Streams of the model: ordered queues, each worked off by a thread of its own, so that "async" is."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

__all__ = ["Event", "Mark", "Stream"]


class Mark:
    """A point in a stream; reached once everything before it is done."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.when = 0.0

    def reach(self) -> None:
        self.when = time.perf_counter()
        self._reached.set()

    def reached(self) -> bool:
        return self._reached.is_set()

    def wait(self) -> None:
        self._reached.wait()


class Event:
    """Stands for the mark of its last record; never recorded counts as done."""

    def __init__(self, device: int, timing: bool) -> None:
        self.device = device
        self.timing = timing
        self.mark: Mark | None = None


class Stream:
    """Work in order, on one device."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="model-stream", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def mark(self) -> Mark:
        mark = Mark()
        self._work.put(mark.reach)
        return mark

    def synchronize(self) -> None:
        self.mark().wait()

    def close(self) -> None:
        """What is queued is still done."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
