"""The table of a pool's life: each stage with what it does and how it is undone. `Pool` walks it forwards and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from egmctl.provider.local_stages import Control, Endpoint, Memory
from egmctl.provider.mount_stages import Engine, Publication, Segments

if TYPE_CHECKING:
    from egmctl.provider.pool import Pool

__all__ = ["ALL", "MOUNT", "PROVISION", "Stage"]


class Stage(Protocol):
    """Both directions write the ledger before and after each act, do only what is not done yet, and may be called again
    after any failure. ``undo`` works from the ledger alone when there is no agent (``pool.live`` is None), and raises
    when something has to stay; nothing before it in the table is undone then."""

    @property
    def name(self) -> str: ...
    def do(self, pool: Pool) -> None: ...
    def undo(self, pool: Pool) -> None: ...


# Undone from right to left: no memory goes before every segment, descriptor and reader of it has gone.
PROVISION: tuple[Stage, ...] = (Control(), Endpoint(), Memory())
MOUNT: tuple[Stage, ...] = (Engine(), Publication(), Segments())
ALL: tuple[Stage, ...] = PROVISION + MOUNT
