"""What can go wrong in a put or a get, as one tree under `EgmError`: each class has a code, many Mooncake's number."""

from __future__ import annotations

from typing import ClassVar

from egmctl.errors import EgmError

__all__ = [
    "AmbiguousSegment",
    "BadOffset",
    "GetFailed",
    "InterruptedPut",
    "InvalidBuffer",
    "InvalidRequest",
    "LeaseExpired",
    "NoSpace",
    "ObjectBusy",
    "ObjectExists",
    "ObjectNotFound",
    "ProviderGone",
    "StaleAllocation",
    "StoreClosed",
    "StoreError",
    "TransferTimeout",
    "Unreachable",
]


class StoreError(EgmError):
    """A put, get or question to the Store that failed. ``number`` is Mooncake's, where it has one."""

    code = "store"
    number: ClassVar[int | None] = None


class StoreClosed(StoreError):
    """The store, the session or the transfer was closed."""

    code = "store-closed"


class InvalidRequest(StoreError):
    """An argument that cannot be meant: unequal lists, an empty key, a range outside the object."""

    code = "invalid-request"
    number = -600


class InvalidBuffer(StoreError):
    """A buffer that is not registered, too small, or of a kind that cannot reach this memory."""

    code = "invalid-buffer"


class BadOffset(InvalidRequest):
    """An entry of a gather or scatter that lies outside its object; nothing of the object is believed."""

    code = "bad-offset"


class ObjectNotFound(StoreError):
    """No such object (OBJECT_NOT_FOUND)."""

    code = "object-not-found"
    number = -704


class ObjectExists(StoreError):
    """A complete object of this key exists (OBJECT_ALREADY_EXISTS)."""

    code = "object-exists"
    number = -705


class ObjectBusy(StoreError):
    """The object is being written, or leased to a reader."""

    code = "object-busy"
    number = -706


class NoSpace(StoreError):
    """The Master has no space for it (NO_AVAILABLE_HANDLE), after the retries that eviction deserves."""

    code = "no-space"
    number = -200


class LeaseExpired(StoreError):
    """The Master's lease ran out before the bytes were known to be right."""

    code = "lease-expired"
    number = -707


class ProviderGone(StoreError):
    """The provider's agent ended, or cannot be asked."""

    code = "provider-gone"


class StaleAllocation(ProviderGone):
    """The allocation that was located is no longer the one behind this endpoint, or it is being taken down."""

    code = "stale-allocation"


class AmbiguousSegment(ProviderGone):
    """The provider has not yet established that what the Master lists under its endpoint is its own."""

    code = "ambiguous-segment"


class Unreachable(StoreError):
    """No replica lies in memory that this process can reach directly; ``facts["reasons"]`` has one line for each."""

    code = "unreachable"


class GetFailed(StoreError):
    """The object kept changing, or its provider kept going away, until the deadline."""

    code = "get-failed"


class InterruptedPut(StoreError):
    """A put that was not published. ``facts["revoked"]`` is True when the Master has said that it holds no space for it
    any more, and None when that is not known; the Master discards what is left after half a minute."""

    code = "interrupted-put"


class TransferTimeout(StoreError):
    """``result(timeout)`` returned before the transfer was finished; it may be called again."""

    code = "transfer-timeout"
