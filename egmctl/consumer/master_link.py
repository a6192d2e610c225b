"""What the consumer asks the Master, with Mooncake's numbers turned into the consumer's errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

from egmctl.consumer.errors import (
    InvalidRequest,
    NoSpace,
    ObjectBusy,
    ObjectExists,
    ObjectNotFound,
    StoreError,
)
from egmctl.consumer.pins import Place
from egmctl.errors import EgmError
from egmctl.mooncake.calls import Rows, Spots, spots_of, to_replicas
from egmctl.mooncake.master import (
    Failure,
    MasterClient,
    MasterRefused,
    MasterTimeout,
    MasterUnreachable,
    ReplicateConfig,
    Reply,
    Uuid,
    error_name,
)

__all__ = ["Answer", "Asked", "Location", "MasterLink", "Requested", "Reserved", "is_transient"]

T = TypeVar("T")
Answer = Callable[[], list[T | EgmError]]
"""Waits for what was asked: one result or error for each key."""

_make: Any = tuple.__new__  # a named tuple's own constructor takes twice as long
_IN_MEMORY = 0  # the alternative of a replica's kind, on the wire
_WRITING, _COMPLETE = 2, 3  # replica status, as seen after PutStart and after PutEnd


def is_transient(error: EgmError) -> bool:
    """Whether the Master could not be asked, as opposed to: it said no."""
    return isinstance(error, (MasterUnreachable, MasterTimeout))


class Location(NamedTuple):
    """Where an object lay at some time between ``asked_at`` and the answer (monotonic seconds).

    The lease counts from ``asked_at``: the Master granted it later. ``epoch`` is the connection that answered;
    ``elsewhere`` says of each replica that is not in memory, or not complete, what it is.
    """

    key: str
    places: tuple[Place, ...]
    elsewhere: tuple[str, ...]
    asked_at: float
    lease_until: float
    epoch: int

    def still_holds(self, place: Place, first: Location) -> bool:
        """Whether this later answer proves that ``place`` was the object's all the time since ``first``."""
        return self.epoch == first.epoch and place in self.places


class Reserved(NamedTuple):
    """Space for an object, to be written to all of ``places``."""

    key: str
    places: tuple[Place, ...]
    elsewhere: tuple[str, ...]
    asked_at: float
    epoch: int


class _Question:
    """Made, and sent by `send`. ``asked_at`` is from just before that."""

    __slots__ = ("_link", "_reply", "_rows", "_submit", "asked_at", "keys")
    status = 0

    def __init__(self, link: MasterLink, keys: Sequence[str], submit: Callable[[], Reply[Rows]]) -> None:
        self._link = link
        self._submit = submit
        self._rows: Rows | None = None
        self.keys = keys

    def send(self) -> None:
        """Raises when it cannot be handed over."""
        self.asked_at = time.monotonic()
        self._reply = self._submit()

    def wait(self) -> None:
        """Until the answer is there; raises when none will come."""
        self._reply.wait()

    @property
    def epoch(self) -> int:
        """The connection that answers."""
        return self._reply.epoch

    def columns(self) -> tuple[Sequence[int], Spots]:
        """Of the answer, waited for, what is usual: the positions of objects with one replica, in memory and as it
        should be, and these as columns. For the others call it."""
        return spots_of(self._answer(), self.status)

    def _answer(self) -> Rows:
        if self._rows is None:
            self._rows = self._reply.result()
        return self._rows


