"""One put of a key at a time in a store: a second one waits, so that none ends or revokes the other's."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Set
from weakref import WeakSet

from egmctl.consumer.errors import ObjectBusy

__all__ = ["Held", "KeyLocks"]


class Held:
    """The keys that one operation holds. They are free again at the latest when this object is gone: an interrupt may
    come just before they would be released."""

    __slots__ = ("__weakref__", "keys")

    def __init__(self) -> None:
        self.keys: Set[str] = frozenset()


class KeyLocks:
    """Keys that are being put. Held by operations, not by threads: another thread may release."""

    def __init__(self) -> None:
        self._held: WeakSet[Held] = WeakSet()
        self._changed = threading.Condition()

    def acquire(self, keys: Collection[str], timeout: float, held: Held) -> None:
        """All of ``keys`` or, after ``timeout`` seconds, none of them (`ObjectBusy`). All at once, so two batches that
        share keys cannot wait for each other. They are the caller's ``held``, to be released whatever comes: an
        interrupt may come before the return. A set is kept as it is, and is not to be changed."""
        wanted = keys if isinstance(keys, (set, frozenset)) else frozenset(keys)
        until = time.monotonic() + timeout
        with self._changed:
            while not all(wanted.isdisjoint(each.keys) for each in self._held):
                left = until - time.monotonic()
                if left <= 0:
                    busy = next((key for key in wanted for each in self._held if key in each.keys), "")
                    raise ObjectBusy(
                        "another put of this key in this store is not finished",
                        where=f"object {busy!r}",
                        hint="call result() of its transfer first",
                    )
                self._changed.wait(left)
            held.keys = wanted
            self._held.add(held)

    def release(self, held: Held) -> None:
        """Twice is once."""
        with self._changed:
            held.keys = frozenset()
            self._held.discard(held)
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return sum(len(each.keys) for each in self._held)
