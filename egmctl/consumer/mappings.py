"""The cache of imported chunks: one import for any number of transfers, bounded, and safe to use from many threads.

A mapping is keyed by the identity of the allocation it was made from (whatever the caller puts into the key), never
by an address alone. An idle import still pins the provider's DRAM, so idle ones beyond the bounds are closed, the
least recently used first, and those of an allocation that is withdrawn are closed as soon as nobody copies.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future

from egmctl.consumer.errors import StoreClosed
from egmctl.errors import EgmError
from egmctl.memory.base import Mapping, ReleaseError

__all__ = ["Lease", "MappingCache"]


class _Entry:
    __slots__ = ("future", "key", "leases", "mapping", "nbytes")

    def __init__(self, key: Hashable, nbytes: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self.leases: set[Lease] = set()
        self.future: Future[Mapping] = Future()
        self.mapping: Mapping | None = None  # once imported: asking a future takes a lock

    @property
    def users(self) -> int:
        return len(self.leases)


class Lease:
    """The right to use a mapping until `release`; meanwhile it is not unmapped, whatever happens to its provider."""

    __slots__ = ("_cache", "_entry", "mapping")
    mapping: Mapping

    def __init__(self, cache: MappingCache) -> None:
        self._cache: MappingCache | None = cache
        self._entry: _Entry | None = None

    def release(self) -> None:
        """Twice is once."""
        if self._cache is not None:
            self._cache.release([self])


class MappingCache:
    """At most ``max_bytes`` and ``max_count`` (0: any) mapped; only mappings in use may exceed that, while in use."""

    def __init__(self, *, max_bytes: int = 0, max_count: int = 0) -> None:
        self._max_bytes = max_bytes
        self._max_count = max_count
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._doomed: set[_Entry] = set()
        self._unclosed: list[Mapping] = []
        self._bytes = 0
        self._imports = 0
        self._closed = False

    @property
    def count(self) -> int:
        """Mappings that exist, those that are to go as soon as they are idle included."""
        with self._lock:
            return len(self._entries) + len(self._doomed)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return self._bytes

    @property
    def imports(self) -> int:
        """Imports made so far."""
        with self._lock:
            return self._imports

    def ranges(self) -> list[tuple[int, int]]:
        """(start, end) of what is mapped, as the CPU's addresses and as the GPUs' where they have others."""
        with self._lock:
            entries = [*self._entries.values(), *self._doomed]
        found = []
        for entry in entries:
            if entry.future.done() and entry.future.exception() is None:
                mapping = entry.future.result()
                starts = {mapping.address, getattr(mapping, "device_address", None)} - {None}
                found += [(start, start + mapping.nbytes) for start in starts if start is not None]
        return found

    def acquire(
        self, key: Hashable, nbytes: int, importer: Callable[[], Mapping], held: list[Lease] | None = None
    ) -> Lease:
        """The mapping of ``key``, made by ``importer`` if need be: once, however many threads ask; no lock is held
        while it works, so other keys are not kept waiting. What it raises, all that waited for it are told.

        The lease is added to ``held``, to be released whatever comes: an interrupt may come before the return.
        """
        lease = Lease(self)
        if held is not None:
            held.append(lease)
        with self._lock:
            if self._closed:
                raise StoreClosed("the store is closed")
            entry = self._entries.get(key)
            mine = entry is None
            if entry is None:
                entry = self._entries[key] = _Entry(key, nbytes)
                self._bytes += nbytes
                self._imports += 1
            self._lend(entry, lease)
            victims = self._surplus() if mine else []
        if not mine:
            try:
                lease.mapping = entry.mapping or entry.future.result()
            except BaseException:
                self.release([lease])
                raise
            return lease
        mapping: Mapping | None = None
        try:
            self._close_all(victims)
            mapping = importer()
            lease.mapping = mapping
            entry.future.set_result(mapping)
            entry.mapping = mapping
        except BaseException as error:
            if not entry.future.done():
                self._undo(entry, lease, mapping, error)
            raise
        return lease

    def _undo(self, entry: _Entry, lease: Lease, mapping: Mapping | None, error: BaseException) -> None:
        """An import that failed, or was interrupted just behind its success."""
        with self._lock:
            lease._cache = None
            entry.leases.discard(lease)
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
            self._doomed.discard(entry)
            self._bytes -= entry.nbytes
            left = error.left if isinstance(error, ReleaseError) else mapping
            if left is not None:
                self._unclosed.append(left)  # what could not be undone either, or not now: close() does
        entry.future.set_exception(
            error if isinstance(error, Exception) else EgmError(f"the import was interrupted ({error!r})")
        )

    def at_hand(self, key: Hashable, held: list[Lease]) -> Lease | None:
        """As `acquire`, when it is mapped already."""
        lease = Lease(self)
        held.append(lease)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.mapping is None or self._closed:
                return None
            lease.mapping = entry.mapping
            self._lend(entry, lease)
            return lease

    def _lend(self, entry: _Entry, lease: Lease) -> None:
        """One user more, the latest; called with the lock held."""
        lease._entry = entry
        entry.leases.add(lease)
        self._entries.move_to_end(entry.key)

    def release(self, leases: Iterable[Lease]) -> None:
        """All of them at once. Twice is once."""
        closing: list[_Entry] = []
        with self._lock:
            for lease in leases:
                if lease._cache is not None:
                    lease._cache = None
                    self._give_back(lease, closing)
            closing += self._surplus()
        self._close_all(closing)

    def drop(self, chosen: Callable[[Hashable], bool]) -> None:
        """Close the mappings whose key is chosen: now when idle, else when their last user is done. A later `acquire`
        of the same key imports anew."""
        with self._lock:
            entries = [entry for key, entry in self._entries.items() if chosen(key)]
            idle = []
            for entry in entries:
                del self._entries[entry.key]
                if entry.users:
                    self._doomed.add(entry)
                else:
                    self._bytes -= entry.nbytes
                    idle.append(entry)
        self._close_all(idle)

    def close(self) -> None:
        """Close every idle mapping; one still in use goes with its last user. What could not be unmapped is tried
        again, and raised."""
        with self._lock:
            self._closed = True
        self.drop(lambda key: True)
        with self._lock:
            again, self._unclosed = self._unclosed, []
        failure: EgmError | None = None
        for mapping in again:
            try:
                mapping.close()
            except EgmError as error:
                failure = failure or error
                with self._lock:
                    self._unclosed.append(mapping)
        if failure is not None:
            raise failure

    def _give_back(self, lease: Lease, closing: list[_Entry]) -> None:
        """One user less; called with the lock held."""
        entry = lease._entry
        if entry is None:
            return
        entry.leases.discard(lease)
        if entry.users == 0 and entry in self._doomed:
            self._doomed.discard(entry)
            self._bytes -= entry.nbytes
            closing.append(entry)

    def _surplus(self) -> list[_Entry]:
        """Idle entries, oldest use first, taken out until the bounds hold; called with the lock held."""
        taken: list[_Entry] = []
        if not self._over():
            return taken
        for entry in list(self._entries.values()):
            if not self._over():
                break
            if entry.users == 0:
                del self._entries[entry.key]
                self._bytes -= entry.nbytes
                taken.append(entry)
        return taken

    def _over(self) -> bool:
        count = len(self._entries) + len(self._doomed)
        return bool(
            (self._max_bytes and self._bytes > self._max_bytes) or (self._max_count and count > self._max_count)
        )

    def _close_all(self, entries: list[_Entry]) -> None:
        for entry in entries:
            mapping = entry.future.result()  # an idle entry has been imported
            try:
                mapping.close()
            except EgmError:  # a transfer is not told of another one's mapping; close() tries again and says so
                with self._lock:
                    self._unclosed.append(mapping)
