"""``egmctl mount``: publish a pool's chunks at the Master."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from egmctl.cli.output import Output

__all__ = ["EXAMPLES", "run"]

EXAMPLES = """
egmctl mount dev
egmctl mount dev --master 10.0.0.5:50051
"""


def run(
    context: typer.Context,
    pool: Annotated[str, typer.Argument(metavar="POOL", help="A provisioned pool.")],
    master: Annotated[
        str, typer.Option("--master", metavar="HOST:PORT", help="This Master instead of the plan's.")
    ] = "",
) -> None:
    """Publish a pool's chunks at the Mooncake Master.

    Publishes the complete descriptor, then mounts each chunk; the pool is ready only when all are. If it fails, what
    was done is undone and the pool stays provisioned. With memory of the kinds shm and cuda-posix, stock clients are
    served by the Mooncake wheel's Transfer Engine, which listens on all network interfaces whatever it is told.
    """
    from egmctl.cli.interrupts import Interrupts
    from egmctl.cli.pools import known_name, show_pools
    from egmctl.cli.progress import Progress
    from egmctl.provider import mount_pool

    output: Output = context.obj
    name = known_name(pool)
    with Interrupts(output, f"pool {name}", "stopping and undoing"), Progress(output) as progress:
        row = mount_pool(name, output.paths, master=master or None, progress=progress)
    if row.get("already"):
        output.note(f"{name} is mounted already")
    output.emit("mount", {"pool": row}, lambda: show_pools(output, [row]))
