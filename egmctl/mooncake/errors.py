"""Mooncake's error numbers by name, and the errors of talking to a Master.

Two questions matter to whoever calls: did the Master say no (`MasterRefused`), and may the request still take effect
although nothing was heard (`MasterTimeout` and its kin: yes; `MasterUnreachable`: no, it was never handed over).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from egmctl.errors import FailedError

if TYPE_CHECKING:
    from egmctl.mooncake.reply import Reply

__all__ = [
    "ERROR_NAMES",
    "CodecError",
    "MasterLost",
    "MasterRefused",
    "MasterRpcError",
    "MasterTimeout",
    "MasterUnreachable",
    "error_name",
]

# Mooncake's ErrorCode (mooncake-store/include/types.h), which all versions so far only added to.
ERROR_NAMES: dict[int, str] = {
    0: "OK",
    -1: "INTERNAL_ERROR",
    -10: "BUFFER_OVERFLOW",
    -100: "SHARD_INDEX_OUT_OF_RANGE",
    -101: "SEGMENT_NOT_FOUND",
    -102: "SEGMENT_ALREADY_EXISTS",
    -103: "CLIENT_NOT_FOUND",
    -200: "NO_AVAILABLE_HANDLE",
    -300: "INVALID_VERSION",
    -400: "INVALID_KEY",
    -500: "WRITE_FAIL",
    -600: "INVALID_PARAMS",
    -601: "ILLEGAL_CLIENT",
    -700: "INVALID_WRITE",
    -701: "INVALID_READ",
    -702: "INVALID_REPLICA",
    -703: "REPLICA_IS_NOT_READY",
    -704: "OBJECT_NOT_FOUND",
    -705: "OBJECT_ALREADY_EXISTS",
    -706: "OBJECT_HAS_LEASE",
    -707: "LEASE_EXPIRED",
    -708: "OBJECT_HAS_REPLICATION_TASK",
    -709: "OBJECT_NO_REPLICATION_TASK",
    -710: "REPLICA_NOT_FOUND",
    -711: "REPLICA_ALREADY_EXISTS",
    -712: "REPLICA_IS_GONE",
    -713: "REPLICA_NOT_IN_LOCAL_MEMORY",
    -714: "OBJECT_REPLICA_BUSY",
    -800: "TRANSFER_FAIL",
    -801: "CHECKSUM_MISMATCH",
    -900: "RPC_FAIL",
    -901: "RPC_TIMEOUT",
    -1000: "ETCD_OPERATION_ERROR",
    -1001: "ETCD_KEY_NOT_EXIST",
    -1002: "ETCD_TRANSACTION_FAIL",
    -1003: "ETCD_CTX_CANCELLED",
    -1004: "OPLOG_ENTRY_NOT_FOUND",
    -1005: "K8S_LEASE_OPERATION_ERROR",
    -1006: "K8S_LEASE_NOT_FOUND",
    -1007: "INCOMPLETE_OPLOG_CATCH_UP",
    -1010: "UNAVAILABLE_IN_CURRENT_STATUS",
    -1011: "UNAVAILABLE_IN_CURRENT_MODE",
    -1100: "FILE_NOT_FOUND",
    -1101: "FILE_OPEN_FAIL",
    -1102: "FILE_READ_FAIL",
    -1103: "FILE_WRITE_FAIL",
    -1104: "FILE_INVALID_BUFFER",
    -1105: "FILE_LOCK_FAIL",
    -1106: "FILE_INVALID_HANDLE",
    -1200: "BUCKET_NOT_FOUND",
    -1201: "BUCKET_ALREADY_EXISTS",
    -1202: "KEYS_EXCEED_BUCKET_LIMIT",
    -1203: "KEYS_ULTRA_LIMIT",
    -1300: "UNABLE_OFFLOAD",
    -1301: "UNABLE_OFFLOADING",
    -1400: "TASK_NOT_FOUND",
    -1401: "TASK_PENDING_LIMIT_EXCEEDED",
    -1402: "JOB_NOT_FOUND",
    -1500: "SERIALIZE_UNSUPPORTED",
    -1501: "SERIALIZE_FAIL",
    -1502: "DESERIALIZE_FAIL",
    -1503: "PERSISTENT_FAIL",
    -1600: "DFS_NETWORK_TIMEOUT",
    -1601: "DFS_SERVICE_UNAVAILABLE",
    -1602: "DFS_QUOTA_EXCEEDED",
    -1603: "DFS_PERMISSION_DENIED",
    -1604: "DFS_STALE_HANDLE",
    -1605: "DFS_PARTIAL_WRITE",
    -1700: "TENANT_QUOTA_EXCEEDED",
    -1701: "TENANT_NOT_REGISTERED",
    -1702: "TENANT_NOT_EMPTY",
}

_HINTS: dict[int, str] = {
    -101: "the Master does not know this segment for this client: look at /get_segments_detail of its admin port",
    -200: "no chunk has room: wait for eviction or for leases to end, mount more, or split an object that is larger "
    "than the largest chunk",
    -600: "the Master found an argument it cannot use, such as a size of zero or an empty key",
    -601: "only the client that began the put may end or revoke it",
    -703: "the object is still being written, or its provider has stopped pinging: try again shortly",
    -704: "no such object: it was never put, was evicted or removed, or its chunk was unmounted",
    -705: "the key exists: remove it first, or use another key",
    -706: "a reader holds a lease: wait for it to end, or remove by force",
    -1010: "the segment is being unmounted: wait for its grace period to end",
    -1700: "the tenant's quota is used up: raise it at the Master, or remove objects",
    -1701: 'register the tenant at the Master, or use tenant_id = "default"',
}


def error_name(number: int) -> str:
    """Mooncake's own name of an error number; ``UNKNOWN_ERROR`` for one that is not in the table."""
    return ERROR_NAMES.get(number, "UNKNOWN_ERROR")


