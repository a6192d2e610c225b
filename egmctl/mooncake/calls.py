"""What is said to the Master and what it answers, as Python types: segments, replicas, and how a put wants them.

Field orders and literals are Mooncake's own (seen on the wire with 0.3.13 and 0.3.14). An answer is read by the type
that came with it; that type may have more fields, alternatives or width than expected, but must not contradict it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

from egmctl.mooncake.codec import decode, read_frame
from egmctl.mooncake.columns import Columns, read_columns
from egmctl.mooncake.errors import CodecError
from egmctl.mooncake.literals import (
    Array,
    Expected,
    Map,
    Optional,
    Scalar,
    Sequence,
    Struct,
    Type,
    Variant,
    parse_literal,
)

__all__ = [
    "Located",
    "Replica",
    "ReplicateConfig",
    "Rows",
    "Segment",
    "SegmentUuid",
    "Spots",
    "StorageConfig",
    "Task",
    "Uuid",
    "new_uuid",
    "read_answer",
    "read_spots",
    "spots_of",
    "to_located",
    "to_replicas",
]

Uuid: TypeAlias = tuple[int, int]
SegmentUuid: TypeAlias = Uuid

UUID: Final = bytes.fromhex("fd04048989ff")
STRING: Final = b"\x80\x0c"
SEGMENT: Final = b"\xfd" + UUID + bytes.fromhex("800c0404800c800c800cff")
CONFIG: Final = bytes.fromhex("fd0404040685040b84800c800c84800c0b06800c8584800cff")
OBJECT_META: Final = bytes.fromhex("fd800c8504ff")

VOID_ANSWER: Final = bytes.fromhex("87fa01")
BOOL_ANSWER: Final = bytes.fromhex("870b01")
INT_ANSWER: Final = bytes.fromhex("870101")
STRING_ANSWER: Final = bytes.fromhex("87800c01")
PING_ANSWER: Final = bytes.fromhex("87fd0301ff01")
CONFIG_ANSWER: Final = bytes.fromhex("87fd800c0b04ff01")
TASKS_ANSWER: Final = bytes.fromhex("8784fdfd04048989ff01800c0302ff01")
_REPLICA: Final = bytes.fromhex(
    "fd0486fdfd0404800c800cfffffdfd0404800c800cfffffd800c04fffdfd04048989ff04800cfffd800c04040401ffff01ff"
)
REPLICAS_ANSWER: Final = b"\x87\x84" + _REPLICA + b"\x01"
LOCATED_ANSWER: Final = b"\x87\xfd\x84" + _REPLICA + bytes.fromhex("048504ff01")

_IN_MEMORY: Final = 0
_KINDS: Final = ("memory", "nof", "disk", "local-disk", "file")


def new_uuid() -> Uuid:
    """A fresh random id, as two unsigned 64-bit halves."""
    return secrets.randbits(64), secrets.randbits(64)


@dataclass(frozen=True)
class Segment:
    """A chunk as the Master knows it: ``base`` and ``size`` in bytes, ``te_endpoint`` where consumers ask about it."""

    id: SegmentUuid
    name: str
    base: int
    size: int
    te_endpoint: str
    protocol: str
    host_id: str = ""

    def wire(self) -> tuple[Any, ...]:
        return self.id, self.name, self.base, self.size, self.te_endpoint, self.protocol, self.host_id


class Replica(NamedTuple):
    """Where one copy of an object lies. ``kind`` is "memory", "nof", "disk", "local-disk" or "file".

    ``id`` is the Master's number of this copy. ``status``: 2 being written, 3 complete. ``address`` and ``protocol``
    are 0 and "" for the kinds that have none.
    """

    id: int
    status: int
    kind: str
    size: int
    address: int
    protocol: str
    te_endpoint: str


class Located(NamedTuple):
    """Where an object lies, and for how long the Master promises not to evict it (from when it answered)."""

    replicas: tuple[Replica, ...]
    lease_ttl_ms: int


class Spots(NamedTuple):
    """Replicas as columns, of a batch in which each object has exactly one, in memory: as of `Replica`, and ``leases``
    as of `Located`, empty where the call grants none."""

    ids: AbstractSequence[int]
    statuses: AbstractSequence[int]
    sizes: AbstractSequence[int]
    addresses: AbstractSequence[int]
    protocols: AbstractSequence[str]
    te_endpoints: AbstractSequence[str]
    leases: AbstractSequence[int]


_NONE: Final = Spots((), (), (), (), (), (), ())
Rows: TypeAlias = "Spots | list[Any]"
"""The answer to a batch: columns, or an entry for each key as it came off the wire."""


@dataclass(frozen=True)
class ReplicateConfig:
    """How a put wants its replicas.

    ``preferred_segments`` are hints: the Master may place elsewhere and not say so. ``group_ids`` has one entry for
    each key of the put (so one for a single put), else the answer is -600.
    """

    replica_num: int = 1
    nof_replica_num: int = 0
    dfs_replica_num: int = 0
    soft_pin_action: int = 0
    soft_pin_ttl_ms: int | None = None
    with_hard_pin: bool = False
    preferred_segments: tuple[str, ...] = ()
    preferred_segment: str = ""
    preferred_nof_segments: tuple[str, ...] = ()
    prefer_alloc_in_same_node: bool = False
    data_type: int = 0
    host_id: str = ""
    group_ids: tuple[str, ...] | None = field(default=None)

    def wire(self) -> tuple[Any, ...]:
        return (
            self.replica_num,
            self.nof_replica_num,
            self.dfs_replica_num,
            self.soft_pin_action,
            self.soft_pin_ttl_ms,
            self.with_hard_pin,
            self.preferred_segments,
            self.preferred_segment,
            self.preferred_nof_segments,
            self.prefer_alloc_in_same_node,
            self.data_type,
            self.host_id,
            self.group_ids,
        )


class StorageConfig(NamedTuple):
    fsdir: str
    enable_disk_eviction: bool
    quota_bytes: int


class Task(NamedTuple):
    """Work the Master wants a client to do. ``type``: 0 copy a replica, 1 move one; ``payload`` is JSON."""

    id: Uuid
    type: int
    payload: str
    created_at_ms: int
    max_retry_attempts: int


def _fits(wanted: Type, got: Type) -> bool:
    """Whether values of type ``got`` can be used as ``wanted``: fields and alternatives may have been appended."""
    if isinstance(wanted, Scalar) and isinstance(got, Scalar):
        return (wanted.format == got.format) or (wanted.format in "iIqQbBhH" and got.format in "iIqQbBhH")
    if type(wanted) is not type(got):
        return False
    if isinstance(wanted, Struct) and isinstance(got, Struct):
        return len(wanted.members) <= len(got.members) and all(map(_fits, wanted.members, got.members))
    if isinstance(wanted, Variant) and isinstance(got, Variant):
        return len(wanted.alternatives) <= len(got.alternatives) and all(
            map(_fits, wanted.alternatives, got.alternatives)
        )
    if isinstance(wanted, Expected) and isinstance(got, Expected):
        return _fits(wanted.value, got.value) and _fits(wanted.error, got.error)
    if isinstance(wanted, Optional) and isinstance(got, Optional):
        return _fits(wanted.value, got.value)
    if isinstance(wanted, (Sequence, Array)) and isinstance(got, (Sequence, Array)):
        return _fits(wanted.element, got.element)
    if isinstance(wanted, Map) and isinstance(got, Map):
        return _fits(wanted.key, got.key) and _fits(wanted.value, got.value)
    return wanted == got


@lru_cache(maxsize=256)
def _known(wanted: bytes, got: bytes) -> bool:
    return _fits(parse_literal(wanted), parse_literal(got))


def read_answer(call: str, wanted: bytes, body: bytes) -> Any:
    """The value of an answer that must be of the type ``wanted`` or an extension of it. Raises `CodecError`."""
    message = decode(body, wanted)
    if message.literal != wanted and not _known(wanted, message.literal):
        raise CodecError(
            f"{call}: the Master's answer has a form that this version does not know",
            where=message.literal.hex()[:400],
            hint="egmctl is tested with Masters of 0.3.13 and 0.3.14",
        )
    return message.value


_make: Final = tuple.__new__  # a batch makes hundreds of these, and a named tuple's own constructor takes twice as long


def _to_replica(row: tuple[Any, ...]) -> Replica:
    number, (index, body), status = row[:3]
    if index < 2:
        size, address, protocol, endpoint = body[0][:4]
        return _make(Replica, (number, status, _KINDS[index], size, address, protocol, endpoint))
    if index == 3:
        return Replica(number, status, "local-disk", body[1], 0, "", body[2])
    if index == 2:
        return Replica(number, status, "disk", body[1], 0, "", "")
    if index == 4:
        return Replica(number, status, "file", body[2], 0, "", "")
    return Replica(number, status, f"unknown-{index}", 0, 0, "", "")


def to_replicas(rows: list[tuple[Any, ...]]) -> tuple[Replica, ...]:
    return tuple([_to_replica(row) for row in rows])


def to_located(row: tuple[Any, ...]) -> Located:
    return _make(Located, (tuple([_to_replica(replica) for replica in row[0]]), row[1]))


def read_spots(wanted: bytes, body: bytes) -> Spots | None:
    """The answer to a batch of PutStart (a list of replicas for each key) or GetReplicaList (that and a lease), when it
    is the usual one; None: read it with `read_answer`, which also says what is wrong with it."""
    try:
        frame = read_frame(body, wanted)
    except CodecError:
        return None
    if frame.literal != wanted and not _known(wanted, frame.literal):
        return None
    found = read_columns(body, frame)
    return None if found is None else _to_spots(found)


def _to_spots(found: Columns) -> Spots | None:
    replicas, lease = found.element, None
    if isinstance(replicas, tuple):
        replicas, lease = replicas[:2]
    if len(replicas) != 1 or replicas[0][1][0] != _IN_MEMORY:
        return None
    number, (_, body), status = replicas[0][:3]
    size, address, protocol, endpoint = body[0][:4]
    values = found.values
    return Spots(
        values[number],
        values[status],
        values[size],
        values[address],
        _texts(values[protocol]),
        _texts(values[endpoint]),
        () if lease is None else values[lease],
    )


def spots_of(rows: Rows, status: int) -> tuple[AbstractSequence[int], Spots]:
    """The usual ones, with this status, of an answer that was not read as columns (failures are among it, or providers
    whose names have different lengths) or was: their positions, and they as columns. Of an object that was located, the
    first replica is taken; one that is put is usual only with a single one."""
    if isinstance(rows, Spots):
        usual = rows.statuses.count(status) == len(rows.statuses)
        return (range(len(rows.ids)), rows) if usual else ((), _NONE)
    at, found = [], []
    for position, row in enumerate(rows):
        replicas, lease = (row[0], row[1]) if row.__class__ is tuple else (row, None)
        if replicas.__class__ is not list or not replicas or (lease is None and len(replicas) > 1):
            continue
        number, (kind, body), its = replicas[0][:3]
        if kind == _IN_MEMORY and its == status:
            size, address, protocol, endpoint = body[0][:4]
            at.append(position)
            found.append((number, its, size, address, protocol, endpoint, lease))
    if not found:
        return (), _NONE
    ids, statuses, sizes, addresses, protocols, endpoints, leases = zip(*found, strict=True)
    return at, Spots(ids, statuses, sizes, addresses, protocols, endpoints, () if leases[0] is None else leases)


def _texts(raws: AbstractSequence[bytes]) -> AbstractSequence[str]:
    """Mostly all the same, and then made once."""
    first = raws[0]
    if raws.count(first) == len(raws):
        return [first.decode("utf-8", "surrogateescape")] * len(raws)
    return [raw.decode("utf-8", "surrogateescape") for raw in raws]
