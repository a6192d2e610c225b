"""Ctrl-C during long work: once asks it to stop and undo, twice stops at once."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from egmctl.errors import CleanupPendingError

if TYPE_CHECKING:
    from egmctl.cli.output import Output

__all__ = ["Interrupts"]


class Interrupts:
    """``with Interrupts(output, pool, "stopping and undoing"):`` around work that handles `KeyboardInterrupt` once.

    SIGINT, SIGTERM and (unless it is ignored, as under nohup) SIGHUP raise it. The work turns the first into a request
    to its agent and goes on listening; when a second one gets out, whatever the agent was at may be half done, and that
    is cleanup pending (exit 4).
    """

    def __init__(self, output: Output, pool: str, then: str) -> None:
        self._output = output
        self._pool = pool
        self._then = then
        self._count = 0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if isinstance(error, KeyboardInterrupt) and self._count > 1:
            raise CleanupPendingError(
                "stopped at once, in the middle of it",
                where=self._pool,
                hint="egmctl status tells what is left, egmctl teardown undoes it",
            ) from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count == 1 and not self._output.quiet:
            # Not through the stream: it may be in the middle of a write of its own, and is not reentrant.
            with suppress(OSError):  # the terminal may be gone
                os.write(2, f"{signal.Signals(number).name}: {self._then}; once more stops at once\n".encode())
        raise KeyboardInterrupt