class CodecError(FailedError):
    """Bytes that are not a struct_pack message, or not one that this code understands."""

    code = "codec"


class MasterUnreachable(FailedError):
    """No connection to the Master, so the request was not handed over and has no effect."""

    code = "master-unreachable"
    may_take_effect: ClassVar[bool] = False


class MasterTimeout(FailedError):
    """The request was handed over and not answered in time: it may have taken effect, or still will.

    ``reply`` is what the answer will arrive in should it come late: ask it again with ``result()``, or be told with
    ``add_done_callback()``.
    """

    code = "master-timeout"
    may_take_effect: ClassVar[bool] = True

    def __init__(self, message: str, *, reply: Reply[Any] | None = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.reply = reply


class MasterLost(MasterTimeout):
    """The connection broke after the request was handed over: it may have taken effect, and no answer will come."""

    code = "master-lost"


class MasterRefused(FailedError):
    """The Master's answer was an error: ``number`` and ``name`` are Mooncake's own."""

    code = "master-refused"

    def __init__(self, call: str, number: int, *, where: str = "", subject: str = "") -> None:
        name = error_name(number)
        of = f" of {subject}" if subject else ""
        super().__init__(
            f"{call}{of}: the Master answered {name} ({number})",
            where=where,
            hint=_HINTS.get(number, ""),
            facts={"call": call, "number": number, "name": name},
        )
        self.call = call
        self.number = number
        self.name = name


class MasterRpcError(FailedError):
    """The Master did not understand the call: ``number`` is coro_rpc's err_code (4 wrong arguments, 11 unknown)."""

    code = "master-rpc"

    def __init__(self, call: str, number: int, text: str, *, where: str = "") -> None:
        super().__init__(
            f"{call}: the Master did not accept the call: {text or 'no reason given'} (coro_rpc err_code {number})",
            where=where,
            hint="check that this is a Mooncake Master, of version 0.3.13 or 0.3.14",
            facts={"call": call, "number": number},
        )
        self.call = call
        self.number = number
