"""The provider's side: the agent that owns a pool's memory, and the commands on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from egmctl.provider.progress import Progress, ProgressEvent

if TYPE_CHECKING:
    from egmctl.provider.commands import forget, mount_pool, pool_status, provision, teardown_pool

__all__ = [
    "Progress",
    "ProgressEvent",
    "forget",
    "mount_pool",
    "pool_status",
    "provision",
    "teardown_pool",
]


def __getattr__(name: str) -> Any:
    # The commands load the planner and the ledger; whoever only names a progress event does not.
    if name in __all__:
        from egmctl.provider import commands

        return getattr(commands, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
