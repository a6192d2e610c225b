"""``egmctl provision``: allocate a pool's memory under an agent of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from egmctl.cli.output import Output

__all__ = ["EXAMPLES", "run"]

EXAMPLES = """
egmctl provision plans/dev-shm.toml
egmctl provision tray.plan.json --mount             a saved plan, published as well
egmctl provision plans/dev-shm.toml --foreground    for systemd and containers
"""


def run(
    context: typer.Context,
    document: Annotated[Path, typer.Argument(metavar="SPEC|PLAN", help="A spec (TOML) or a saved plan (JSON).")],
    mount: Annotated[bool, typer.Option("--mount", help="Mount the pool once it is provisioned.")] = False,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Be the agent instead of starting one; ends when the pool is gone.")
    ] = False,
) -> None:
    """Allocate a pool's memory under an agent of its own.

    Checks everything first, starts the agent, which allocates chunk by chunk, and follows it. If it fails, what was
    done is undone. Ctrl-C once stops it and undoes, twice leaves at once (the ledger knows the rest). Doing it again
    with the same plan is success.
    """
    from egmctl.cli.interrupts import Interrupts
    from egmctl.cli.pools import show_pools
    from egmctl.cli.progress import Progress
    from egmctl.provider import provision

    output: Output = context.obj
    with Interrupts(output, str(document), "stopping and undoing"), Progress(output) as progress:
        pool = provision(
            document,
            output.paths,
            mount=mount,
            foreground=foreground,
            progress=progress,
        )
    output.emit("provision", {"pool": pool}, lambda: show_pools(output, [pool]))
