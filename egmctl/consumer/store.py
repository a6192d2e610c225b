"""The consumer's face: put and get straight between a caller's buffers and the pool's DRAM."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from egmctl.consumer.attempts import read_all, write_all
from egmctl.consumer.audit import Audit, AuditedCopier
from egmctl.consumer.buffers import Buffers
from egmctl.consumer.connect import assemble, make_fetch
from egmctl.consumer.context import keeps_device
from egmctl.consumer.engine import Engine, Part, Timing, check_batch
from egmctl.consumer.errors import (
    InvalidRequest,
    StoreClosed,
)
from egmctl.consumer.flow import FlowOptions
from egmctl.consumer.gather import Entries, Indices
from egmctl.consumer.host_copy import Copier, HostCopier
from egmctl.consumer.keylocks import KeyLocks
from egmctl.consumer.master_link import Location
from egmctl.consumer.reader import ReadList, ReadRequest, ReadRound
from egmctl.consumer.requests import BufferList, Reads, Writes, check_range, loose, part_of_bytes, singles
from egmctl.consumer.session import Session
from egmctl.consumer.sparse import gather_objects, scatter_request
from egmctl.consumer.transfer import BatchTransfer, Transfer, single
from egmctl.consumer.writer import WriteRequest, WriteRound
from egmctl.errors import EgmError
from egmctl.mooncake.master import ReplicateConfig

if TYPE_CHECKING:
    from egmctl.consumer.copy import CopyOptions

__all__ = ["EgmStore", "make_fetch"]


class EgmStore:
    """A connection to a Mooncake Store whose pools are reached directly. Use it from any number of threads.

    Batches return one entry a key, in order: bytes moved, or the error (a `StoreError`) that this key failed with; they
    raise only for what concerns all keys. All other calls raise. Addresses are integers and lie in registered buffers.
    """

    def __init__(self, engine: Engine, buffers: Buffers, host_copier: HostCopier) -> None:
        self._engine = engine
        self._driver = engine.driver
        self._buffers = buffers
        self._host_copier = host_copier
        self._locks = KeyLocks()
        self._lock = threading.Lock()
        self._outstanding: set[BatchTransfer] = set()
        self._closed = False

    @classmethod
    def connect(
        cls,
        master: str,
        devices: Sequence[int] = (),
        metadata_server: str = "P2PHANDSHAKE",
        tenant_id: str = "default",
        *,
        flow: FlowOptions | None = None,
        timing: Timing | None = None,
        max_mapped_bytes: int = 0,
        max_mappings: int = 1024,
        endpoints: Sequence[str] = (),
        copy_threads: int | None = None,
        copier: Copier | None = None,
        copy_options: CopyOptions | None = None,
    ) -> EgmStore:
        """``master`` is ``host:port``; ``devices`` are the GPUs whose memory is used, ``()`` for host buffers alone.

        ``endpoints`` are pools that a put may be steered to from the start, where the Master also has space that cannot
        be reached; those met on the way are remembered by themselves.
        ``max_mapped_bytes`` and ``max_mappings`` bound what stays imported: beyond them idle chunks are unmapped, the
        one used longest ago first (0: no bound). What is in use may exceed them, while it is.
        ``copy_options`` go to the device copier. ``copier`` takes the place of the CPU's, for tests.
        Raises `MasterUnreachable`, `CudaError`, `UsageError`.
        """
        host_copier = HostCopier(copy_threads)
        try:
            engine, buffers = assemble(
                master,
                devices,
                metadata_server,
                tenant_id,
                flow=flow or FlowOptions(),
                timing=timing or Timing(),
                max_mapped_bytes=max_mapped_bytes,
                max_mappings=max_mappings,
                endpoints=endpoints,
                host_copier=host_copier,
                copier=copier,
                copy_options=copy_options,
            )
        except BaseException:
            host_copier.close()
            raise
        return cls(engine, buffers, host_copier)

    def __enter__(self) -> EgmStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @keeps_device
    def close(self) -> None:
        """Abandon transfers under way (their copies are waited for), unmap everything. Twice is success.

        All of it is done also when a part fails; what failed is then raised.
        """
        with self._lock:
            self._closed = True
            outstanding = list(self._outstanding)
        engine = self._engine
        with ExitStack() as stack:  # from the last line to the first
            stack.callback(engine.master.close)
            stack.callback(engine.mappings.close)
            stack.callback(engine.bindings.close)
            # Copies are over before anything is unmapped: a GPU that still reads an unmapped range loses its context.
            for part in (engine.device_copier, engine.gatherer):
                closer = getattr(part, "close", None)
                if closer is not None:
                    stack.callback(closer)
            stack.callback(self._host_copier.close)
            for transfer in outstanding:
                stack.callback(transfer.abandon)

    # -- buffers

    @keeps_device
    def register_buffer(self, address: int, nbytes: int) -> None:
        """Make a buffer known for transfers. Local-only: nothing of it is published. Raises `InvalidBuffer`."""
        self._open()
        self._buffers.register(address, nbytes)

    def unregister_buffer(self, address: int) -> None:
        """Forget a buffer, by its start. Transfers under way on it must be over. Raises `InvalidBuffer`."""
        self._buffers.unregister(address)

    # -- put

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
        held = self._locks.acquire(keys, self._engine.timing.put_deadline)
        try:
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
        held = self._locks.acquire(keys, self._engine.timing.put_deadline)
        first = WriteRound(self._engine, requests, config, stream)
        try:
            first.begin()
        except BaseException:
            first.abandon()
            self._locks.release(held)
            raise

        def finish() -> list[int | EgmError]:
            return write_all(self._engine, requests, config, stream=stream, first=first)

        return self._under_way(first, finish, lambda: self._locks.release(held))

    def put(self, key: str, data: bytes | bytearray | memoryview, *, config: ReplicateConfig | None = None) -> int:
        """Put what a bytes-like object holds: where it lies, unless it is read-only and not ``bytes``, which is copied
        first. Raises as `put_from`, and `InvalidBuffer` for what is not one contiguous piece of memory."""
        part, kept = part_of_bytes(key, data)
        try:
            return single(self._write_one(WriteRequest(key, part.nbytes, (part,)), config))
        finally:
            del kept

    @keeps_device
    def _write_one(
        self, request: WriteRequest, config: ReplicateConfig | None, stream: int | None = None
    ) -> list[int | EgmError]:
        self._open()
        held = self._locks.acquire([request.key], self._engine.timing.put_deadline)
        try:
            return write_all(self._engine, [request], config or ReplicateConfig(), stream=stream)
        finally:
            self._locks.release(held)

    # -- get

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
        try:
            first.begin()
        except BaseException:
            first.abandon()
            raise

        def finish() -> list[int | EgmError]:
            return read_all(self._engine, requests, stream=stream, first=first)

        return self._under_way(first, finish, lambda: None)

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

    # -- the rest

    def exists(self, key: str) -> bool:
        """Whether the object can be read. The Master grants it a lease by that."""
        return self.batch_exists([key])[0]

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        """The same for several."""
        self._open()
        return self._engine.master.exists(keys)

    def size_of(self, key: str) -> int:
        """Bytes of the object. Raises `ObjectNotFound`, `ObjectBusy`."""
        self._open()
        located = self._engine.master.locate([key])()[0]
        if not isinstance(located, Location):
            raise located
        if not located.places:
            raise InvalidRequest("has no complete replica in memory", where=f"object {key!r}")
        return located.places[0].nbytes

    def remove(self, key: str, force: bool = False) -> None:
        """Remove an object. Raises `ObjectNotFound`, and `ObjectBusy` while it is being written or leased (a lease,
        but not a writer, gives way to ``force``)."""
        self._open()
        self._engine.master.remove(key, force)

    # -- many small entries

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

    def session(self, keys: Sequence[str]) -> Session:
        """Locate objects once and read parts of them repeatedly within the lease, with no further calls to the Master.

        A context manager; see `Session`.
        """
        self._open()
        return Session(self._engine, self._buffers, keys)

    @keeps_device
    def calibrate(self) -> bool:
        """Measure on each GPU of which nothing is known yet from which block size the copy engine keeps up with the
        kernel, and keep it in the user's cache folder for later stores. False: nothing was left to measure.

        Takes about a second and 64 MiB of memory of each kind for each GPU. Raises `CudaError`, `KernelError`,
        `PreflightError`.
        """
        self._open()
        measure = getattr(self._engine.device_copier, "calibrate_unknown", None)
        return bool(measure()) if measure is not None else False

    def audit(self) -> Audit:
        """Count from now on what each copy is asked to do. It costs time; `verify` asks for it."""
        audit = Audit(self._buffers, self._engine.mappings)
        engine = self._engine
        engine.host_copier = AuditedCopier(engine.host_copier, audit)
        if engine.device_copier is not None:
            engine.device_copier = AuditedCopier(engine.device_copier, audit)
        return audit

    # -- how it is done

    def _open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed")

    def _under_way(
        self, round_: ReadRound | WriteRound, finish: Callable[[], list[int | EgmError]], release: Callable[[], None]
    ) -> BatchTransfer:
        def over() -> None:
            with self._lock:
                self._outstanding.discard(transfer)
            release()

        transfer = BatchTransfer(round_, finish, over)
        with self._lock:
            closed = self._closed
            self._outstanding.add(transfer)
        if closed:
            transfer.abandon()
            self._open()
        return transfer
