"""The gets of a store, whole and in part."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from egmctl.consumer.attempts import read_all
from egmctl.consumer.base import StoreBase
from egmctl.consumer.context import keeps_device
from egmctl.consumer.engine import Part, check_batch
from egmctl.consumer.gather import Entries, Indices
from egmctl.consumer.reader import ReadRound
from egmctl.consumer.requests import BufferList, ReadList, ReadRequest, Reads, check_range, loose, singles
from egmctl.consumer.session import Session
from egmctl.consumer.sparse import gather_objects
from egmctl.consumer.transfer import BatchTransfer, Transfer, single
from egmctl.errors import EgmError

__all__ = ["Gets"]


class Gets(StoreBase):
    """Those of `egmctl.consumer.EgmStore`."""

    def get_into(self, key: str, address: int, capacity: int, *, stream: int | None = None) -> int:
        """Get a whole object into at most ``capacity`` bytes at ``address``; returns its size.

        Raises `ObjectNotFound`, `ObjectBusy`, `Unreachable`, `ProviderGone`, `GetFailed`, `InvalidBuffer` (too small).
        After an error the buffer may hold anything.
        """
        return single(self.batch_get_into([key], [address], [capacity], stream=stream))

    def batch_get_into(
        self,
        keys: Sequence[str],
        addresses: Sequence[int],
        capacities: Sequence[int],
        *,
        stream: int | None = None,
    ) -> list[int | EgmError]:
        """Get several objects; see the class for what is returned."""
        check_batch(keys, addresses, capacities)
        return self.batch_get_into_multi_buffers(keys, singles(addresses, capacities), stream=stream)

    @keeps_device
    def batch_get_into_multi_buffers(
        self, keys: Sequence[str], buffers: Sequence[BufferList], *, stream: int | None = None
    ) -> list[int | EgmError]:
        """Get several objects, each spread over its parts in order; the parts together hold at least the object."""
        check_batch(keys, buffers)
        self._open()
        return read_all(self._engine, Reads(self._buffers, keys, buffers), stream=stream)

    def get_into_async(self, key: str, address: int, capacity: int, *, stream: int | None = None) -> Transfer:
        """Locate and begin to copy, ordered after what ``stream`` holds; the bytes are right once `Transfer.result`
        says so.

        Pageable memory is copied by the CPU, which waits here until the stream gets so far. A Master that cannot be
        reached is asked again by `Transfer.result`, as is a provider that is gone.
        """
        return Transfer(self.batch_get_into_async([key], [address], [capacity], stream=stream))

    @keeps_device
    def batch_get_into_async(
        self, keys: Sequence[str], addresses: Sequence[int], capacities: Sequence[int], *, stream: int | None = None
    ) -> BatchTransfer:
        """As `get_into_async`, for several."""
        check_batch(keys, addresses, capacities)
        self._open()
        requests = Reads(self._buffers, keys, singles(addresses, capacities))
        first = ReadRound(self._engine, requests, stream)

        def finish() -> list[int | EgmError]:
            return read_all(self._engine, requests, stream=stream, first=first)

        return self._begin(first, finish)

    @keeps_device
    def get_range(self, key: str, offset: int, length: int, address: int, *, stream: int | None = None) -> int:
        """Get ``length`` bytes from ``offset`` of an object. Raises `InvalidRequest` when it has no such range."""
        self._open()
        buffer = self._buffers.find(address, length)

        def layout(size: int) -> tuple[int, Sequence[Part]]:
            check_range(key, size, offset, length)
            return length, [Part(offset, address, length, buffer)] if length else []

        return single(read_all(self._engine, ReadList([ReadRequest(key, layout=layout)]), stream=stream))

    @keeps_device
    def get(self, key: str) -> bytes:
        """A whole object as bytes. Raises as `get_into`."""
        self._open()
        kept: list[ctypes.Array[ctypes.c_char]] = []

        def layout(size: int) -> tuple[int, Sequence[Part]]:
            kept[:] = [ctypes.create_string_buffer(size)]
            return size, [loose(ctypes.addressof(kept[0]), size)]

        single(read_all(self._engine, ReadList([ReadRequest(key, layout=layout)])))
        return kept[0].raw

    @keeps_device
    def gather_into(
        self,
        keys: str | Sequence[str],
        offsets: Indices,
        entry_bytes: int,
        destination: int,
        *,
        objects: Indices | None = None,
        count: int | None = None,
        stream: int | None = None,
    ) -> int:
        """Entries of ``entry_bytes`` at ``offsets`` of one object, or of several: then ``objects`` says for each entry
        the number of its key. They lie side by side from ``destination`` on; returns their bytes.

        Raises `BadOffset` for an entry outside its object (what was read is not to be used), and as `get_into`.
        """
        self._open()
        named = [keys] if isinstance(keys, str) else list(keys)
        entries = Entries(offsets, entry_bytes, objects, count)
        return gather_objects(self._engine, self._buffers, named, entries, destination, stream)

    def session(self, keys: Sequence[str]) -> Session:
        """Locate objects once and read parts of them repeatedly within the lease, with no further calls to the Master.

        A context manager; see `Session`.
        """
        self._open()
        return Session(self._engine, self._buffers, keys)
