"""Objects that were put to measure or to verify go again, whatever ended the work, Ctrl-C included."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from egmctl.errors import EgmError

if TYPE_CHECKING:
    from egmctl.consumer import EgmStore

__all__ = ["remove_objects", "uninterrupted"]

PATIENCE = 2.0
"""Seconds for which objects that are still being written (by a put that was interrupted) are tried again."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """An interrupt that comes meanwhile is raised at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def remove_objects(store: EgmStore, keys: Iterable[str]) -> None:
    """By force, without a word about those that are not there."""
    from egmctl.consumer.errors import ObjectBusy

    deadline = time.monotonic() + PATIENCE
    with uninterrupted():
        for key in keys:
            while True:
                try:
                    store.remove(key, force=True)
                except ObjectBusy:
                    if time.monotonic() < deadline:
                        time.sleep(0.02)
                        continue
                except EgmError:
                    pass
                break
