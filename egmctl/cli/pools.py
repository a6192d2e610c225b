"""How pools are shown, to people and as JSON: the same rows for provision, mount, teardown and status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from egmctl.units import format_size

if TYPE_CHECKING:
    from egmctl.cli.output import Output

__all__ = ["show_pools"]


def show_pools(output: Output, pools: Sequence[Mapping[str, Any]]) -> None:
    """``pools`` as `pool_status` gives them."""
    if not pools:
        output.line("no pools on this host")
        return
    output.table(
        ("pool", "state", "memory", "bytes", "mounted", "endpoint", "master", "agent"),
        [
            (
                pool["name"],
                pool["state"],
                pool["memory_kind"],
                format_size(pool["bytes"]),
                f"{pool['mounted']} of {pool['chunks']}",
                pool["endpoint"] or "-",
                pool["master"] or "-",
                pool["agent_pid"] or "-",
            )
            for pool in pools
        ],
        right=(3,),
    )
    for pool in pools:
        doing = pool.get("doing")
        if doing:
            output.line(f"{pool['name']}: {doing['what']} under way, asked for by {doing['who']}")
        if pool.get("reason"):
            output.line(f"{pool['name']}: {pool['reason']}")
        for warning in pool.get("warnings", ()):
            output.line(f"{pool['name']}: {warning}")
        if pool["cleanup_pending"]:
            output.line(f"{pool['name']}: cleanup pending; egmctl teardown {pool['name']} resumes it")
