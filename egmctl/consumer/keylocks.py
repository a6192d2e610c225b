"""One put of a key at a time in a store: a second one waits, so that none ends or revokes the other's."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from egmctl.consumer.errors import ObjectBusy

__all__ = ["KeyLocks"]


class KeyLocks:
    """Keys that are being put. Held by operations, not by threads: another thread may release."""

    def __init__(self) -> None:
        self._held: list[frozenset[str] | set[str]] = []  # of each operation, never changed: a batch has hundreds
        self._changed = threading.Condition()

    def acquire(self, keys: Collection[str], timeout: float, held: list[frozenset[str] | set[str]]) -> None:
        """All of ``keys`` or, after ``timeout`` seconds, none of them (`ObjectBusy`). All at once, so two batches that
        share keys cannot wait for each other. They are added to the caller's ``held``, to be released whatever comes:
        an interrupt may come before the return. A set is kept as it is, and is not to be changed."""
        wanted = keys if isinstance(keys, (set, frozenset)) else frozenset(keys)
        until = time.monotonic() + timeout
        with self._changed:
            while not all(map(wanted.isdisjoint, self._held)):
                left = until - time.monotonic()
                if left <= 0:
                    busy = next(key for key in wanted if any(key in each for each in self._held))
                    raise ObjectBusy(
                        "another put of this key in this store is not finished",
                        where=f"object {busy!r}",
                        hint="call result() of its transfer first",
                    )
                self._changed.wait(left)
            held.append(wanted)
            self._held.append(wanted)

    def release(self, held: Collection[frozenset[str] | set[str]]) -> None:
        """Twice is once."""
        with self._changed:
            self._held = [each for each in self._held if not any(each is mine for mine in held)]
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return sum(map(len, self._held))
