"""What the Master's admin port lists of a pool: used to compare and to wait, never needed.

Without ``master_admin_addr`` in the spec the answers are None: not known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from egmctl.errors import EgmError
from egmctl.steps import step

if TYPE_CHECKING:
    from egmctl.mooncake.admin import SegmentRow
    from egmctl.provider.pool import Pool

__all__ = ["bytes_in_use", "first_chunk_listed", "foreign_segments", "list_segments"]

_NODES = 64
"""NUMA nodes asked about: more than any host has that lends memory from nodes with CPUs."""


def list_segments(pool: Pool) -> list[SegmentRow] | None:
    """All that the Master lists, or None when it cannot be asked."""
    from egmctl.mooncake.admin import AdminClient

    address = pool.plan.mooncake.master_admin_addr
    if address is None or pool.record_now().master not in ("", pool.plan.mooncake.master_server_addr):
        return None
    try:
        return list(AdminClient(address).segments_detail())
    except EgmError as error:
        pool.warn(f"the Master's admin port {address} does not tell its segments: {error.message}")
        return None


def foreign_segments(pool: Pool) -> list[str] | None:
    """Names of segments under our endpoint that are not ours; None when it is not known."""
    rows = list_segments(pool)
    if rows is None:
        return None
    record = pool.record_now()
    ours = {row.id for row in record.live_segments}
    return [row.name for row in rows if row.te_endpoint == record.endpoint and row.segment_id not in ours]


def first_chunk_listed(pool: Pool) -> bool:
    """Whether the Master knows the first chunk of another pool under our endpoint: every pool names one
    ``endpoint/numaN/0``. Raises what the Master answers."""
    from egmctl.mooncake.master import MasterClient

    record = pool.record_now()
    ours = {row.name for row in record.live_segments}
    with MasterClient(record.master, timeout=pool.timing.rpc_timeout) as client:
        for node in range(_NODES):
            name = f"{record.endpoint}/numa{node}/0"
            if name in ours:
                continue
            with step("provider.listing.first_chunk", name=name):
                if client.query_segment_status(name) is not None:
                    return True
    return False


def bytes_in_use(pool: Pool) -> int | None:
    """Bytes of our chunks that objects take; None when it is not known. A Master says 0 of a chunk that is on its way
    out, by a grace or by a drain job, whatever lies in it."""
    rows = list_segments(pool)
    if rows is None:
        return None
    ours = {row.id for row in pool.record_now().live_segments}
    own = [row for row in rows if row.segment_id in ours]
    if any(row.status != "OK" for row in own):
        return None
    return sum(row.allocator_used_bytes for row in own)
