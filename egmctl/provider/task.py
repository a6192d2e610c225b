"""One command at work on a pool: who asked, how it is told, and how it is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from egmctl.errors import FailedError
from egmctl.provider.progress import Progress, ProgressEvent, silent

__all__ = ["Cancelled", "Task"]


class Cancelled(FailedError):
    """Whoever asked for the work has left or asked to stop; what was done of it is undone or kept for a later run."""

    code = "cancelled"


def _never() -> bool:
    return False


@dataclass
class Task:
    """``cancelled`` is asked between steps and while waiting; work that undoes is not stopped by it (`shielded`)."""

    name: str
    who: str = "egmctl"
    progress: Progress = silent
    cancelled: Callable[[], bool] = _never
    hurried: Callable[[], bool] = _never
    since: float = field(default_factory=time.time)
    shielded: bool = False
    last_sign: float = field(default_factory=time.monotonic)
    """When this work last showed that it goes on (monotonic clock)."""

    def tell(self, stage: str, text: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        """Report progress; a watcher that is gone never fails the work."""
        self.last_sign = time.monotonic()
        try:
            self.progress(ProgressEvent(stage, text, done, total, unit))
        except Exception:  # the pipe or socket of whoever watched is closed: its end is noticed by `cancelled`
            self.progress = silent

    def checkpoint(self) -> None:
        """Raise `Cancelled` when it is time to stop."""
        self.last_sign = time.monotonic()
        if not self.shielded and self.cancelled():
            raise Cancelled(f"{self.name} was stopped on request", where=self.who)

    def wait(
        self, seconds: float, *, stage: str, text: str, until: Callable[[], bool] = _never, slice_s: float = 0.05
    ) -> bool:
        """Wait, telling the seconds; whether ``until`` came true before the time was over. A hurried task waits for
        nothing that is only courtesy (callers ask `hurried` in ``until``)."""
        start = time.monotonic()
        told = -1
        while True:
            if until():
                return True
            self.checkpoint()
            passed = time.monotonic() - start
            if passed >= seconds:
                return False
            if int(passed) > told:
                told = int(passed)
                self.tell(stage, text, told, int(seconds + 0.999), "seconds")
            time.sleep(min(slice_s, seconds - passed))
