"""``egmctl demo``: the whole life of a pool, on real parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from egmctl.cli.output import Output

__all__ = ["EXAMPLES", "run"]

EXAMPLES = """
egmctl demo
egmctl demo --quiet
"""


def run(context: typer.Context) -> int:
    """Show the whole life of a pool on this machine, on real parts.

    Starts a real mooncake_master on loopback, plans, provisions and mounts a pool of shared memory, lets an unmodified
    Mooncake client and direct copies read each other's objects, verifies, measures, tears down, and shows that nothing
    is left. Needs a Mooncake wheel (the extra egmctl[mooncake]); uses a state dir of its own.
    """
    from egmctl.cli.demo import run_demo
    from egmctl.cli.interrupts import Interrupts

    output: Output = context.obj
    with Interrupts(output, "the demo", "tearing its pool down"):
        return run_demo(output, output.paths)
