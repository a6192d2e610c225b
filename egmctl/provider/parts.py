"""What is alive in an agent: everything that a process holds and a ledger can only name."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from egmctl.memory import Chunk, ProviderMemory
from egmctl.memory.registry import Registry

if TYPE_CHECKING:
    import mmap

    from egmctl.mooncake.descriptor import SegmentDescriptor
    from egmctl.mooncake.handshake import HandshakeServer
    from egmctl.mooncake.transfer_engine import TransferEngineChild
    from egmctl.provider.heartbeat import Heartbeat

__all__ = ["ControlDoor", "Live"]


class ControlDoor(Protocol):
    """The agent's control socket, as far as the pool's life concerns it."""

    def open(self) -> None: ...

    def close(self) -> None:
        """Accept nobody any more and remove the file; connections at work are answered."""

    def withdraw(self, chunks: list[int]) -> int:
        """Tell everybody who watches that these chunks go; how many were told."""


@dataclass
class Live:
    """``chunks`` are those allocated, by index.

    ``accountable`` are nodes whose free memory showed the allocation (in some virtual machines it does not), so that it
    can be expected to show the release. ``importers`` are processes that were given descriptors of chunks: (pid, start
    time) and the chunks. ``bound_at`` is when this incarnation took its endpoint, ``quiet_until`` when
    no reader can hold a lease on an earlier location any more (both on the monotonic clock). ``health`` is the URL of
    the health endpoint, if there is one.
    """

    memory: ProviderMemory | None = None
    chunks: dict[int, Chunk] = field(default_factory=dict)
    accountable: set[int] = field(default_factory=set)
    registry: Registry = field(default_factory=Registry)
    importers: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    workspace: mmap.mmap | None = None
    control: ControlDoor | None = None
    endpoint: HandshakeServer | None = None
    bound_at: float = field(default_factory=time.monotonic)
    engine: TransferEngineChild | None = None
    engine_log: int | None = None
    engine_deaths: list[str] = field(default_factory=list)
    descriptor: SegmentDescriptor | None = None
    published: bytes = b""
    heartbeat: Heartbeat | None = None
    quiet_until: float = 0.0
    drain_until: float | None = None
    health: str | None = None
    sharing: bool = False
