"""The consumer's face: put and get straight between a caller's buffers and the pool's DRAM."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from egmctl.consumer.bindings import Bindings, Fetch
from egmctl.consumer.buffers import Buffer, Buffers
from egmctl.consumer.engine import Backoff, Engine, Part, Timing, check_batch
from egmctl.consumer.errors import (
    GetFailed,
    InvalidBuffer,
    InvalidRequest,
    LeaseExpired,
    ObjectExists,
    ProviderGone,
    StoreClosed,
)
from egmctl.consumer.flow import FlowOptions, Throttle
from egmctl.consumer.gather import Entries, Indices, scatter, zero
from egmctl.consumer.host_copy import Completion, Copier, Group, HostCopier
from egmctl.consumer.keylocks import KeyLocks
from egmctl.consumer.mappings import MappingCache
from egmctl.consumer.master_link import Location, MasterLink
from egmctl.consumer.pins import Target
from egmctl.consumer.reader import ReadRequest, ReadRound, read_all
from egmctl.consumer.session import Session
from egmctl.consumer.transfer import BatchTransfer, Transfer, single
from egmctl.consumer.writer import WriteRequest, WriteRound, write_all
from egmctl.errors import EgmError
from egmctl.mooncake.descriptor import SegmentDescriptor
from egmctl.mooncake.master import MasterClient, MasterTimeout, MasterUnreachable, ReplicateConfig, new_uuid

if TYPE_CHECKING:
    from egmctl.consumer.copy import CopyOptions

__all__ = ["EgmStore"]

BufferList = Sequence[tuple[int, int]]
"""(address, bytes) of each part of one object, in order."""


class EgmStore:
    """A connection to a Mooncake Store whose pools are reached directly. Use it from any number of threads.

    Batches return one entry a key, in order: bytes moved, or the error (a `StoreError`) that this key failed with; they
    raise only for what concerns all keys. All other calls raise. Addresses are integers and lie in registered buffers.
    """

    def __init__(self, engine: Engine, buffers: Buffers, host_copier: HostCopier) -> None:
        self._engine = engine
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
        max_mappings: int = 0,
        endpoints: Sequence[str] = (),
        copy_threads: int | None = None,
        copier: Copier | None = None,
        copy_options: CopyOptions | None = None,
    ) -> EgmStore:
        """``master`` is ``host:port``; ``devices`` are the GPUs whose memory is used, ``()`` for host buffers alone.

        ``endpoints`` are pools that a put may be steered to from the start, where the Master also has space that cannot
        be reached; those met on the way are remembered by themselves.
        ``max_mapped_bytes`` and ``max_mappings`` bound what stays imported while idle (0: everything does).
        ``copy_options`` go to the device copier. ``copier`` takes the place of the CPU's, for tests.
        Raises `MasterUnreachable`, `CudaError`, `UsageError`.
        """
        timing = timing or Timing()
        client = MasterClient(master, timeout=timing.request, tenant_id=tenant_id)
        host_copier = HostCopier(copy_threads)
        try:
            client.service_ready()
            driver = device_copier = gatherer = None
            if devices:
                from egmctl.consumer.copy import make_copier, make_gatherer
                from egmctl.memory.driver import get_driver

                driver = get_driver()
                device_copier = make_copier(driver, devices, copy_options)
                gatherer = make_gatherer(driver, devices, copy_options)
            mappings = MappingCache(max_bytes=max_mapped_bytes, max_count=max_mappings)
            bindings = Bindings(
                make_fetch(metadata_server, timing.bind),
                devices=devices,
                timeout=timing.bind,
                stock_expiry=timing.stock_expiry,
                endpoints=endpoints,
                on_gone=lambda endpoint, nonce, chunks: mappings.drop(_belongs_to(endpoint, nonce, chunks)),
            )
            engine = Engine(
                MasterLink(client, new_uuid()),
                bindings,
                mappings,
                copier or host_copier,
                device_copier,
                Throttle(flow or FlowOptions()),
                timing,
                gatherer,
            )
            return cls(engine, Buffers(driver, devices), host_copier)
        except BaseException:
            client.close()
            host_copier.close()
            raise

    def __enter__(self) -> EgmStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abandon transfers under way (their copies are waited for), unmap everything. Twice is success."""
        with self._lock:
            self._closed = True
            outstanding = list(self._outstanding)
        for transfer in outstanding:
            transfer.abandon()
        self._host_copier.close()
        self._engine.bindings.close()
        self._engine.mappings.close()
        for part in (self._engine.gatherer, self._engine.device_copier):
            closer = getattr(part, "close", None)
            if closer is not None:
                closer()
        self._engine.master.close()

    # -- buffers

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
        return self.batch_put_from_multi_buffers(
            keys, [[pair] for pair in zip(addresses, sizes, strict=True)], config=config, stream=stream
        )

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
        results, requests, places = self._write_requests(keys, buffers)
        held = self._locks.acquire([request.key for request in requests], self._engine.timing.put_deadline)
        try:
            written = write_all(self._engine, requests, config or ReplicateConfig(), stream=stream)
        finally:
            self._locks.release(held)
        return _merge(results, places, written)

    def put_from_async(
        self, key: str, address: int, nbytes: int, *, config: ReplicateConfig | None = None, stream: int | None = None
    ) -> Transfer:
        """Reserve and begin to copy, ordered after what ``stream`` holds; published by `Transfer.result`."""
        return Transfer(self.batch_put_from_async([key], [address], [nbytes], config=config, stream=stream))

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
        results, requests, places = self._write_requests(keys, [[pair] for pair in zip(addresses, sizes, strict=True)])
        held = self._locks.acquire([request.key for request in requests], self._engine.timing.put_deadline)
        first = WriteRound(self._engine, list(enumerate(requests)), config, stream)
        try:
            first.start()
        except BaseException:
            first.abandon()
            self._locks.release(held)
            raise

        def finish() -> list[int | EgmError]:
            return _merge(results, places, write_all(self._engine, requests, config, stream=stream, first=first))

        return self._under_way(first, finish, lambda: self._locks.release(held))

    def put(self, key: str, data: bytes | bytearray | memoryview, *, config: ReplicateConfig | None = None) -> int:
        """Put what a bytes-like object holds. Raises as `put_from`."""
        view = memoryview(data).cast("B")
        if view.nbytes == 0:
            raise InvalidRequest("an object has at least one byte", where=f"object {key!r}")
        if view.readonly:
            # The characters of a bytes object lie still; ctypes gives their address without a copy.
            kept: object = data if isinstance(data, bytes) else view.tobytes()
            address = ctypes.cast(ctypes.c_char_p(kept), ctypes.c_void_p).value or 0  # type: ignore[arg-type]
        else:
            kept = (ctypes.c_char * view.nbytes).from_buffer(view)
            address = ctypes.addressof(kept)
        return single(self._write_one(WriteRequest(key, view.nbytes, (_loose(address, view.nbytes),)), config))

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
        return self.batch_get_into_multi_buffers(
            keys, [[pair] for pair in zip(addresses, capacities, strict=True)], stream=stream
        )

    def batch_get_into_multi_buffers(
        self, keys: Sequence[str], buffers: Sequence[BufferList], *, stream: int | None = None
    ) -> list[int | EgmError]:
        """Get several objects, each spread over its parts in order; the parts together hold at least the object."""
        check_batch(keys, buffers)
        results, requests, places = self._read_requests(keys, buffers)
        return _merge(results, places, read_all(self._engine, requests, stream=stream))

    def get_into_async(self, key: str, address: int, capacity: int, *, stream: int | None = None) -> Transfer:
        """Locate and begin to copy, ordered after what ``stream`` holds; the bytes are right once `Transfer.result`
        says so."""
        return Transfer(self.batch_get_into_async([key], [address], [capacity], stream=stream))

    def batch_get_into_async(
        self, keys: Sequence[str], addresses: Sequence[int], capacities: Sequence[int], *, stream: int | None = None
    ) -> BatchTransfer:
        """As `get_into_async`, for several."""
        check_batch(keys, addresses, capacities)
        results, requests, places = self._read_requests(
            keys, [[pair] for pair in zip(addresses, capacities, strict=True)]
        )
        first = ReadRound(self._engine, list(enumerate(requests)), stream)
        try:
            first.start()
        except BaseException:
            first.abandon()
            raise

        def finish() -> list[int | EgmError]:
            return _merge(results, places, read_all(self._engine, requests, stream=stream, first=first))

        return self._under_way(first, finish, lambda: None)

    def get_range(self, key: str, offset: int, length: int, address: int, *, stream: int | None = None) -> int:
        """Get ``length`` bytes from ``offset`` of an object. Raises `InvalidRequest` when it has no such range."""
        self._open()
        buffer = self._buffers.find(address, length)

        def layout(size: int) -> tuple[int, Sequence[Part]]:
            check_range(key, size, offset, length)
            return length, [Part(offset, address, length, buffer)] if length else []

        return single(read_all(self._engine, [ReadRequest(key, layout)], stream=stream))

    def get(self, key: str) -> bytes:
        """A whole object as bytes. Raises as `get_into`."""
        self._open()
        kept: list[ctypes.Array[ctypes.c_char]] = []

        def layout(size: int) -> tuple[int, Sequence[Part]]:
            kept[:] = [ctypes.create_string_buffer(size)]
            return size, [_loose(ctypes.addressof(kept[0]), size)]

        single(read_all(self._engine, [ReadRequest(key, layout)]))
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
        backoff = Backoff(self._engine.timing.retry)
        while True:
            try:
                with Session(self._engine, self._buffers, named) as session:
                    nbytes = session.gather(
                        offsets, entry_bytes, destination, keys=named, objects=objects, count=count, stream=stream
                    )
                    if session.unchanged():
                        return nbytes
                error: EgmError = GetFailed("an object changed while it was read", where=f"objects {named[:4]}")
            except (ProviderGone, LeaseExpired, MasterTimeout, MasterUnreachable) as failed:
                error = failed
            if not backoff.sleep():
                raise error

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
        buffer = self._buffers.find(source, entries.nbytes)
        if buffer.device is None:
            entries.checked([nbytes])

        def custom(targets: Sequence[Target], on: int | None) -> Completion:
            started = []
            for target in targets:
                if not covers:
                    zero(self._engine, target, nbytes, buffer.device)
                started.append(scatter(self._engine, self._buffers, (target, nbytes), entries, source, on))
            return started[0] if len(started) == 1 else Group(started)

        return single(self._write_one(WriteRequest(key, nbytes, custom=custom), config, stream))

    def session(self, keys: Sequence[str]) -> Session:
        """Locate objects once and read parts of them repeatedly within the lease, with no further calls to the Master.

        A context manager; see `Session`.
        """
        self._open()
        return Session(self._engine, self._buffers, keys)

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

    def _parts(self, pieces: BufferList) -> list[Part]:
        parts = []
        offset = 0
        for address, nbytes in pieces:
            parts.append(Part(offset, address, nbytes, self._buffers.find(address, nbytes)))
            offset += nbytes
        return parts

    def _write_requests(
        self, keys: Sequence[str], buffers: Sequence[BufferList]
    ) -> tuple[list[int | EgmError], list[WriteRequest], list[int]]:
        self._open()
        results: list[int | EgmError] = [0] * len(keys)
        requests: list[WriteRequest] = []
        places: list[int] = []
        seen: set[str] = set()
        for at, (key, pieces) in enumerate(zip(keys, buffers, strict=True)):
            try:
                if key in seen:
                    raise ObjectExists("is put twice in this batch", where=f"object {key!r}")
                parts = self._parts(pieces)
                total = sum(part.nbytes for part in parts)
                if not key or total == 0:
                    raise InvalidRequest(
                        "keys are not empty and objects have at least one byte", where=f"object {key!r}"
                    )
            except EgmError as error:
                results[at] = error
                continue
            seen.add(key)
            requests.append(WriteRequest(key, total, parts))
            places.append(at)
        return results, requests, places

    def _read_requests(
        self, keys: Sequence[str], buffers: Sequence[BufferList]
    ) -> tuple[list[int | EgmError], list[ReadRequest], list[int]]:
        self._open()
        results: list[int | EgmError] = [0] * len(keys)
        requests: list[ReadRequest] = []
        places: list[int] = []
        for at, (key, pieces) in enumerate(zip(keys, buffers, strict=True)):
            try:
                parts = self._parts(pieces)
            except EgmError as error:
                results[at] = error
                continue
            requests.append(ReadRequest(key, _whole(key, parts)))
            places.append(at)
        return results, requests, places


