"""Progress of long work: a bar with bytes and an estimate on a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from egmctl.cli.output import printable, wants_colour
from egmctl.units import format_size

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from egmctl.cli.output import Output

__all__ = ["Progress"]

_LINE_EVERY = 5.0
"""Seconds between plain lines of one stage: enough to see life in a log, few enough to read it."""


class Progress:
    """``with Progress(output) as progress: progress.update("allocating", done, total)``, as often as one likes.

    ``done`` and ``total`` are bytes, or a count when ``unit`` names what is counted. A change of ``stage`` ends the
    one before. Goes to stderr; shows nothing with ``--quiet``.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._said = 0.0
        self._begun = 0.0
        self._last: tuple[int, int, str] = (0, 0, "")
        self._complete = False

    def __enter__(self) -> Progress:
        if not self._output.quiet and wants_colour(sys.stderr):
            self._bar = _bar()
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, stage: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        """``total`` 0 means that how much there is to do is not known."""
        if self._output.quiet:
            return
        if self._bar is not None:
            self._draw(self._bar, stage, done, total, unit)
        else:
            self._print(stage, done, total, unit)

    def say(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        if self._output.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(printable(text), markup=False, highlight=False)
        else:
            self._output.note(text)

    def _draw(self, bar: Bar, stage: str, done: int, total: int, unit: str) -> None:
        if stage != self._stage or self._task is None:
            if self._task is not None:
                bar.stop_task(self._task)
            self._stage = stage
            self._task = bar.add_task(printable(stage), total=total or None, amount="")
        bar.update(self._task, completed=done, total=total or None, amount=_amount(done, total, unit))

    def _print(self, stage: str, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._begun, self._said, self._complete = stage, now, now, False
            if not total:
                self._output.note(stage)
                return
            if done < total:
                self._output.note(f"{stage}: {_amount(0, total, unit)}")
        if total and done >= total and not self._complete:
            self._complete = True
            self._output.note(f"{stage}: {_amount(total, total, unit)} in {now - self._begun:.1f} s")
        elif now - self._said >= _LINE_EVERY and not self._complete:
            self._said = now
            left = (now - self._begun) * (total - done) / done if total and done else 0.0
            estimate = f", about {left:.0f} s left" if left else ""
            self._output.note(f"{stage}: {_amount(done, total, unit)}{estimate}")


def _amount(done: int, total: int, unit: str) -> str:
    if unit:
        return f"{done} of {total} {unit}" if total else f"{done} {unit}"
    return f"{format_size(done)} of {format_size(total)}" if total else (format_size(done) if done else "")


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr, highlight=False),
    )