class Asked(_Question):
    """A question after some keys. Calling it waits for the answer: a location or an error for each key."""

    __slots__ = ()
    status = _COMPLETE

    def __call__(self) -> list[Location | EgmError]:
        return self._taken_apart(self._answer(), self.asked_at, self.epoch)

    def again(self) -> Callable[[], list[Location | EgmError] | None]:
        """Ask the very same once more, having called this. The answer is None when the Master says just what it said,
        on the same connection: nothing has changed, and that is seen without taking the answer apart."""
        asked_at = time.monotonic()
        reply = self._link._client.submit_again(self._reply)
        return lambda: None if reply.same_as(self._reply) else self._taken_apart(reply.result(), asked_at, reply.epoch)

    def _taken_apart(self, rows: Rows, asked_at: float, epoch: int) -> list[Location | EgmError]:
        if isinstance(rows, Spots):
            return _located(self.keys, rows, asked_at, epoch)
        found: list[Location | EgmError] = []
        add, keep = found.append, _make
        for key, row in zip(self.keys, rows, strict=True):
            if row.__class__ is Failure:
                add(self._link.refusal("GetReplicaList", row.code, key))
                continue
            places, elsewhere = _memory(row[0], _COMPLETE)
            add(keep(Location, (key, places, elsewhere, asked_at, asked_at + row[1] / 1000, epoch)))
        return found


class Requested(_Question):
    """A request for space. Calling it waits for the answer: space or an error for each key."""

    __slots__ = ()
    status = _WRITING

    def __call__(self) -> list[Reserved | EgmError]:
        rows, epoch, asked_at = self._answer(), self.epoch, self.asked_at
        if isinstance(rows, Spots):
            return _reserved(self.keys, rows, asked_at, epoch)
        granted: list[Reserved | EgmError] = []
        add, keep = granted.append, _make
        for key, row in zip(self.keys, rows, strict=True):
            if row.__class__ is Failure:
                add(self._link.no_space_for(key, row.code))
                continue
            places, elsewhere = _memory(row, _WRITING)
            add(keep(Reserved, (key, places, elsewhere, asked_at, epoch)))
        return granted


class MasterLink:
    """One connection to the Master, used by all threads of a store."""

    def __init__(self, client: MasterClient, identity: Uuid) -> None:
        self._client = client
        self._identity = identity

    @property
    def epoch(self) -> int:
        return self._client.epoch

    def connected(self) -> bool:
        return self._client.connected()

    def close(self) -> None:
        self._client.close()

    def locate(self, keys: Sequence[str]) -> Asked:
        """Ask for all keys at once; the answer is waited for by calling what is returned."""
        asked = self.locating(keys)
        asked.send()
        return asked

    def locating(self, keys: Sequence[str]) -> Asked:
        """As `locate`, not sent yet."""
        return Asked(self, keys, self._client.prepare_batch_get_replica_list(keys))

    def putting(self, keys: Sequence[str], sizes: Sequence[int], config: ReplicateConfig) -> Requested:
        """A request for space, not sent yet. The answer raises for all keys, or says for each what became of it."""
        return Requested(self, keys, self._client.prepare_batch_put_start(self._identity, keys, sizes, config))

    def publishing(self, keys: Sequence[str]) -> Callable[[], Answer[bool]]:
        """A request to publish, sent by calling what is returned; that raises when it cannot be handed over."""
        submit = self._client.prepare_batch_put_end(self._identity, keys)

        def send() -> Answer[bool]:
            reply = submit()
            return lambda: [
                self.refusal("PutEnd", row.code, key) if isinstance(row, Failure) else True
                for key, row in zip(keys, reply.result(), strict=True)
            ]

        return send

    def put_revoke(self, keys: Sequence[str]) -> set[str]:
        """Give space back, as far as the Master can be asked; what it does not hear of it discards by itself. Returns
        the keys for which the Master says that none is held any more."""
        try:
            rows = self._client.batch_put_revoke(self._identity, keys)
        except EgmError:
            return set()
        return {
            key
            for key, row in zip(keys, rows, strict=True)
            if not isinstance(row, Failure) or row.code == ObjectNotFound.number
        }

    def exists(self, keys: Sequence[str]) -> list[bool]:
        rows = self._client.batch_exist_key(keys)
        for key, row in zip(keys, rows, strict=True):
            if isinstance(row, Failure):
                raise self.refusal("ExistKey", row.code, key)
        return [bool(row) for row in rows]

    def remove(self, key: str, force: bool) -> None:
        try:
            self._client.remove(key, force=force)
        except MasterRefused as error:
            raise self.refusal("Remove", error.number, key) from error

    def no_space_for(self, key: str, number: int) -> EgmError:
        """The error for a put that was refused with Mooncake's ``number``."""
        if number != ObjectExists.number:
            return self.refusal("PutStart", number, key)
        # Mooncake says "exists" of an object that is still being written as well; the difference matters to a caller.
        try:
            there = self._client.batch_get_replica_list([key])[0]
        except EgmError:
            there = None
        if isinstance(there, Failure) and there.code == _NOT_READY:
            return self.refusal("PutStart", _NOT_READY, key)
        return self.refusal("PutStart", number, key)

    def refusal(self, call: str, number: int, key: str) -> EgmError:
        """The error for Mooncake's ``number``."""
        kind, hint = _REFUSALS.get(number, (StoreError, ""))
        shown = key if len(key) <= 80 else key[:80] + "..."
        return kind(
            f"{call}: the Master answered {error_name(number)} ({number})",
            where=f"object {shown!r}",
            hint=hint,
            facts={"call": call, "number": number, "name": error_name(number)},
        )


