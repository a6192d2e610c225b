"""One incarnation of a provider behind an endpoint, as a consumer knows it."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from egmctl.consumer.agent_link import Watch
from egmctl.consumer.errors import StaleAllocation
from egmctl.mooncake.descriptor import SegmentDescriptor

__all__ = ["Binding", "ChunkAt", "StockHistory"]


class ChunkAt(NamedTuple):
    """The chunk that holds an address: ``identity`` names the allocation itself and keys its mapping."""

    identity: Hashable
    number: int
    numa_node: int
    base: int
    nbytes: int


class Binding:
    """One incarnation behind an endpoint, as it was at ``bound_at`` (monotonic seconds)."""

    def __init__(
        self,
        endpoint: str,
        descriptor: SegmentDescriptor,
        watch: Watch | None,
        bound_at: float,
        *,
        exclusive: bool = True,
    ) -> None:
        egm = descriptor.egm
        self.endpoint = endpoint
        self.descriptor = descriptor
        self.watch = watch
        self.bound_at = bound_at
        self.stock = egm is None
        self.exclusive = exclusive and (egm is None or egm.exclusive)
        self.kind = egm.kind if egm else "cuda-fabric"
        self.nonce = egm.nonce if egm else ""
        self.outdated = False
        """Set by whoever needs a newer descriptor than this one."""
        self.told = 0
        self._chunks = {chunk.addr: chunk for chunk in egm.chunks} if egm else {}
        self._at: dict[int, ChunkAt] = {}  # by address, once asked for

    def chunk(self, address: int, nbytes: int) -> ChunkAt:
        """The chunk with all of ``[address, address + nbytes)``. Raises `StaleAllocation`: none, or being withdrawn."""
        buffer = self.descriptor.covering(address, nbytes)
        if buffer is None:
            raise StaleAllocation(
                f"no chunk published there holds {nbytes} bytes at {address:#x}",
                where=self.endpoint,
                hint="the Master lists memory that its provider no longer has; it forgets it within half a minute",
            )
        found = self._at.get(buffer.addr)
        if found is None:
            chunk = self._chunks.get(buffer.addr)
            index, node = (chunk.index, chunk.numa_node) if chunk else (-1, 0)
            # The handle is part of the identity where it is the memory's only name, or may change under one nonce.
            identity = (self.endpoint, self.nonce, index, buffer.addr, buffer.length, buffer.handle)
            found = self._at[buffer.addr] = ChunkAt(identity, index, node, buffer.addr, buffer.length)
        if self.watch is not None and found.number in self.watch.withdrawn:
            raise StaleAllocation(f"chunk {found.number} is being taken down", where=self.endpoint)
        return found

    def same_as(self, other: SegmentDescriptor, used: Sequence[ChunkAt]) -> bool:
        """Whether ``other``, asked now, is the same incarnation and still publishes the chunks used."""
        if (other.egm.nonce if other.egm else "") != self.nonce:
            return False
        for chunk in used:
            mine, its = self.descriptor.covering(chunk.base, 1), other.covering(chunk.base, chunk.nbytes)
            if (
                mine is None
                or its is None
                or (mine.addr, mine.length, mine.handle) != (its.addr, its.length, its.handle)
            ):
                return False
        return True


class StockHistory:
    """What a stock provider's memory was: it does not say whether an endpoint is its own alone, but another handle for
    the same addresses does say that what the Master lists there may be of the one before."""

    def __init__(self, expiry: float) -> None:
        self._expiry = expiry
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[SegmentDescriptor, float]] = {}

    def note(self, endpoint: str, descriptor: SegmentDescriptor) -> bool:
        """Whether what the Master lists under ``endpoint`` from now on can be taken to be of this descriptor."""
        with self._lock:
            before, doubted_until = self._seen.get(endpoint, (descriptor, 0.0))
            known = {(buffer.addr, buffer.length): buffer.handle for buffer in before.buffers}
            for buffer in descriptor.buffers:
                same = known.get((buffer.addr, buffer.length)) == buffer.handle
                if not same and any(at < buffer.end and buffer.addr < at + size for at, size in known):
                    doubted_until = time.monotonic() + self._expiry
                    break
            self._seen[endpoint] = (descriptor, doubted_until)
            return time.monotonic() >= doubted_until
