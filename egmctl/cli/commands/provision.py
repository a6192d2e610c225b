"""``egmctl provision``: allocate a pool's memory under an agent of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from egmctl.cli.output import Output
    from egmctl.errors import EgmError
    from egmctl.planning import Plan

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

    def tell(pool: dict[str, Any]) -> None:
        output.emit("provision", {"pool": pool}, lambda: show_pools(output, [pool]))
        sys.stdout.flush()

    def lament(error: EgmError) -> None:
        output.error(error)
        output.note(f"{plan.pool}: this agent goes on with what it has; egmctl status tells, egmctl teardown ends it")

    plan = _resolve(document)
    for warning in plan.warnings:
        output.warn(warning)
    if foreground:
        with Progress(output) as progress:
            provision(plan, output.paths, mount=mount, foreground=True, progress=progress, started=tell, failed=lament)
        return
    with Interrupts(output, f"pool {plan.pool}", "stopping and undoing"), Progress(output) as progress:
        pool = provision(plan, output.paths, mount=mount, progress=progress)
    if pool.get("already"):
        output.note(f"{plan.pool} exists already")
    tell(pool)


def _resolve(document: Path) -> Plan:
    """The saved plan as it is, or the spec's plan for this machine as it is now."""
    from egmctl.planning import Plan, assumed_granularity, load_document, make_plan

    found = load_document(document)
    if isinstance(found, Plan):
        return found
    from egmctl.topology import read_topology

    return make_plan(found, read_topology(), granularity=assumed_granularity(found.pool.memory))
