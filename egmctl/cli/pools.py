"""How pools are shown, to people and as JSON: the same rows for provision, mount, teardown and status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from egmctl.errors import UsageError
from egmctl.units import format_size

if TYPE_CHECKING:
    from egmctl.cli.output import Output

__all__ = ["known_name", "show_pools"]


def known_name(pool: str) -> str:
    """``pool`` if a pool could have that name: what it stands for are files. Raises `UsageError`."""
    from egmctl.planning.spec import check_pool_name

    try:
        check_pool_name(pool)
    except UsageError as error:
        raise UsageError(f"{pool[:80]!r} cannot be a pool's name", where="POOL", hint=error.hint) from None
    return pool


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