def _whole(key: str, parts: Sequence[Part]) -> Callable[[int], tuple[int, Sequence[Part]]]:
    def layout(size: int) -> tuple[int, Sequence[Part]]:
        if len(parts) == 1 and parts[0].nbytes == size:
            return size, parts
        capacity = sum(part.nbytes for part in parts)
        if capacity < size:
            raise InvalidBuffer(
                f"has {size} bytes and the buffer given for it {capacity}",
                where=f"object {key!r}",
                hint="give a larger buffer, or get a range",
            )
        used = []
        for part in parts:
            if part.offset >= size:
                break
            used.append(Part(part.offset, part.address, min(part.nbytes, size - part.offset), part.buffer))
        return size, used

    return layout


def check_range(key: str, size: int, offset: int, length: int) -> None:
    """Raises `InvalidRequest` unless an object of ``size`` bytes has ``[offset, offset + length)``."""
    if offset < 0 or length < 0 or offset + length > size:
        raise InvalidRequest(f"{length} bytes at {offset} are not inside its {size} bytes", where=f"object {key!r}")


def _loose(address: int, nbytes: int) -> Part:
    return Part(0, address, nbytes, Buffer(address, nbytes, "pageable", None))


def _merge(results: list[int | EgmError], places: list[int], found: list[int | EgmError]) -> list[int | EgmError]:
    for at, result in zip(places, found, strict=True):
        results[at] = result
    return results


