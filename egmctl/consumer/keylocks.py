"""One put of a key at a time in a store: a second one waits, so that none ends or revokes the other's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from egmctl.consumer.errors import ObjectBusy

__all__ = ["KeyLocks"]


class KeyLocks:
    """Keys that are being put. Held by operations, not by threads: another thread may release."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._changed = threading.Condition()

    def acquire(self, keys: Iterable[str], timeout: float, held: set[str]) -> None:
        """All of ``keys`` or, after ``timeout`` seconds, none of them (`ObjectBusy`). All at once, so two batches that
        share keys cannot wait for each other. They are added to the caller's ``held``, to be released whatever comes:
        an interrupt may come before the return."""
        wanted = keys if isinstance(keys, set) else set(keys)
        until = time.monotonic() + timeout
        with self._changed:
            while not self._held.isdisjoint(wanted):
                left = until - time.monotonic()
                if left <= 0:
                    busy = next(key for key in wanted if key in self._held)
                    raise ObjectBusy(
                        "another put of this key in this store is not finished",
                        where=f"object {busy!r}",
                        hint="call result() of its transfer first",
                    )
                self._changed.wait(left)
            held |= wanted
            self._held |= wanted

    def release(self, keys: Iterable[str]) -> None:
        with self._changed:
            self._held.difference_update(keys)
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return len(self._held)
