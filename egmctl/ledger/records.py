"""What the ledger holds, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "ENDED_CHUNK",
    "ENDED_SEGMENT",
    "ChunkRow",
    "Event",
    "PoolRecord",
    "Resource",
    "SegmentId",
    "SegmentRow",
]

SegmentId = tuple[int, int]

ENDED_CHUNK = frozenset({"planned", "released", "lost"})
"""States of a chunk that has no memory of ours. The others: creating, mapped, releasing."""

ENDED_SEGMENT = frozenset({"unmounted", "refused", "fenced", "abandoned"})
"""States of a segment that no Master can name any more (or that was given up by order).

The others: mounting (asked, perhaps not answered), mounted, draining, unmounting.
"""


@dataclass(frozen=True)
class ChunkRow:
    index: int
    numa_node: int
    nbytes: int
    address: int | None
    state: str


@dataclass(frozen=True)
class SegmentRow:
    """One attempt to mount one chunk at one Master: each has an id of its own."""

    id: SegmentId
    chunk: int
    master: str
    client: SegmentId
    name: str
    endpoint: str
    base: int
    size: int
    protocol: str
    state: str = "mounting"
    since: float = 0.0

    @property
    def ended(self) -> bool:
        return self.state in ENDED_SEGMENT


@dataclass(frozen=True)
class Resource:
    """Something outside memory and Master: a socket file, a metadata key, a child process. States: intended,
    present, removed, abandoned."""

    kind: str
    name: str
    state: str
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    at: float
    who: str
    what: str
    detail: dict[str, Any]


@dataclass(frozen=True)
class PoolRecord:
    """All the ledger knows of a pool.

    ``goal`` is where the last command wanted it (provisioned, ready, gone); ``reason`` says why it is degraded or
    cleanup-pending; ``plan`` is the plan document.
    """

    name: str
    state: str
    goal: str
    reason: str
    plan: dict[str, Any]
    nonce: str
    client: SegmentId
    agent_pid: int
    agent_started: int
    boot_id: str
    endpoint: str
    socket: str
    master: str
    exclusive: bool
    updated: float
    chunks: tuple[ChunkRow, ...] = ()
    segments: tuple[SegmentRow, ...] = ()
    resources: tuple[Resource, ...] = ()

    @property
    def live_segments(self) -> tuple[SegmentRow, ...]:
        """Those a Master may still name."""
        return tuple(row for row in self.segments if not row.ended)

    @property
    def live_chunks(self) -> tuple[ChunkRow, ...]:
        return tuple(row for row in self.chunks if row.state not in ENDED_CHUNK)

    @property
    def nothing_begun(self) -> bool:
        """Whether it says "provisioning" and lists nothing that may exist: its agent got no further, or back here."""
        resources = any(row.state in ("intended", "present") for row in self.resources)
        return self.state == "provisioning" and not (self.live_chunks or self.live_segments or resources)

    @property
    def masters(self) -> tuple[str, ...]:
        """Masters that a chunk was offered to and that may still name it."""
        return tuple(sorted({row.master for row in self.live_segments}))
