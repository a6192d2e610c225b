"""What a command says, and where: data on stdout, everything else on stderr.

With ``--json`` stdout carries exactly one document. Colour appears on a terminal only, and never with ``NO_COLOR``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from egmctl.errors import EgmError
    from egmctl.paths import Paths

__all__ = ["Output", "printable", "wants_colour"]


def wants_colour(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal that may be coloured."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def printable(text: object) -> str:
    """``text`` with control characters and unpaired surrogates shown as escapes.

    Names come from specs, Masters and other hosts; none may move the cursor of the terminal that shows them.
    """
    return "".join(
        c if c == "\n" or (c.isprintable() and not "\ud800" <= c <= "\udfff") else ascii(c)[1:-1] for c in str(text)
    )


class Output:
    """The global options of one command, and its two streams."""

    def __init__(self) -> None:
        self.json = False
        self.verbosity = 0
        self.quiet = False
        self.state_dir: str | None = None
        self._paths: Paths | None = None

    @property
    def paths(self) -> Paths:
        """Where state lives, from ``--state-dir``, the environment, or the user's own folders."""
        if self._paths is None:
            from egmctl.paths import Paths

            self._paths = Paths.resolve(self.state_dir)
        return self._paths

    # Data

    def emit(self, command: str, body: Mapping[str, Any], show: Callable[[], None]) -> None:
        """The command's result: the document ``egmctl/<command>/1`` with ``--json``, else what ``show`` prints."""
        if self.json:
            self.document({"schema": f"egmctl/{command}/1", **{k: v for k, v in body.items() if k != "schema"}})
        else:
            show()

    def document(self, document: Mapping[str, Any], *, compact: bool = False) -> None:
        """One JSON document on stdout; ``compact`` on one line."""
        print(json.dumps(document, indent=None if compact else 2), file=sys.stdout)

    def line(self, text: str = "") -> None:
        """A line of the result, for a person."""
        print(printable(text), file=sys.stderr if self.json else sys.stdout)

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[int] = ()) -> None:
        """A table: drawn by rich on a terminal, aligned columns anywhere else. ``right``: columns aligned right."""
        cells = [[printable("" if cell is None else cell) for cell in row] for row in rows]
        stream = sys.stderr if self.json else sys.stdout
        if wants_colour(stream):
            _rich_table(stream, headings, cells, right)
            return
        grid = [list(headings), *cells]
        widths = [max(len(row[column]) for row in grid) for column in range(len(headings))]
        for row in grid:
            padded = [
                cell.rjust(width) if column in right else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            print("  ".join(padded).rstrip(), file=stream)

    # For a person

    def note(self, text: str) -> None:
        """What happened, unless ``--quiet``."""
        if not self.quiet:
            print(printable(text), file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        print(self._marked("egmctl: warning:", "33", text), file=sys.stderr, flush=True)

    def detail(self, text: str, level: int = 1) -> None:
        """Shown with ``-v`` (or ``-vv`` for ``level`` 2)."""
        if self.verbosity >= level:
            print(printable(text), file=sys.stderr, flush=True)

    def error(self, error: EgmError) -> None:
        """The three parts of an error on stderr."""
        print(self._marked("egmctl: error:", "31", error.message), file=sys.stderr)
        for label, part in (("where", error.where), ("do", error.hint)):
            if part:
                print(f"  {label}: {printable(part)}".replace("\n", "\n    "), file=sys.stderr)
        sys.stderr.flush()

    @staticmethod
    def _marked(label: str, colour: str, text: str) -> str:
        if wants_colour(sys.stderr):
            label = f"\x1b[1;{colour}m{label}\x1b[0m"
        return f"{label} {printable(text)}".replace("\n", "\n    ")


def _rich_table(stream: TextIO, headings: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[int]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="right" if column in right else "left", overflow="fold")
    for row in cells:
        # Text, not str: a name with brackets in it is not markup.
        table.add_row(*(Text(cell) for cell in row))
    Console(file=stream, highlight=False).print(table)
