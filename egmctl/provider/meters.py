"""What has happened in this agent, counted: what no other state remembers, for whoever watches it from outside."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from egmctl.provider.task import Cancelled

__all__ = ["Direction", "Meters"]

Direction = Literal["do", "undo"]


class Meters:
    """Written by the pool's worker, read by any thread. Seconds are of the monotonic clock."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._runs: Counter[tuple[str, str]] = Counter()
        self._seconds: dict[tuple[str, str], float] = {}
        self._failures: Counter[tuple[str, str]] = Counter()
        self._events: Counter[str] = Counter()

    @contextmanager
    def stage(self, name: str, direction: Direction) -> Iterator[None]:
        """Around one stage's work: its time, and whether it failed (being stopped on request is no failure)."""
        began = time.monotonic()
        failed = 0
        try:
            yield
        except Cancelled:
            raise
        except BaseException:
            failed = 1
            raise
        finally:
            key = (name, direction)
            with self._mutex:
                self._runs[key] += 1
                self._seconds[key] = self._seconds.get(key, 0.0) + time.monotonic() - began
                self._failures[key] += failed

    def count(self, event: str, by: int = 1) -> None:
        """``event`` is one of rollbacks, cleanups, remounts, engine_restarts, tasks_refused."""
        with self._mutex:
            self._events[event] += by

    def stages(self) -> dict[tuple[str, str], tuple[int, float, int]]:
        """(stage, direction) to (runs, seconds in all, failures)."""
        with self._mutex:
            return {key: (runs, self._seconds[key], self._failures[key]) for key, runs in self._runs.items()}

    def events(self, event: str) -> int:
        with self._mutex:
            return self._events[event]
