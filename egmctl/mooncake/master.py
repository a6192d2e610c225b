"""A client of the Mooncake Master: one method for each call, over one connection shared by any number of threads.

All calls may raise `MasterUnreachable` (not handed over: no effect), `MasterTimeout` and `MasterLost` (handed over, not
answered: may have taken effect, or still will), `MasterRefused` (the Master's error number and name), `MasterRpcError`
and `CodecError`. Nothing is ever sent twice. A ``timeout`` in seconds covers connecting, sending and the answer.

Batch calls answer one entry for each key, in order; a key that failed has a `Failure` instead of raising.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, Final, TypeVar

from egmctl.errors import UsageError
from egmctl.mooncake import calls
from egmctl.mooncake.calls import (
    Located,
    Replica,
    ReplicateConfig,
    Segment,
    SegmentUuid,
    StorageConfig,
    Task,
    Uuid,
    new_uuid,
    read_answer,
    to_located,
    to_replicas,
)
from egmctl.mooncake.codec import CodecError, Failure, build
from egmctl.mooncake.errors import (
    MasterLost,
    MasterRefused,
    MasterRpcError,
    MasterTimeout,
    MasterUnreachable,
    error_name,
)
from egmctl.mooncake.rpc import Reply, RpcConnection
from egmctl.steps import step

__all__ = [
    "ALL_REPLICAS",
    "NEED_REMOUNT",
    "OK",
    "SEGMENT_DRAINING",
    "SEGMENT_OK",
    "SEGMENT_UNMOUNTING",
    "CodecError",
    "Failure",
    "Located",
    "MasterClient",
    "MasterLost",
    "MasterRefused",
    "MasterRpcError",
    "MasterTimeout",
    "MasterUnreachable",
    "Replica",
    "ReplicateConfig",
    "Reply",
    "Segment",
    "SegmentUuid",
    "StorageConfig",
    "Task",
    "Uuid",
    "error_name",
    "new_uuid",
]

T = TypeVar("T")

OK: Final = 1
NEED_REMOUNT: Final = 2
SEGMENT_OK: Final = 1
SEGMENT_DRAINING: Final = 4  # GRACEFULLY_UNMOUNTING
SEGMENT_UNMOUNTING: Final = 5
ALL_REPLICAS: Final = 4
_SEGMENT_NOT_FOUND: Final = -101


def _arguments(*literals: bytes) -> bytes:
    return b"\xfd" + b"".join(literals) + b"\xff"


def _vector(literal: bytes) -> bytes:
    return b"\x84" + literal


_U64, _I32, _BOOL = b"\x04", b"\x01", b"\x0b"
_TWO_UUIDS = _arguments(calls.UUID, calls.UUID)
_MOUNT = _arguments(calls.SEGMENT, calls.UUID)
_REMOUNT = _arguments(_vector(calls.SEGMENT), calls.UUID)
_GRACEFUL = _arguments(calls.UUID, calls.UUID, _U64)
_KEY = _arguments(calls.STRING, calls.STRING)
_KEYS = _arguments(_vector(calls.STRING), calls.STRING)
_PUT_START = _arguments(calls.UUID, calls.STRING, _U64, calls.CONFIG, calls.STRING)
_PUT_END = _arguments(calls.UUID, calls.OBJECT_META, _I32, calls.STRING)
_PUT_REVOKE = _arguments(calls.UUID, calls.STRING, _I32, calls.STRING)
_BATCH_PUT_START = _arguments(calls.UUID, _vector(calls.STRING), _vector(_U64), calls.CONFIG, calls.STRING)
_BATCH_PUT_END = _arguments(calls.UUID, _vector(calls.OBJECT_META), _I32, calls.STRING)
_BATCH_PUT_REVOKE = _arguments(calls.UUID, _vector(calls.STRING), _I32, calls.STRING)
_REMOVE = _arguments(calls.STRING, _BOOL, calls.STRING)
_BATCH_REMOVE = _arguments(_vector(calls.STRING), _BOOL, calls.STRING)
_REMOVE_ALL = _arguments(_BOOL, calls.STRING)
_FETCH_TASKS = _arguments(calls.UUID, _U64)
_COMPLETE_TASK = _arguments(calls.UUID, _arguments(calls.UUID, _I32, calls.STRING))

_DEFAULT_CONFIG = ReplicateConfig()


def _same(value: Any) -> Any:
    return value


def _nothing(value: Any) -> None:
    return None


class MasterClient:
    """The Master at ``address`` (``host:port``). ``timeout`` is the default for each call, in seconds."""

    def __init__(self, address: str, *, timeout: float = 5.0, tenant_id: str = "default") -> None:
        self.address = address
        self.tenant_id = tenant_id
        self.rpc = RpcConnection(address, timeout=timeout)

    def __enter__(self) -> MasterClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; calls under way fail with `MasterLost`."""
        self.rpc.close()

    @property
    def epoch(self) -> int:
        """0 before the first connection, and one more each time the connection was made (anew)."""
        return self.rpc.epoch

    def connected(self) -> bool:
        """Whether the connection stands and the Master has not closed it. Does not wait and does not connect."""
        return self.rpc.connected()

    # -- the client and its segments

    def service_ready(self, *, timeout: float | None = None) -> str:
        """The Master's protocol version ("2.0.0")."""
        with step("mooncake.master.service_ready", master=self.address):
            return self._submit("ServiceReady", b"", None, calls.STRING_ANSWER, str, timeout).result()

    def storage_config(self, *, timeout: float | None = None) -> StorageConfig:
        def convert(row: tuple[Any, ...]) -> StorageConfig:
            return StorageConfig(*row[:3])

        return self._submit("GetStorageConfig", b"", None, calls.CONFIG_ANSWER, convert, timeout).result()

    def ping(self, client: Uuid, *, timeout: float | None = None) -> int:
        """1 (`OK`) or 2 (`NEED_REMOUNT`). Keeps what the client has mounted alive either way."""
        with step("mooncake.master.ping", master=self.address):
            return self._submit(
                "Ping", calls.UUID, client, calls.PING_ANSWER, lambda row: int(row[1]), timeout
            ).result()

    def mount_segment(self, segment: Segment, client: Uuid, *, timeout: float | None = None) -> None:
        """Offer a chunk. The client's status stays `NEED_REMOUNT` until it has sent one ``remount_segments``."""
        with step("mooncake.master.mount_segment", master=self.address, segment=segment.id):
            self._submit(
                "MountSegment",
                _MOUNT,
                (segment.wire(), client),
                calls.VOID_ANSWER,
                _nothing,
                timeout,
                f"segment {segment.name}",
            ).result()

    def remount_segments(self, segments: SequenceOf[Segment], client: Uuid, *, timeout: float | None = None) -> None:
        """Mount what is missing and make the client `OK`. For a client that is `OK` already it does nothing at all."""
        with step("mooncake.master.remount_segments", master=self.address, segments=[s.id for s in segments]):
            value = [segment.wire() for segment in segments], client
            self._submit("ReMountSegment", _REMOUNT, value, calls.VOID_ANSWER, _nothing, timeout).result()

    def unmount_segment(self, segment: SegmentUuid, client: Uuid, *, timeout: float | None = None) -> None:
        """Take a segment away at once, leases or not. Success as well when there is none, or it is another client's."""
        with step("mooncake.master.unmount_segment", master=self.address, segment=segment):
            self._submit("UnmountSegment", _TWO_UUIDS, (segment, client), calls.VOID_ANSWER, _nothing, timeout).result()

    def graceful_unmount_segment(
        self, segment: SegmentUuid, client: Uuid, grace_ms: int, *, timeout: float | None = None
    ) -> None:
        """Stop allocation now, unmount after ``grace_ms`` (if pings go on). -600 unknown segment, -101 another's."""
        with step("mooncake.master.graceful_unmount_segment", master=self.address, segment=segment, grace_ms=grace_ms):
            self._submit(
                "GracefulUnmountSegment",
                _GRACEFUL,
                (segment, client, grace_ms),
                calls.VOID_ANSWER,
                _nothing,
                timeout,
            ).result()

    def query_segment_status_by_id(self, segment: SegmentUuid, *, timeout: float | None = None) -> int | None:
        """1 `SEGMENT_OK`, 4 `SEGMENT_DRAINING`, 5 `SEGMENT_UNMOUNTING`; None: the Master does not know it."""
        with step("mooncake.master.query_segment_status_by_id", master=self.address, segment=segment):
            return self._status("QuerySegmentStatusById", calls.UUID, segment, timeout)

    def query_segment_status(self, name: str, *, timeout: float | None = None) -> int | None:
        """The same by name; of several segments with one name the Master knows only the last."""
        with step("mooncake.master.query_segment_status", master=self.address):
            return self._status("QuerySegmentStatus", calls.STRING, name, timeout)

    def fetch_tasks(self, client: Uuid, count: int = 16, *, timeout: float | None = None) -> list[Task]:
        """Up to ``count`` tasks for this client; the Master does not offer them again."""
        with step("mooncake.master.fetch_tasks", master=self.address):
            return self._submit(
                "FetchTasks",
                _FETCH_TASKS,
                (client, count),
                calls.TASKS_ANSWER,
                lambda rows: [Task(*row[:5]) for row in rows],
                timeout,
            ).result()

    def complete_task(
        self, client: Uuid, task: Uuid, *, succeeded: bool, message: str = "", timeout: float | None = None
    ) -> None:
        """Report a fetched task as done or failed."""
        with step("mooncake.master.complete_task", master=self.address):
            value = client, (task, 3 if succeeded else 2, message)
            self._submit("MarkTaskToComplete", _COMPLETE_TASK, value, calls.VOID_ANSWER, _nothing, timeout).result()

    # -- objects, one at a time

    def put_start(
        self,
        client: Uuid,
        key: str | bytes,
        size: int,
        config: ReplicateConfig = _DEFAULT_CONFIG,
        *,
        timeout: float | None = None,
    ) -> tuple[Replica, ...]:
        """Reserve space for an object of ``size`` bytes; it is readable after ``put_end`` only."""
        value = client, key, size, config.wire(), self.tenant_id
        return self._submit("PutStart", _PUT_START, value, calls.REPLICAS_ANSWER, to_replicas, timeout, key).result()

    def put_end(
        self,
        client: Uuid,
        key: str | bytes,
        *,
        checksum: int | None = None,
        replica_type: int = ALL_REPLICAS,
        timeout: float | None = None,
    ) -> None:
        """Make what ``put_start`` reserved readable. Again is success; by another client it is -601."""
        value = client, (key, checksum), replica_type, self.tenant_id
        self._submit("PutEnd", _PUT_END, value, calls.VOID_ANSWER, _nothing, timeout, key).result()

    def put_revoke(
        self, client: Uuid, key: str | bytes, *, replica_type: int = ALL_REPLICAS, timeout: float | None = None
    ) -> None:
        """Give the reserved space back."""
        value = client, key, replica_type, self.tenant_id
        self._submit("PutRevoke", _PUT_REVOKE, value, calls.VOID_ANSWER, _nothing, timeout, key).result()

    def get_replica_list(self, key: str | bytes, *, timeout: float | None = None) -> Located:
        """Where the object lies, with a lease that began when the Master answered: count it from before the call."""
        return self._submit(
            "GetReplicaList", _KEY, (key, self.tenant_id), calls.LOCATED_ANSWER, to_located, timeout, key
        ).result()

    def exist_key(self, key: str | bytes, *, timeout: float | None = None) -> bool:
        """Whether the object can be read. Grants a lease, as ``get_replica_list`` does."""
        return self._submit("ExistKey", _KEY, (key, self.tenant_id), calls.BOOL_ANSWER, bool, timeout, key).result()

    def remove(self, key: str | bytes, *, force: bool = False, timeout: float | None = None) -> None:
        """Remove an object; without ``force`` a lease on it is -706."""
        value = key, force, self.tenant_id
        self._submit("Remove", _REMOVE, value, calls.VOID_ANSWER, _nothing, timeout, key).result()

    def remove_all(self, *, force: bool = False, timeout: float | None = None) -> int:
        """Remove all objects of the tenant that may be removed; how many."""
        return self._submit("RemoveAll", _REMOVE_ALL, (force, self.tenant_id), b"\x03", int, timeout).result()

    # -- objects, in batches. ``submit_`` forms return at once: several may be under way, and overlap with copies.

    def submit_batch_put_start(
        self,
        client: Uuid,
        keys: SequenceOf[str | bytes],
        sizes: SequenceOf[int],
        config: ReplicateConfig = _DEFAULT_CONFIG,
        *,
        timeout: float | None = None,
    ) -> Reply[list[tuple[Replica, ...] | Failure]]:
        if len(keys) != len(sizes):
            raise UsageError(f"{len(keys)} keys and {len(sizes)} sizes", hint="give one size for each key")
        value = client, keys, sizes, config.wire(), self.tenant_id
        return self._batch("BatchPutStart", _BATCH_PUT_START, value, calls.REPLICAS_ANSWER, to_replicas, timeout, keys)

    def submit_batch_put_end(
        self,
        client: Uuid,
        keys: SequenceOf[str | bytes],
        checksums: SequenceOf[int | None] | None = None,
        *,
        replica_type: int = ALL_REPLICAS,
        timeout: float | None = None,
    ) -> Reply[list[Failure | None]]:
        if checksums is not None and len(keys) != len(checksums):
            raise UsageError(f"{len(keys)} keys and {len(checksums)} checksums", hint="give one for each key, or none")
        metas = [(key, None) for key in keys] if checksums is None else list(zip(keys, checksums, strict=True))
        value = client, metas, replica_type, self.tenant_id
        return self._batch("BatchPutEnd", _BATCH_PUT_END, value, calls.VOID_ANSWER, _same, timeout, keys)

    def submit_batch_put_revoke(
        self,
        client: Uuid,
        keys: SequenceOf[str | bytes],
        *,
        replica_type: int = ALL_REPLICAS,
        timeout: float | None = None,
    ) -> Reply[list[Failure | None]]:
        value = client, keys, replica_type, self.tenant_id
        return self._batch("BatchPutRevoke", _BATCH_PUT_REVOKE, value, calls.VOID_ANSWER, _same, timeout, keys)

    def submit_batch_get_replica_list(
        self, keys: SequenceOf[str | bytes], *, timeout: float | None = None
    ) -> Reply[list[Located | Failure]]:
        value = keys, self.tenant_id
        return self._batch("BatchGetReplicaList", _KEYS, value, calls.LOCATED_ANSWER, to_located, timeout, keys)

    def submit_batch_exist_key(
        self, keys: SequenceOf[str | bytes], *, timeout: float | None = None
    ) -> Reply[list[bool | Failure]]:
        value = keys, self.tenant_id
        return self._batch("BatchExistKey", _KEYS, value, calls.BOOL_ANSWER, _same, timeout, keys)

    def submit_batch_remove(
        self, keys: SequenceOf[str | bytes], *, force: bool = False, timeout: float | None = None
    ) -> Reply[list[Failure | None]]:
        value = keys, force, self.tenant_id
        return self._batch("BatchRemove", _BATCH_REMOVE, value, calls.VOID_ANSWER, _same, timeout, keys)

    def batch_put_start(
        self,
        client: Uuid,
        keys: SequenceOf[str | bytes],
        sizes: SequenceOf[int],
        config: ReplicateConfig = _DEFAULT_CONFIG,
        *,
        timeout: float | None = None,
    ) -> list[tuple[Replica, ...] | Failure]:
        return self.submit_batch_put_start(client, keys, sizes, config, timeout=timeout).result()

    def batch_put_end(
        self,
        client: Uuid,
        keys: SequenceOf[str | bytes],
        checksums: SequenceOf[int | None] | None = None,
        *,
        replica_type: int = ALL_REPLICAS,
        timeout: float | None = None,
    ) -> list[Failure | None]:
        return self.submit_batch_put_end(client, keys, checksums, replica_type=replica_type, timeout=timeout).result()

    def batch_put_revoke(
        self,
        client: Uuid,
        keys: SequenceOf[str | bytes],
        *,
        replica_type: int = ALL_REPLICAS,
        timeout: float | None = None,
    ) -> list[Failure | None]:
        return self.submit_batch_put_revoke(client, keys, replica_type=replica_type, timeout=timeout).result()

    def batch_get_replica_list(
        self, keys: SequenceOf[str | bytes], *, timeout: float | None = None
    ) -> list[Located | Failure]:
        return self.submit_batch_get_replica_list(keys, timeout=timeout).result()

    def batch_exist_key(self, keys: SequenceOf[str | bytes], *, timeout: float | None = None) -> list[bool | Failure]:
        return self.submit_batch_exist_key(keys, timeout=timeout).result()

    def batch_remove(
        self, keys: SequenceOf[str | bytes], *, force: bool = False, timeout: float | None = None
    ) -> list[Failure | None]:
        return self.submit_batch_remove(keys, force=force, timeout=timeout).result()

    # -- how calls are made

    def _submit(
        self,
        call: str,
        literal: bytes,
        value: Any,
        answer: bytes,
        convert: Callable[[Any], T],
        timeout: float | None,
        subject: str | bytes = "",
    ) -> Reply[T]:
        def read(body: bytes) -> T:
            got = read_answer(call, answer, body)
            if isinstance(got, Failure):
                raise MasterRefused(call, got.code, where=self.address, subject=_printable(subject))
            return convert(got)

        return self.rpc.submit(call, build(literal, value) if literal else b"", timeout, read)

    def _batch(
        self,
        call: str,
        literal: bytes,
        value: Any,
        answer: bytes,
        convert: Callable[[Any], T],
        timeout: float | None,
        keys: SequenceOf[str | bytes],
    ) -> Reply[list[T | Failure]]:
        count = len(keys)
        wanted = b"\x84" + answer

        def read(body: bytes) -> list[T | Failure]:
            got = read_answer(call, wanted, body)
            if len(got) != count:
                raise CodecError(f"{call}: {len(got)} answers to {count} keys", where=self.address)
            if convert is _same:
                return got  # type: ignore[no-any-return]
            return [item if isinstance(item, Failure) else convert(item) for item in got]

        return self.rpc.submit(call, build(literal, value), timeout, read)

    def _status(self, call: str, literal: bytes, value: Any, timeout: float | None) -> int | None:
        try:
            return self._submit(call, literal, value, calls.INT_ANSWER, int, timeout).result()
        except MasterRefused as error:
            if error.number == _SEGMENT_NOT_FOUND:
                return None
            raise


def _printable(subject: str | bytes) -> str:
    """A key as a message may show it: short, on one line, whatever bytes it has."""
    if not subject:
        return ""
    text = subject.decode("utf-8", "backslashreplace") if isinstance(subject, bytes) else subject
    shown = "".join(c if c.isprintable() else "?" for c in text[:80])
    return shown + "..." if len(text) > 80 else shown