_NOT_READY = -703
_NOTHING: tuple[str, ...] = ()
_REFUSALS: dict[int, tuple[type[StoreError], str]] = {
    -200: (NoSpace, "wait for leases to end and eviction to run, mount more, or split an object larger than a chunk"),
    -600: (InvalidRequest, "sizes are at least one byte, and keys are not empty"),
    -703: (ObjectBusy, "it is still being written, or its provider has stopped pinging: try again shortly"),
    -704: (ObjectNotFound, "it was never put, was evicted or removed, or its pool was unmounted"),
    -705: (ObjectExists, "remove it first, or use another key"),
    -706: (ObjectBusy, "a reader holds a lease on it: wait for that to end, or remove it by force"),
}


def _reserved(keys: Sequence[str], spots: Spots, asked_at: float, epoch: int) -> list[Reserved | EgmError]:
    places, elsewhere = _places(spots, _WRITING)
    return list(map(_make, repeat(Reserved), zip(keys, places, elsewhere, repeat(asked_at), repeat(epoch))))


def _located(keys: Sequence[str], spots: Spots, asked_at: float, epoch: int) -> list[Location | EgmError]:
    places, elsewhere = _places(spots, _COMPLETE)
    until = [asked_at + lease / 1000 for lease in spots.leases]
    each = zip(keys, places, elsewhere, repeat(asked_at), until, repeat(epoch))
    return list(map(_make, repeat(Location), each))


def _places(spots: Spots, status: int) -> tuple[Iterable[tuple[Place, ...]], Iterable[tuple[str, ...]]]:
    """As `_memory`, of each."""
    rows = zip(spots.ids, spots.addresses, spots.sizes, spots.te_endpoints, spots.protocols, strict=True)
    found = zip(map(_make, repeat(Place), rows))
    if spots.statuses.count(status) == len(spots.statuses):  # nearly always
        return found, repeat(_NOTHING)
    pairs = [
        (place, _NOTHING) if its == status else ((), (f"replica {place[0].replica} is of kind memory, status {its}",))
        for place, its in zip(found, spots.statuses, strict=True)
    ]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _memory(rows: Sequence[Any], status: int) -> tuple[tuple[Place, ...], tuple[str, ...]]:
    """The replicas in memory with this status, and what the others are."""
    if len(rows) == 1:  # nearly always; a batch makes hundreds of these
        row = rows[0]
        kind, body = row[1]
        if kind == _IN_MEMORY and row[2] == status:
            size, address, protocol, endpoint = body[0][:4]
            return (_make(Place, (row[0], address, size, endpoint, protocol)),), _NOTHING
    places, elsewhere = [], []
    for each in to_replicas(list(rows)):
        if each.kind == "memory" and each.status == status:
            places.append(Place(each.id, each.address, each.size, each.te_endpoint, each.protocol))
        else:
            elsewhere.append(f"replica {each.id} is of kind {each.kind}, status {each.status}")
    return tuple(places), tuple(elsewhere)