def _belongs_to(endpoint: str, nonce: str, chunks: frozenset[int] | None) -> Callable[[Hashable], bool]:
    def chosen(key: Hashable) -> bool:
        return isinstance(key, tuple) and key[:2] == (endpoint, nonce) and (chunks is None or key[2] in chunks)

    return chosen


def make_fetch(metadata_server: str, timeout: float) -> Fetch:
    """How descriptors are found: from the endpoint itself, or from an HTTP metadata server.

    With a metadata server an endpoint need not be ``host:port``; where it is, and an egmctl agent answers there, the
    agent is believed, since what lies on the server may be of an agent that died.
    """
    from egmctl.mooncake.handshake import fetch_descriptor

    if metadata_server == "P2PHANDSHAKE":
        return lambda endpoint: fetch_descriptor(endpoint, timeout)
    from egmctl.mooncake.metadata import MetadataClient

    server = MetadataClient(metadata_server, timeout=timeout)

    def fetch(endpoint: str) -> SegmentDescriptor:
        found = server.fetch(endpoint)
        if found is None:
            raise ProviderGone("the metadata server has no descriptor of it", where=endpoint)
        if found.egm is not None:
            with suppress(EgmError):
                answer = fetch_descriptor(endpoint, timeout)
                if answer.egm is not None:
                    return answer
        return found

    return fetch
