"""Small things that the consumer's tests share."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence

from egmctl.consumer import EgmStore
from egmctl.consumer.host_copy import Completion, Fragment, HostCopier


def payload(name: str, nbytes: int) -> bytes:
    """Bytes that belong to ``name`` alone."""
    seed = hashlib.sha256(name.encode()).digest()
    return (seed * (nbytes // len(seed) + 1))[:nbytes]


class Memory:
    """Host memory of this process, by address."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._array = (ctypes.c_char * nbytes)()
        self.address = ctypes.addressof(self._array)

    def write(self, data: bytes, offset: int = 0) -> int:
        """Where it was written."""
        ctypes.memmove(self.address + offset, data, len(data))
        return self.address + offset

    def read(self, nbytes: int, offset: int = 0) -> bytes:
        return ctypes.string_at(self.address + offset, nbytes)


class PausingCopier:
    """Copies the first half of each copy, waits for `go`, and copies the rest: a copy caught in the middle."""

    def __init__(self) -> None:
        self.inner = HostCopier(1)
        self.paused = threading.Event()
        self.go = threading.Event()
        self.armed = True
        self.copies = 0

    def copy(
        self, fragments: Sequence[Fragment], *, device: int | None = None, stream: int | None = None
    ) -> Completion:
        self.copies += 1
        if not self.armed:
            return self.inner.copy(fragments)
        self.armed = False
        finished = threading.Event()

        def run() -> None:
            for destination, source, nbytes in fragments:
                ctypes.memmove(destination, source, nbytes // 2)
            self.paused.set()
            self.go.wait(60)
            for destination, source, nbytes in fragments:
                half = nbytes // 2
                ctypes.memmove(destination + half, source + half, nbytes - half)
            finished.set()

        threading.Thread(target=run, daemon=True).start()
        return _Later(finished)


class _Later:
    def __init__(self, finished: threading.Event) -> None:
        self._finished = finished

    def wait(self, timeout: float | None = None) -> bool:
        return self._finished.wait(timeout)

    def done(self) -> bool:
        return self._finished.is_set()


class Background:
    """A call in a thread of its own; `result` returns what it returned or raises what it raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._value: object = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._value = call()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def result(self, timeout: float = 60.0) -> object:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the call did not return"
        if self._error is not None:
            raise self._error
        return self._value


def until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    """Wait for a condition that must come true."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def fill(store: EgmStore) -> None:
    """Put 4 MiB objects ``k0``, ``k1`` ... until the pool is full; each is leased, so that it is not evicted."""
    for index in range(100):
        store.put(f"k{index}", bytes(4 << 20))
        store.exists(f"k{index}")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_files(needle: str = "egm-chunk") -> int:
    """Mappings of chunks in this process."""
    with open("/proc/self/maps") as maps:
        return sum(needle in line for line in maps)
