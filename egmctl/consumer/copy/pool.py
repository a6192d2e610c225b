"""What copies borrow from a device and give back when they are over: streams, events, staging, scratch, error words.

Creating any of these costs more than a small copy, so they are kept. No lock is held across a driver call.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from egmctl.consumer.copy.jobs import BINS
from egmctl.consumer.errors import StoreClosed
from egmctl.memory.driver import CudaError, Driver
from egmctl.units import KIB, MIB

if TYPE_CHECKING:
    from egmctl.consumer.copy.completion import Submitted

__all__ = ["Block", "Borrowed", "DevicePool", "ErrorWord"]

_SMALLEST = 4 * KIB
_KEEP_FREE = 256 * MIB  # free blocks beyond this are given back to the driver
_WORDS = 128
_SWEEP_FROM = 8
_QUEUEING = 10.0  # seconds that queueing one copy may take, the compiler included
_COUNTS_BYTES = 4 * (BINS + 1)


class Block(NamedTuple):
    """Pinned host memory or device memory of the pool."""

    address: int
    nbytes: int
    kind: str  # "pinned" | "device" | "counts"


class ErrorWord(NamedTuple):
    """Where a gather reports: a 32-bit flag in pinned memory (0 at rest) with 8 spare bytes behind it at +8, and a
    64-bit index on the device (all ones at rest)."""

    flag: int
    lowest: int

    def raised(self) -> bool:
        return ctypes.c_uint32.from_address(self.flag).value != 0

    def first_bad(self, driver: Driver) -> int:
        """The lowest bad index; both words are then at rest again."""
        driver.memcpy(self.flag + 8, self.lowest, 8)
        first = ctypes.c_uint64.from_address(self.flag + 8).value
        driver.memset(self.lowest, 0xFF, 8)
        ctypes.c_uint32.from_address(self.flag).value = 0
        return first


class Borrowed:
    """What one copy has of a pool. Not thread-safe: it belongs to the copy."""

    __slots__ = ("blocks", "events", "lanes", "pool", "streams", "word")

    def __init__(self, pool: DevicePool) -> None:
        self.pool = pool
        self.streams: list[int] = []
        self.events: list[int] = []
        self.blocks: list[Block] = []
        self.word: ErrorWord | None = None
        self.lanes: list[int] = []

    def lane(self, put: bool, number: int) -> int:
        """A stream shared by all copies of one direction: 0 is for large ones, 1 for pieces of batches."""
        lane = self.pool.take_lane(put, number)
        self.lanes.append(lane)
        return lane

    def stream(self) -> int:
        stream = self.pool.take_stream()
        self.streams.append(stream)
        return stream

    def event(self) -> int:
        event = self.pool.take_event()
        self.events.append(event)
        return event

    def pinned(self, nbytes: int) -> int:
        return self._block(nbytes, "pinned")

    def scratch(self, nbytes: int) -> int:
        return self._block(nbytes, "device")

    def counts(self) -> int:
        """``BINS + 1`` 32-bit words on the device, zero; the kernels leave them so."""
        return self._block(_COUNTS_BYTES, "counts")

    def _block(self, nbytes: int, kind: str) -> int:
        block = self.pool.take_block(nbytes, kind)
        self.blocks.append(block)
        return block.address

    def error_word(self) -> ErrorWord:
        self.word = self.pool.take_word()
        return self.word

    def give_back(self) -> None:
        self.pool.give_back(self)


class DevicePool:
    """The streams, events and small memory of one device for one copier.

    Taking from a list and putting back is atomic in Python; the lock is for what is counted.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        self.device = device
        self._lock = threading.Lock()
        self._here = threading.local()
        self._streams: list[int] = []
        self._events: list[int] = []
        self._words: list[ErrorWord] = []
        self._free: dict[tuple[str, int], list[Block]] = {}
        self._free_bytes = 0
        self._every_stream: list[int] = []
        self._lanes: dict[tuple[bool, int], int] = {}
        self._every_event: list[int] = []
        self._word_pages: list[tuple[int, int]] = []
        self._in_flight: set[Submitted] = set()
        self._sweep_from = _SWEEP_FROM
        self._lent = 0  # copies that have not given back yet: close() waits for them
        self._closed = False

    def borrow(self) -> Borrowed:
        """The device's context is current afterwards. Raises `StoreClosed`."""
        self.driver.use_device(self.device)
        self._here.entered = True
        with self._lock:
            if self._closed:
                raise StoreClosed("the copier is closed", where=f"GPU {self.device}")
            self._lent += 1
        return Borrowed(self)

    def enter(self) -> None:
        """This thread has some context, which is all that events ask for."""
        if not hasattr(self._here, "entered"):
            self.driver.use_device(self.device)
            self._here.entered = True

    def take_stream(self) -> int:
        # the one used last: the GPU need not switch to another channel
        for attempt in range(2):
            try:
                return self._streams.pop()
            except IndexError:
                if attempt == 0:
                    self._sweep()
        stream = self.driver.stream_create()
        self._every_stream.append(stream)
        return stream

    def take_lane(self, put: bool, number: int) -> int:
        lane = self._lanes.get((put, number))
        if lane is None:
            with self._lock:
                lane = self._lanes.get((put, number))
                if lane is None:
                    lane = self._lanes[put, number] = self.driver.stream_create()
                    self._every_stream.append(lane)
        return lane

    def take_event(self) -> int:
        for attempt in range(2):
            try:
                return self._events.pop()
            except IndexError:
                if attempt == 0:
                    self._sweep()
        event = self.driver.event_create()
        self._every_event.append(event)
        return event

    def take_block(self, nbytes: int, kind: str) -> Block:
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        for attempt in range(2):
            with self._lock:
                free = self._free.get((kind, size))
                if free:
                    self._free_bytes -= size
                    return free.pop()
            if attempt == 0:
                self._sweep()
        if kind == "pinned":
            return Block(self.driver.host_alloc(size), size, kind)
        block = Block(self.driver.mem_alloc(size), size, kind)
        if kind == "counts":
            try:
                self.driver.memset(block.address, 0, size)
            except CudaError:
                self._undo(self.driver.mem_free, block.address)
                raise
        return block

    def take_word(self) -> ErrorWord:
        if self._words:
            with contextlib.suppress(IndexError):
                return self._words.pop()
        flags = self.driver.host_alloc(_WORDS * 16)
        indices = 0
        try:
            indices = self.driver.mem_alloc(_WORDS * 8)
            ctypes.memset(flags, 0, _WORDS * 16)
            self.driver.memset(indices, 0xFF, _WORDS * 8)
        except CudaError:
            self._undo(self.driver.host_free, flags)
            if indices:
                self._undo(self.driver.mem_free, indices)
            raise
        self._word_pages.append((flags, indices))
        words = [ErrorWord(flags + 16 * n, indices + 8 * n) for n in range(_WORDS)]
        self._words.extend(words[1:])
        return words[0]

    @staticmethod
    def _undo(call: Callable[[int], None], address: int) -> None:
        with contextlib.suppress(CudaError):
            call(address)

    def give_back(self, borrowed: Borrowed) -> None:
        self._streams.extend(borrowed.streams)
        self._events.extend(borrowed.events)
        if borrowed.word is not None:
            self._words.append(borrowed.word)
        surplus: list[Block] = []
        if borrowed.blocks:
            with self._lock:
                for block in borrowed.blocks:
                    if self._free_bytes + block.nbytes > _KEEP_FREE:
                        surplus.append(block)
                        continue
                    self._free.setdefault((block.kind, block.nbytes), []).append(block)
                    self._free_bytes += block.nbytes
        borrowed.streams, borrowed.events, borrowed.blocks, borrowed.word = [], [], [], None
        try:
            if surplus:
                self.driver.use_device(self.device)
                for block in surplus:
                    (self.driver.host_free if block.kind == "pinned" else self.driver.mem_free)(block.address)
        finally:
            self.lose()

    def lose(self) -> None:
        """What one copy has borrowed does not come back (any more): its device's context is lost."""
        with self._lock:
            self._lent -= 1

    def track(self, copy: Submitted) -> None:
        """Remember a copy until it is over, also when nobody waits for it."""
        self._in_flight.add(copy)

    def forget(self, copy: Submitted) -> None:
        self._in_flight.discard(copy)

    def _sweep(self) -> None:
        """Finish copies that are over and that nobody has waited for: what they hold is wanted."""
        if len(self._in_flight) < self._sweep_from:
            return
        for copy in self._in_flight.copy():
            copy.done()
        self._sweep_from = max(_SWEEP_FROM, 2 * len(self._in_flight))

    def quiesce(self) -> None:
        """Until nothing that was queued on the pool's streams runs any more, also what nobody has a handle of."""
        with contextlib.suppress(CudaError):  # the context is lost, and all copies with it
            self.driver.use_device(self.device)
            for stream in list(self._every_stream):
                self.driver.stream_synchronize(stream)

    def close(self) -> None:
        """Waits for what is under way, then destroys everything. Twice is success; the first failure is raised last."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if not self._drain():
            return
        self.driver.use_device(self.device)
        with self._lock:
            streams, self._every_stream, self._streams = self._every_stream, [], []
            self._lanes = {}
            events, self._every_event, self._events = self._every_event, [], []
            blocks = [block for free in self._free.values() for block in free]
            pages, self._word_pages, self._words = self._word_pages, [], []
            self._free, self._free_bytes = {}, 0
        failure: CudaError | None = None
        for call, values in (
            (self.driver.stream_destroy, streams),
            (self.driver.event_destroy, events),
            (self.driver.host_free, [flags for flags, _ in pages]),
            (self.driver.mem_free, [indices for _, indices in pages]),
            (self.driver.host_free, [block.address for block in blocks if block.kind == "pinned"]),
            (self.driver.mem_free, [block.address for block in blocks if block.kind != "pinned"]),
        ):
            for value in values:
                try:
                    call(value)
                except CudaError as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def _drain(self) -> bool:
        """Until every copy has given back what it borrowed, those included that other threads are queueing: destroying
        a stream under one ends the process. False when one never does (its call was torn out of it by a signal)."""
        until = time.monotonic() + _QUEUEING
        while True:
            for copy in self._in_flight.copy():
                copy.settle()
                until = time.monotonic() + _QUEUEING
            with self._lock:
                if self._lent == 0:
                    return True
            if time.monotonic() > until:
                return False
            time.sleep(0.0005)
