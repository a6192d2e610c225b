"""The puts of a store."""

from __future__ import annotations

from collections.abc import Sequence

from egmctl.consumer.attempts import write_all
from egmctl.consumer.base import StoreBase
from egmctl.consumer.context import keeps_device
from egmctl.consumer.engine import check_batch
from egmctl.consumer.gather import Entries, Indices
from egmctl.consumer.keylocks import Held
from egmctl.consumer.requests import BufferList, WriteRequest, Writes, part_of_bytes, singles
from egmctl.consumer.sparse import scatter_request
from egmctl.consumer.transfer import BatchTransfer, Transfer, single
from egmctl.consumer.writer import WriteRound
from egmctl.errors import EgmError
from egmctl.mooncake.master import ReplicateConfig

__all__ = ["Puts"]


class Puts(StoreBase):
    """Those of `egmctl.consumer.EgmStore`."""

    def put_from(
        self, key: str, address: int, nbytes: int, *, config: ReplicateConfig | None = None, stream: int | None = None
    ) -> int:
        """Put ``nbytes`` at ``address`` as the object ``key``; all its replicas are written before it is published.

        Raises `ObjectExists`, `ObjectBusy`, `NoSpace`, `Unreachable`, `InterruptedPut`, `InvalidBuffer`.
        """
        return single(self.batch_put_from([key], [address], [nbytes], config=config, stream=stream))

    def batch_put_from(
        self,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes: Sequence[int],
        *,
        config: ReplicateConfig | None = None,
        stream: int | None = None,
    ) -> list[int | EgmError]:
        """Put several objects; see the class for what is returned."""
        check_batch(keys, addresses, sizes)
        return self.batch_put_from_multi_buffers(keys, singles(addresses, sizes), config=config, stream=stream)

    @keeps_device
    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        buffers: Sequence[BufferList],
        *,
        config: ReplicateConfig | None = None,
        stream: int | None = None,
    ) -> list[int | EgmError]:
        """Put several objects, each laid together from its parts in order."""
        check_batch(keys, buffers)
        self._open()
        requests = Writes(self._buffers, keys, buffers)
        held = Held()
        try:
            self._locks.acquire(requests.every_key, self._engine.timing.put_deadline, held)
            return write_all(self._engine, requests, config or ReplicateConfig(), stream=stream)
        finally:
            self._locks.release(held)

    def put_from_async(
        self, key: str, address: int, nbytes: int, *, config: ReplicateConfig | None = None, stream: int | None = None
    ) -> Transfer:
        """Reserve and begin to copy, ordered after what ``stream`` holds; published by `Transfer.result`.

        Pageable memory is copied by the CPU, which waits here until the stream gets so far. A Master that cannot be
        reached is asked again by `Transfer.result`.
        """
        return Transfer(self.batch_put_from_async([key], [address], [nbytes], config=config, stream=stream))

    @keeps_device
    def batch_put_from_async(
        self,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes: Sequence[int],
        *,
        config: ReplicateConfig | None = None,
        stream: int | None = None,
    ) -> BatchTransfer:
        """As `put_from_async`, for several."""
        check_batch(keys, addresses, sizes)
        config = config or ReplicateConfig()
        self._open()
        requests = Writes(self._buffers, keys, singles(addresses, sizes))
        first = WriteRound(self._engine, requests, config, stream)

        def finish() -> list[int | EgmError]:
            return write_all(self._engine, requests, config, stream=stream, first=first)

        return self._begin(first, finish, requests.every_key)

    def put(self, key: str, data: bytes | bytearray | memoryview, *, config: ReplicateConfig | None = None) -> int:
        """Put what a bytes-like object holds: where it lies, unless it is read-only and not ``bytes``, which is copied
        first. Raises as `put_from`, and `InvalidBuffer` for what is not one contiguous piece of memory."""
        part, kept = part_of_bytes(key, data)
        try:
            return single(self._write_one(WriteRequest(key, part.nbytes, (part,)), config))
        finally:
            del kept

    def scatter_from(
        self,
        key: str,
        nbytes: int,
        offsets: Indices,
        entry_bytes: int,
        source: int,
        *,
        count: int | None = None,
        covers: bool = False,
        config: ReplicateConfig | None = None,
        stream: int | None = None,
    ) -> int:
        """Put an object of ``nbytes`` whose entries at ``offsets`` come from ``source``, where they lie side by side.

        What no entry covers is zero; ``covers=True`` says that they cover all of it, and saves the clearing. Writes
        only into the space that this very put has reserved. Raises `BadOffset` (nothing is published), and as
        `put_from`.
        """
        self._open()
        entries = Entries(offsets, entry_bytes, None, count)
        request = scatter_request(self._engine, self._buffers, key, nbytes, entries, source, covers)
        return single(self._write_one(request, config, stream))

    @keeps_device
    def _write_one(
        self, request: WriteRequest, config: ReplicateConfig | None, stream: int | None = None
    ) -> list[int | EgmError]:
        self._open()
        held = Held()
        try:
            self._locks.acquire([request.key], self._engine.timing.put_deadline, held)
            return write_all(self._engine, [request], config or ReplicateConfig(), stream=stream)
        finally:
            self._locks.release(held)
