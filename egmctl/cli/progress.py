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
    from egmctl.provider.progress import ProgressEvent

__all__ = ["Progress"]

_LINE_EVERY = 5.0
"""Seconds between plain lines of one stage: enough to see life in a log, few enough to read it."""


class Progress:
    """``with Progress(output) as progress:``, and ``progress`` is what provider functions report to.

    Goes to stderr; shows nothing with ``--quiet``. An event of another stage ends the stage before it.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._begun = 0.0
        self._said = 0.0
        self._text = ""
        self._counted = False
        self.warned: set[str] = set()
        """Warnings that were shown."""

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

    def __call__(self, event: ProgressEvent) -> None:
        if self._output.quiet:
            return
        try:
            if event.stage == "warning":
                self.warned.add(event.text)
                self._output.warn(event.text)  # the bar lets what is printed pass above it
            elif self._bar is not None:
                self._draw(self._bar, event)
            else:
                self._print(event)
        except OSError:
            self._output.quiet = True  # nobody watches any more: no reason to fail the work

    def _draw(self, bar: Bar, event: ProgressEvent) -> None:
        if event.stage != self._stage or self._task is None:
            if self._task is not None:
                if not self._counted:
                    bar.update(self._task, total=1, completed=1)  # no longer pulsing
                bar.stop_task(self._task)
            self._stage = event.stage
            self._task = bar.add_task("", total=None, amount="")
        self._counted = event.total > 0
        bar.update(
            self._task,
            description=printable(event.text or event.stage),
            completed=event.done,
            total=event.total or None,
            amount=_amount(event),
        )

    def _print(self, event: ProgressEvent) -> None:
        now = time.monotonic()
        if event.stage != self._stage:
            self._stage, self._begun, self._text = event.stage, now, ""
        text = event.text or event.stage
        counts = event.total > 0 and event.unit != ""
        complete = counts and event.done >= event.total
        if not counts:
            due = text != self._text
        elif complete:
            due = self._text != "complete"
        else:
            due = not self._text or now - self._said >= _LINE_EVERY
        if not due:
            return
        self._said, self._text = now, "complete" if complete else text
        self._output.note(f"{text}: {_amount(event)}{self._estimate(event, now)}" if counts else text)

    def _estimate(self, event: ProgressEvent, now: float) -> str:
        passed = now - self._begun
        if event.done >= event.total:
            return f" in {passed:.1f} s" if passed >= 0.1 else ""
        if not event.done or event.unit == "seconds" or passed < 1:
            return ""
        return f", about {passed * (event.total - event.done) / event.done:.0f} s left"


def _amount(event: ProgressEvent) -> str:
    if not event.unit or not event.total:
        return ""
    if event.unit == "bytes":
        return f"{format_size(event.done)} of {format_size(event.total)}"
    return f"{event.done} of {event.total} {event.unit}"


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
