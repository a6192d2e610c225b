"""The signals that ask an agent to end."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from egmctl.errors import CleanupPendingError

__all__ = ["StopSignals"]


class StopSignals:
    """Counts requests to stop. ``wake`` is set by each."""

    def __init__(self, *, interactive: bool) -> None:
        self.count = 0
        self.wake = threading.Event()
        self._interactive = interactive
        wanted = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup(1) has it
            wanted.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._take) for number in wanted}

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.wake.set()
        if self._interactive and number == signal.SIGINT and self.count > 2:
            # Memory goes with the process; the ledger has what is left at the Master.
            os.write(2, b"egmctl: stopped at once; run `egmctl teardown` to clean up what is left\n")
            os._exit(CleanupPendingError.exit_code)

    def pause(self) -> None:
        """A moment, shorter when a signal comes."""
        if self.wake.wait(0.1):
            self.wake.clear()

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
