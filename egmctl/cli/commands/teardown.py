"""``egmctl teardown``: unmount and release, again until it is clean."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from egmctl.errors import EgmError, UsageError

if TYPE_CHECKING:
    from egmctl.cli.output import Output

__all__ = ["EXAMPLES", "run"]

EXAMPLES = """
egmctl teardown dev
egmctl teardown dev --grace 60      objects stay readable for a minute
egmctl teardown --all --now
egmctl teardown dev --abandon       give up on a Master that will never answer again
"""


def run(
    context: typer.Context,
    pool: Annotated[str, typer.Argument(metavar="[POOL]", help="The pool.", show_default=False)] = "",
    every: Annotated[bool, typer.Option("--all", help="Every pool of this state dir.")] = False,
    grace: Annotated[
        float | None,
        typer.Option("--grace", metavar="SECONDS", help="How long objects stay readable.  [default: 10]"),
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Without a grace period.")] = False,
    abandon: Annotated[
        bool, typer.Option("--abandon", help="Release the memory although a Master may still list it.")
    ] = False,
) -> int:
    """Unmount a pool and give its memory back.

    Undoes mount and provision in reverse order, gracefully unless told otherwise. Memory that a Master may still name
    is kept: the pool is then cleanup-pending (exit 4) and the same command resumes later. It also cleans up after an
    agent that died, from the ledger alone. A pool that is gone already is success.
    """
    if bool(pool) == every:
        raise UsageError("name one pool, or give --all", where="egmctl teardown", hint="egmctl status lists them")
    if now and grace is not None:
        raise UsageError("--now and --grace exclude each other", where="egmctl teardown", hint="give one of them")
    if grace is not None and not (math.isfinite(grace) and 0 <= grace <= 86400):
        raise UsageError(f"--grace {grace} is no number of seconds", where="egmctl teardown", hint="0 to 86400")
    output: Output = context.obj
    seconds = 10.0 if grace is None else grace
    if every:
        return _every(output, seconds, now, abandon)
    from egmctl.cli.pools import known_name

    told: set[str] = set()
    row = _one(output, known_name(pool), seconds, now, abandon, told)
    output.emit("teardown", {"pools": [row]}, lambda: _say(output, row, told))
    return 0


def _one(output: Output, pool: str, grace: float, now: bool, abandon: bool, told: set[str]) -> dict[str, Any]:
    """``told`` gets the warnings that were shown on the way."""
    from egmctl.cli.interrupts import Interrupts
    from egmctl.cli.progress import Progress
    from egmctl.provider import teardown_pool

    with Interrupts(output, f"pool {pool}", "stopping; what is undone stays undone"), Progress(output) as progress:
        try:
            return teardown_pool(pool, output.paths, grace=grace, now=now, abandon=abandon, progress=progress)
        finally:
            told |= progress.warned


def _every(output: Output, grace: float, now: bool, abandon: bool) -> int:
    """Each in turn, whatever happens to the others; the exit code is the highest one."""
    from egmctl.provider import pool_status

    rows: list[dict[str, Any]] = []
    worst = 0
    told: set[str] = set()
    for known in pool_status(output.paths, compare=False):
        try:
            rows.append(_one(output, known["name"], grace, now, abandon, told))
        except EgmError as error:
            output.error(error)
            rows.append({"name": known["name"], "state": known["state"], "error": error.document()})
            worst = max(worst, error.exit_code)

    def show() -> None:
        for row in rows:
            _say(output, row, told)
        if not rows:
            output.line("no pools on this host")

    output.emit("teardown", {"pools": rows}, show)
    return worst


def _say(output: Output, row: dict[str, Any], told: set[str]) -> None:
    if "error" in row:
        return
    output.line(f"{row['name']}: {row['state']}{' already' if row['already'] else ''}")
    for text in dict.fromkeys((*row["left"], *row["warnings"])):
        if text not in told:
            output.line(f"  {text}")
