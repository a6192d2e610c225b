"""Ctrl-C during long work: once asks it to stop and undo, twice stops at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from egmctl.cli.output import Output

__all__ = ["Interrupts"]


class Interrupts:
    """``with Interrupts(output, "undoing") as interrupts:`` and hand ``interrupts.asked`` to the work.

    The first SIGINT or SIGTERM makes `asked` true and says what happens now; the next raises `KeyboardInterrupt` in
    the main thread, whatever it is doing.
    """

    def __init__(self, output: Output, then: str) -> None:
        self._output = output
        self._then = then
        self._count = 0
        self._before: dict[signal.Signals, object] = {}

    def asked(self) -> bool:
        return self._count > 0

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt
        self._output.note(f"{signal.Signals(number).name}: {self._then}; once more stops at once")
