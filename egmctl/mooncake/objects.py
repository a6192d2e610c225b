"""The Master's calls about objects: reserve, publish, locate, remove, one at a time and in batches.

Batch calls answer one entry for each key, in order; a key that failed has a `Failure` instead of raising.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from egmctl.errors import UsageError
from egmctl.mooncake import calls
from egmctl.mooncake.caller import BOOL, I32, U64, Caller, arguments, nothing, same, vector
from egmctl.mooncake.calls import Located, Replica, ReplicateConfig, Rows, Uuid, to_located, to_replicas
from egmctl.mooncake.codec import Failure
from egmctl.mooncake.reply import Reply

__all__ = ["ALL_REPLICAS", "ObjectCalls"]

ALL_REPLICAS: Final = 4

_KEY = arguments(calls.STRING, calls.STRING)
_KEYS = arguments(vector(calls.STRING), calls.STRING)
_PUT_START = arguments(calls.UUID, calls.STRING, U64, calls.CONFIG, calls.STRING)
_PUT_END = arguments(calls.UUID, calls.OBJECT_META, I32, calls.STRING)
_PUT_REVOKE = arguments(calls.UUID, calls.STRING, I32, calls.STRING)
_BATCH_PUT_START = arguments(calls.UUID, vector(calls.STRING), vector(U64), calls.CONFIG, calls.STRING)
_BATCH_PUT_END = arguments(calls.UUID, vector(calls.OBJECT_META), I32, calls.STRING)
_BATCH_PUT_REVOKE = arguments(calls.UUID, vector(calls.STRING), I32, calls.STRING)
_REMOVE = arguments(calls.STRING, BOOL, calls.STRING)
_BATCH_REMOVE = arguments(vector(calls.STRING), BOOL, calls.STRING)
_REMOVE_ALL = arguments(BOOL, calls.STRING)

_DEFAULT_CONFIG = ReplicateConfig()


class ObjectCalls(Caller):
    """Puts, gets and removals, in the client's tenant."""

    # -- one at a time

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
        self._submit("PutEnd", _PUT_END, value, calls.VOID_ANSWER, nothing, timeout, key).result()

    def put_revoke(
        self, client: Uuid, key: str | bytes, *, replica_type: int = ALL_REPLICAS, timeout: float | None = None
    ) -> None:
        """Give the reserved space back."""
        value = client, key, replica_type, self.tenant_id
        self._submit("PutRevoke", _PUT_REVOKE, value, calls.VOID_ANSWER, nothing, timeout, key).result()

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
        self._submit("Remove", _REMOVE, value, calls.VOID_ANSWER, nothing, timeout, key).result()

    def remove_all(self, *, force: bool = False, timeout: float | None = None) -> int:
        """Remove all objects of the tenant that may be removed; how many."""
        return self._submit("RemoveAll", _REMOVE_ALL, (force, self.tenant_id), b"\x03", int, timeout).result()

    # -- in batches. ``submit_`` forms return at once: several may be under way, and overlap with copies.

    def submit_batch_put_start(
        self,
        client: Uuid,
        keys: Sequence[str | bytes],
        sizes: Sequence[int],
        config: ReplicateConfig = _DEFAULT_CONFIG,
        *,
        timeout: float | None = None,
    ) -> Reply[list[tuple[Replica, ...] | Failure]]:
        if len(keys) != len(sizes):
            raise UsageError(f"{len(keys)} keys and {len(sizes)} sizes", hint="give one size for each key")
        value = client, keys, sizes, config.wire(), self.tenant_id
        return self._batch(
            "BatchPutStart", _BATCH_PUT_START, value, calls.REPLICAS_ANSWER, to_replicas, timeout, keys
        )()

    def submit_batch_put_end(
        self,
        client: Uuid,
        keys: Sequence[str | bytes],
        checksums: Sequence[int | None] | None = None,
        *,
        replica_type: int = ALL_REPLICAS,
        timeout: float | None = None,
    ) -> Reply[list[Failure | None]]:
        if checksums is not None and len(keys) != len(checksums):
            raise UsageError(f"{len(keys)} keys and {len(checksums)} checksums", hint="give one for each key, or none")
        metas = [(key, None) for key in keys] if checksums is None else list(zip(keys, checksums, strict=True))
        value = client, metas, replica_type, self.tenant_id
        return self._batch("BatchPutEnd", _BATCH_PUT_END, value, calls.VOID_ANSWER, same, timeout, keys)()

    def submit_batch_put_revoke(
        self,
        client: Uuid,
        keys: Sequence[str | bytes],
        *,
        replica_type: int = ALL_REPLICAS,
        timeout: float | None = None,
    ) -> Reply[list[Failure | None]]:
        value = client, keys, replica_type, self.tenant_id
        return self._batch("BatchPutRevoke", _BATCH_PUT_REVOKE, value, calls.VOID_ANSWER, same, timeout, keys)()

    def submit_batch_get_replica_list(
        self, keys: Sequence[str | bytes], *, timeout: float | None = None
    ) -> Reply[list[Located | Failure]]:
        value = keys, self.tenant_id
        return self._batch("BatchGetReplicaList", _KEYS, value, calls.LOCATED_ANSWER, to_located, timeout, keys)()

    def submit_batch_exist_key(
        self, keys: Sequence[str | bytes], *, timeout: float | None = None
    ) -> Reply[list[bool | Failure]]:
        value = keys, self.tenant_id
        return self._batch("BatchExistKey", _KEYS, value, calls.BOOL_ANSWER, same, timeout, keys)()

    def submit_batch_remove(
        self, keys: Sequence[str | bytes], *, force: bool = False, timeout: float | None = None
    ) -> Reply[list[Failure | None]]:
        value = keys, force, self.tenant_id
        return self._batch("BatchRemove", _BATCH_REMOVE, value, calls.VOID_ANSWER, same, timeout, keys)()

    # -- requests made ahead; calling what is returned sends it

    def prepare_batch_get_replica_list(self, keys: Sequence[str | bytes]) -> Callable[[], Reply[Rows]]:
        """As `submit_batch_get_replica_list`, with the answers as they came off the wire (see `calls.to_located`), or
        as columns where all are of the usual kind."""
        return self._spots("BatchGetReplicaList", _KEYS, (keys, self.tenant_id), calls.LOCATED_ANSWER, keys)

    def submit_again(self, reply: Reply[Rows]) -> Reply[Rows]:
        """Send once more what `prepare_batch_get_replica_list` made; `Reply.same_as` tells whether anything changed."""
        return self.rpc.ask_again(reply)

    def prepare_batch_put_start(
        self, client: Uuid, keys: Sequence[str | bytes], sizes: Sequence[int], config: ReplicateConfig
    ) -> Callable[[], Reply[Rows]]:
        """As `submit_batch_put_start`, with the answers as they came off the wire (see `calls.to_replicas`), or as
        columns where all are of the usual kind."""
        value = client, keys, sizes, config.wire(), self.tenant_id
        return self._spots("BatchPutStart", _BATCH_PUT_START, value, calls.REPLICAS_ANSWER, keys)

    def prepare_batch_put_end(
        self, client: Uuid, keys: Sequence[str | bytes]
    ) -> Callable[[], Reply[list[Failure | None]]]:
        """As `submit_batch_put_end`."""
        value = client, [(key, None) for key in keys], ALL_REPLICAS, self.tenant_id
        return self._batch("BatchPutEnd", _BATCH_PUT_END, value, calls.VOID_ANSWER, same, None, keys)

    def batch_put_start(
        self,
        client: Uuid,
        keys: Sequence[str | bytes],
        sizes: Sequence[int],
        config: ReplicateConfig = _DEFAULT_CONFIG,
        *,
        timeout: float | None = None,
    ) -> list[tuple[Replica, ...] | Failure]:
        return self.submit_batch_put_start(client, keys, sizes, config, timeout=timeout).result()

    def batch_put_end(
        self,
        client: Uuid,
        keys: Sequence[str | bytes],
        checksums: Sequence[int | None] | None = None,
        *,
        replica_type: int = ALL_REPLICAS,
        timeout: float | None = None,
    ) -> list[Failure | None]:
        return self.submit_batch_put_end(client, keys, checksums, replica_type=replica_type, timeout=timeout).result()

    def batch_put_revoke(
        self,
        client: Uuid,
        keys: Sequence[str | bytes],
        *,
        replica_type: int = ALL_REPLICAS,
        timeout: float | None = None,
    ) -> list[Failure | None]:
        return self.submit_batch_put_revoke(client, keys, replica_type=replica_type, timeout=timeout).result()

    def batch_get_replica_list(
        self, keys: Sequence[str | bytes], *, timeout: float | None = None
    ) -> list[Located | Failure]:
        return self.submit_batch_get_replica_list(keys, timeout=timeout).result()

    def batch_exist_key(self, keys: Sequence[str | bytes], *, timeout: float | None = None) -> list[bool | Failure]:
        return self.submit_batch_exist_key(keys, timeout=timeout).result()

    def batch_remove(
        self, keys: Sequence[str | bytes], *, force: bool = False, timeout: float | None = None
    ) -> list[Failure | None]:
        return self.submit_batch_remove(keys, force=force, timeout=timeout).result()
