"""The durable record on this host of everything egmctl owns, written before and after each step."""

from __future__ import annotations

from egmctl.ledger.lock import Holder, OwnerLock, holder_of
from egmctl.ledger.processes import await_end, boot_id, is_running, start_time
from egmctl.ledger.records import (
    ENDED_CHUNK,
    ENDED_SEGMENT,
    ChunkRow,
    Event,
    PoolRecord,
    Resource,
    SegmentId,
    SegmentRow,
)
from egmctl.ledger.store import SCHEMA_VERSION, Ledger, LedgerUnreadable, LedgerWriteError, read_events, read_only

__all__ = [
    "ENDED_CHUNK",
    "ENDED_SEGMENT",
    "SCHEMA_VERSION",
    "ChunkRow",
    "Event",
    "Holder",
    "Ledger",
    "LedgerUnreadable",
    "LedgerWriteError",
    "OwnerLock",
    "PoolRecord",
    "Resource",
    "SegmentId",
    "SegmentRow",
    "await_end",
    "boot_id",
    "holder_of",
    "is_running",
    "read_events",
    "read_only",
    "start_time",
]
