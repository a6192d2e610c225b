"""The one ordered stream of changes that this pool sends to a Master, and what becomes of a change nobody answered.

A mount whose answer never came may still take effect, so its memory stays until that is settled: the Master says that
it has the segment (then an unmount is conclusive), or nothing was sent and no ping has gone for as long as the Master
keeps a silent client, after which it is asked again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from egmctl.ledger import SegmentId, SegmentRow
from egmctl.mooncake.errors import MasterRefused, MasterRpcError, MasterUnreachable
from egmctl.mooncake.master import MasterClient, Segment

__all__ = ["SEGMENT_GONE", "MasterLink", "certainly_not_done"]

SEGMENT_GONE = (-101, -600)
"""What a graceful unmount answers for a segment the Master does not have, or not of this client."""

_ON_ITS_WAY_OUT = -1010
"""UNAVAILABLE_IN_CURRENT_STATUS, of a segment that a drain job has emptied: nothing is allocated in it any more."""


_SAYS_LITTLE = frozenset({-1, -102, -900, -901})
"""Refusals that do not say that nothing was done: INTERNAL_ERROR, SEGMENT_ALREADY_EXISTS (of an id that is used once:
then an earlier copy of the request has arrived), RPC_FAIL, RPC_TIMEOUT."""

_NOT_CALLED = frozenset({4, 11})
"""coro_rpc's err_codes for arguments it could not read and for a call it does not know."""


def certainly_not_done(error: BaseException) -> bool:
    """Whether a failed request has had, and will have, no effect: it was refused, or never handed over."""
    if isinstance(error, MasterRefused):
        return error.number not in _SAYS_LITTLE
    if isinstance(error, MasterRpcError):
        return error.number in _NOT_CALLED
    return isinstance(error, MasterUnreachable)


class MasterLink:
    """Changes and questions to one Master, one at a time, on a connection that nothing else uses."""

    def __init__(self, address: str, *, host_id: str = "", timeout: float = 5.0) -> None:
        self.address = address
        self._host_id = host_id
        self._timeout = timeout
        self._turn = threading.Lock()
        self._client: MasterClient | None = None
        self._unreported: list[tuple[SegmentId, SegmentId]] = []

    def _connection(self) -> MasterClient:
        if self._client is None:
            self._client = MasterClient(self.address, timeout=self._timeout)
        return self._client

    @property
    def client(self) -> MasterClient:
        """For calls that change no segment (the probe's)."""
        return self._connection()

    def renew(self) -> None:
        """Drop the connection, and with it whatever was still on its way there."""
        with self._turn:
            self._drop()

    def close(self) -> None:
        self.renew()

    def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def ready(self) -> str:
        """The Master's version. Raises what keeps it from answering."""
        with self._turn:
            return self._connection().service_ready()

    def mount(self, row: SegmentRow) -> None:
        segment = Segment(row.id, row.name, row.base, row.size, row.endpoint, row.protocol, self._host_id)
        with self._turn:
            self._connection().mount_segment(segment, row.client)

    def settle(self, client: SegmentId) -> None:
        """Tell the Master that what it has of ours is all there is to have (it mounts nothing: the list is empty)."""
        with self._turn:
            self._connection().remount_segments([], client)

    def drain(self, row: SegmentRow, grace_ms: int) -> None:
        """Readable and not allocatable until the grace ends. A segment the Master does not have needs none."""
        with self._turn:
            try:
                self._connection().graceful_unmount_segment(row.id, row.client, grace_ms)
            except MasterRefused as error:
                if error.number not in (*SEGMENT_GONE, _ON_ITS_WAY_OUT):
                    raise

    def unmount(self, row: SegmentRow) -> None:
        """Success also when the Master does not have it."""
        with self._turn:
            self._connection().unmount_segment(row.id, row.client)

    def refuse_tasks(self, client: SegmentId, why: str, count: int) -> int:
        """Fetch up to ``count`` tasks and report each failed, with those whose report did not get through before; how
        many there were. A Master hands a task out once, so none is forgotten before it has its report."""
        with self._turn:
            connection = self._connection()
            self._unreported += [(client, task.id) for task in connection.fetch_tasks(client, count)]
            refused: MasterRefused | None = None
            reported = 0
            while self._unreported:
                owner, task = self._unreported[0]
                try:
                    connection.complete_task(owner, task, succeeded=False, message=why)
                except MasterRefused as error:  # one that the Master has given up meanwhile does not keep the others
                    refused = error
                del self._unreported[0]
                reported += 1
            if refused is not None:
                raise refused
            return reported

    def lists(self, row: SegmentRow) -> bool:
        """Whether the Master has the segment, in whatever state."""
        with self._turn:
            return self._connection().query_segment_status_by_id(row.id) is not None

    def missing(self, rows: Iterable[SegmentRow]) -> list[SegmentRow]:
        return [row for row in rows if not self.lists(row)]
