"""A client of the Mooncake Master: one method for each call, over one connection shared by any number of threads.

All calls may raise `MasterUnreachable` (not handed over: no effect), `MasterTimeout` and `MasterLost` (handed over, not
answered: may have taken effect, or still will), `MasterRefused` (the Master's error number and name), `MasterRpcError`
and `CodecError`. Nothing is ever sent twice. A ``timeout`` in seconds covers connecting, sending and the answer.

Batch calls answer one entry for each key, in order; a key that failed has a `Failure` instead of raising.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from egmctl.mooncake import calls
from egmctl.mooncake.caller import I32, U64, arguments, nothing, vector
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
)
from egmctl.mooncake.codec import Failure
from egmctl.mooncake.errors import (
    CodecError,
    MasterLost,
    MasterRefused,
    MasterRpcError,
    MasterTimeout,
    MasterUnreachable,
    error_name,
)
from egmctl.mooncake.objects import ALL_REPLICAS, ObjectCalls
from egmctl.mooncake.reply import Reply
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

OK: Final = 1
NEED_REMOUNT: Final = 2
SEGMENT_OK: Final = 1
SEGMENT_DRAINING: Final = 4  # GRACEFULLY_UNMOUNTING
SEGMENT_UNMOUNTING: Final = 5
_SEGMENT_NOT_FOUND: Final = -101
_TWO_UUIDS = arguments(calls.UUID, calls.UUID)
_MOUNT = arguments(calls.SEGMENT, calls.UUID)
_REMOUNT = arguments(vector(calls.SEGMENT), calls.UUID)
_GRACEFUL = arguments(calls.UUID, calls.UUID, U64)
_FETCH_TASKS = arguments(calls.UUID, U64)
_COMPLETE_TASK = arguments(calls.UUID, arguments(calls.UUID, I32, calls.STRING))


class MasterClient(ObjectCalls):
    """The Master at ``address`` (``host:port``). ``timeout`` is the default for each call, in seconds."""

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
                nothing,
                timeout,
                f"segment {segment.name}",
            ).result()

    def remount_segments(self, segments: Sequence[Segment], client: Uuid, *, timeout: float | None = None) -> None:
        """Mount what is missing and make the client `OK`. For a client that is `OK` already it does nothing at all."""
        with step("mooncake.master.remount_segments", master=self.address, segments=[s.id for s in segments]):
            value = [segment.wire() for segment in segments], client
            self._submit("ReMountSegment", _REMOUNT, value, calls.VOID_ANSWER, nothing, timeout).result()

    def unmount_segment(self, segment: SegmentUuid, client: Uuid, *, timeout: float | None = None) -> None:
        """Take a segment away at once, leases or not. Success as well when there is none, or it is another client's."""
        with step("mooncake.master.unmount_segment", master=self.address, segment=segment):
            self._submit("UnmountSegment", _TWO_UUIDS, (segment, client), calls.VOID_ANSWER, nothing, timeout).result()

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
                nothing,
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
            self._submit("MarkTaskToComplete", _COMPLETE_TASK, value, calls.VOID_ANSWER, nothing, timeout).result()

    def _status(self, call: str, literal: bytes, value: Any, timeout: float | None) -> int | None:
        try:
            return self._submit(call, literal, value, calls.INT_ANSWER, int, timeout).result()
        except MasterRefused as error:
            if error.number == _SEGMENT_NOT_FOUND:
                return None
            raise
