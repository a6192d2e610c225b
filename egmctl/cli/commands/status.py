"""``egmctl status``: the pools of this host."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from egmctl.errors import UsageError

if TYPE_CHECKING:
    from egmctl.cli.output import Output

__all__ = ["EXAMPLES", "run"]

EXAMPLES = """
egmctl status
egmctl status dev --watch
egmctl status --json | jq '.pools[] | select(.ready | not)'
egmctl status dev --forget      no longer list an abandoned pool
"""

_INTERVAL = 1.0


def run(
    context: typer.Context,
    pool: Annotated[str, typer.Argument(metavar="[POOL]", help="Only this pool.", show_default=False)] = "",
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C, showing changes.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Forget a pool that is gone or was abandoned.")] = False,
) -> None:
    """Show the pools of this host and what they are doing.

    Asks each pool's agent, and reads the ledger where the agent is dead. With --watch a line is added (or the screen
    redrawn) at each change; with --json as well, each change is one document on one line.
    """
    output: Output = context.obj
    if forget:
        _forget(output, pool, watch)
    elif watch:
        _watch(output, pool)
    else:
        rows = _rows(output, pool)
        output.emit("status", {"pools": rows}, lambda: _show(output, rows))


def _rows(output: Output, pool: str) -> list[dict[str, Any]]:
    from egmctl.cli.pools import known_name
    from egmctl.provider import pool_status

    return pool_status(output.paths, known_name(pool) if pool else None)


def _show(output: Output, rows: list[dict[str, Any]]) -> None:
    from egmctl.cli.pools import show_pools

    show_pools(output, rows)


def _forget(output: Output, pool: str, watch: bool) -> None:
    if not pool or watch:
        raise UsageError("--forget takes one pool", where="egmctl status", hint="egmctl status POOL --forget")
    from egmctl.cli.pools import known_name
    from egmctl.provider import forget

    forget(known_name(pool), output.paths)
    output.emit("status", {"pools": [], "forgotten": pool}, lambda: output.line(f"{pool}: forgotten"))


def _watch(output: Output, pool: str) -> None:
    from egmctl.cli.output import wants_colour

    before: list[dict[str, Any]] | None = None
    passing = ("pings", "updated")  # what changes every second and tells no news
    redraw = not output.json and wants_colour(sys.stdout)
    try:
        while True:
            rows = _rows(output, pool)
            news = [{key: value for key, value in row.items() if key not in passing} for row in rows]
            if news != before:
                before = news
                if output.json:
                    output.document({"schema": "egmctl/status/1", "pools": rows}, compact=True)
                else:
                    print("\x1b[H\x1b[2J" if redraw else "", end="")
                    output.line(time.strftime("%H:%M:%S"))
                    _show(output, rows)
                sys.stdout.flush()
            time.sleep(_INTERVAL)
    except KeyboardInterrupt:
        return  # how watching ends
