"""``egmctl verify``: is what the pool holds and says true?"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from egmctl.errors import FailedError, VerificationError

if TYPE_CHECKING:
    from egmctl.cli.output import Output

__all__ = ["EXAMPLES", "run"]

EXAMPLES = """
egmctl verify dev
egmctl verify dev --level full
egmctl verify dev --json | jq '.checks[] | select(.status != "pass")'
"""


class Level(str, Enum):
    quick = "quick"
    full = "full"
    soak = "soak"


def run(
    context: typer.Context,
    pool: Annotated[str, typer.Argument(metavar="POOL", help="A mounted pool.")],
    level: Annotated[
        Level,
        typer.Option("--level", help="quick: one object a chunk; full: odd and large ones; soak: a minute of that."),
    ] = Level.quick,
) -> int:
    """Write and read back through a pool, and compare its records.

    Puts and gets through the real Master and compares every byte; compares what the agent, the ledger, the Master and
    the descriptor say of each other. Exit 7 when bytes or records are wrong; a check that could not run is shown as
    skip, never as pass, and when no byte could be checked (others have filled the pool) the exit is 1.
    """
    from egmctl.checks.verify import run_verify
    from egmctl.cli.checklist import show_checks
    from egmctl.cli.pools import known_name
    from egmctl.cli.progress import Progress

    output: Output = context.obj
    with Progress(output) as progress:
        document = run_verify(known_name(pool), output.paths, level=level.value, progress=progress)
    output.emit("verify", document, lambda: show_checks(output, document))
    if document["ok"]:
        return 0
    wrong = any(check["status"] == "fail" for check in document["checks"])
    return VerificationError.exit_code if wrong else FailedError.exit_code
