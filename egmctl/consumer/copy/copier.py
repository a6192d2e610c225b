"""Copies of fragments between GPU memory and mapped DRAM: by the copy engines, by the kernel, or by both."""

from __future__ import annotations

import ctypes
import logging
import statistics
import time
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from egmctl.consumer.copy.completion import Finished, Submitted
from egmctl.consumer.copy.jobs import Kernels, TableJob
from egmctl.consumer.copy.options import CopyOptions, Direction, Strategy, Thresholds
from egmctl.consumer.copy.pool import Borrowed, DevicePool
from egmctl.consumer.copy.sides import Sides
from egmctl.consumer.errors import InvalidRequest
from egmctl.errors import EgmError
from egmctl.memory.driver import CudaError, Driver
from egmctl.units import KIB, MIB

__all__ = ["Calibration", "Fragment", "GpuCopier"]

Fragment = tuple[int, int, int]
"""(destination address, source address, bytes)."""
Fragments = Sequence[Fragment] | Any
"""Fragments, or a buffer of 64-bit integers, three for each."""
Flat: TypeAlias = "array[int]"

_log = logging.getLogger(__name__)

_FEW = 4  # up to so many small fragments cost less by the engine than a kernel's launch
_BULK = 16 * MIB  # fragments of this size fill the link from one stream
_TOGETHER = 64  # are queued by one call: it starts none of them before it has looked at all
_PIECE = 16 * KIB
_PROMPT = 1 << 30  # bytes that a link takes some 20 ms for
_LARGEST = 1 << 48
_ROW = 1 * MIB  # longer fragments become several rows of the kernel's table


class Calibration(NamedTuple):
    """Fragment sizes from which the engine is used, and whether they were kept for later processes."""

    get: int
    put: int
    saved: bool


class GpuCopier:
    """Copies fragments on the engines and SMs of ``devices``. Safe to use from several threads."""

    def __init__(self, driver: Driver, devices: Sequence[int], options: CopyOptions, kernels: Kernels) -> None:
        self._driver = driver
        self._options = options
        self._kernels = kernels
        self._pools = {device: DevicePool(driver, device) for device in devices}
        self._thresholds = {device: Thresholds(driver, device, options) for device in devices}
        self._sides = Sides(driver)
        self._batches = True
        self._no_kernel: EgmError | None = None

    def copy(
        self,
        fragments: Fragments,
        *,
        device: int | None = None,
        stream: int | None = None,
        strategy: Strategy | None = None,
    ) -> Submitted | Finished:
        """Queue the fragments; they do not overlap, and run in no particular order.

        ``fragments`` are tuples (destination, source, bytes), or, which is quicker to take for thousands, a buffer of
        64-bit integers in that order (a NumPy array of three columns). ``device`` is the GPU that copies (the first one
        unless given). The copy starts after what is queued on ``stream`` now, and runs on streams of the copier's own:
        let the caller's stream wait for it with ``order(stream)`` of what is returned. Memory that is pageable only
        the engine can copy.
        Raises `InvalidRequest`, `StoreClosed`, `CudaError`, and `KernelError` when strategy ``kernel`` was asked for
        and it cannot be compiled here (``auto`` then uses the engine, and warns once).
        """
        flat, smallest, largest = _flat(fragments)
        if not flat:
            return Finished()
        pool = self._pool(device)
        borrowed = pool.borrow()
        driver = self._driver
        try:
            small, large = self._split(flat, smallest, largest, pool.device, strategy or self._options.strategy)
            after = None
            if stream is not None:
                after = borrowed.event()
                driver.event_record(after, stream)
            joined = large is flat and isinstance(fragments, (list, tuple)) and 3 * len(fragments) > len(flat)
            used = []
            if large:
                fewest = smallest if large is flat else min(large[2::3])
                used = self._by_engine(borrowed, large, fewest, after, joined)
            if small:
                used.append(self._by_kernel(borrowed, small, largest if small is flat else None, after))
            events = []
            for each in used:
                event = borrowed.event()
                driver.event_record(event, each)
                events.append(event)
            prompt = stream is None and largest * (len(flat) // 3) <= _PROMPT
            submitted = Submitted(borrowed, events, prompt=prompt)
        except BaseException:
            abandon(borrowed)
            raise
        pool.track(submitted)
        return submitted

    def _pool(self, device: int | None) -> DevicePool:
        chosen = next(iter(self._pools), None) if device is None else device
        pool = self._pools.get(chosen) if chosen is not None else None
        if pool is None:
            raise InvalidRequest(
                f"GPU {device} is not one of {sorted(self._pools)}", hint="name the GPU in devices= when connecting"
            )
        return pool

    def _split(self, flat: Flat, smallest: int, largest: int, device: int, strategy: Strategy) -> tuple[Flat, Flat]:
        """(for the kernel, for the engine)."""
        none: Flat = array("Q")
        if strategy == "kernel":
            return flat, none
        if strategy == "engine" or len(flat) <= 3 * _FEW:
            return none, flat
        direction: Direction = "put" if self._is_put(flat[0]) else "get"
        below = self._thresholds[device].kernel_below(direction)
        if smallest >= below:
            return none, flat
        if largest < below:
            return (flat, none) if self._has_kernel(device) else (none, flat)
        small, large = array("Q"), array("Q")
        for at in range(0, len(flat), 3):
            (small if flat[at + 2] < below else large).extend(flat[at : at + 3])
        if len(small) <= 3 * _FEW or not self._has_kernel(device):
            return none, flat
        return small, large

    def _has_kernel(self, device: int) -> bool:
        """Whether `auto` may choose the kernel; said aloud once when not, since small fragments are slow then."""
        if self._no_kernel is None:
            try:
                self._kernels.prepare(device)
            except EgmError as error:
                _log.warning("small blocks go by the copy engine, which is slow for them: %s (%s)", error, error.hint)
                self._no_kernel = error
        return self._no_kernel is None

    def _is_put(self, destination: int) -> bool:
        """Whether the destination is DRAM. It decides which threshold and which side's lines the kernel follows."""
        return not self._sides.on_device(destination)

    def _by_engine(self, borrowed: Borrowed, flat: Flat, smallest: int, after: int | None, joined: bool) -> list[int]:
        """``joined``: these were more, and neighbours."""
        count = len(flat) // 3
        bulk = sum(flat[2::3]) >= _BULK * count
        if after is None and smallest >= _BULK and not joined:
            # One after the other they fill the link, and the first is over first. Beside each other they share it, and
            # both ways at once are slower by some per cent. A copy that waits for a stream would hold the others up.
            stream = borrowed.lane(self._is_put(flat[0]), 0)
            self._one_by_one(flat, stream)
            return [stream]
        if after is None and (count > 1 or joined) and smallest >= MIB:
            # Middling ones are a piece of a batch with others before and behind it. On streams of their own they would
            # share the link and all end at the end, with everything still to be confirmed; so they keep their order.
            # Queued together they leave no gaps: one by one, copies of 1 MiB lose a tenth of the link.
            stream = borrowed.lane(self._is_put(flat[0]), 1)
            for at in range(0, len(flat), 3 * _TOGETHER):
                self._together(flat[at : at + 3 * _TOGETHER], stream)
            return [stream]
        wanted = min(count, 2 if bulk else self._options.streams, self._options.streams)
        streams = [borrowed.stream() for _ in range(wanted)]
        for number, stream in enumerate(streams):
            if after is not None:
                self._driver.stream_wait_event(stream, after)
            (self._one_by_one if bulk else self._together)(flat, stream, number, wanted)
        return streams

    def _one_by_one(self, flat: Flat, stream: int, first: int = 0, every: int = 1) -> None:
        """Fragment number ``first``, and each ``every``-th one from there."""
        for at in range(3 * first, len(flat), 3 * every):
            self._driver.memcpy_async(flat[at], flat[at + 1], flat[at + 2], stream)

    def _together(self, flat: Flat, stream: int, first: int = 0, every: int = 1) -> None:
        """As `_one_by_one`, and so where this driver or its bindings know no batches (before CUDA 12.8)."""
        destinations, sources, sizes = [flat[3 * first + column :: 3 * every] for column in range(3)]
        if self._batches and len(sizes) > 1:
            try:
                self._driver.memcpy_batch_async(destinations, sources, sizes, stream)
                return
            except CudaError as error:
                if error.name != "FUNCTION_NOT_FOUND":
                    raise
                self._batches = False
        self._one_by_one(flat, stream, first, every)

    def _by_kernel(self, borrowed: Borrowed, flat: Flat, largest: int | None, after: int | None) -> int:
        longest = max(flat[2::3]) if largest is None else largest
        if longest > _ROW:
            flat = _rows(flat)
            longest = _ROW
        # the kernel reads its table from pinned memory: no copy ahead of it, and 24 bytes a fragment over the link
        table = borrowed.pinned(len(flat) * 8)
        ctypes.memmove(table, flat.buffer_info()[0], len(flat) * 8)
        stream = borrowed.stream()
        if after is not None:
            self._driver.stream_wait_event(stream, after)
        job = TableJob(
            table=table,
            rows=len(flat) // 3,
            longest=longest,
            pieces=-(-longest // _PIECE),
            piece_bytes=_PIECE,
            put=self._is_put(flat[0]),
            blocks=self._options.blocks,
            threads=self._options.threads,
        )
        self._kernels.copy_table(borrowed.pool.device, stream, job)
        return stream

    def prepare(self) -> None:
        """Compile and load the kernel for every device now, which the first copy that needs it does otherwise."""
        for device in self._pools:
            self._kernels.prepare(device)

    def calibrate_unknown(self) -> list[int]:
        """`calibrate` each device whose thresholds are neither given nor kept from before, one of a kind; which those
        were."""
        measured = []
        for device, thresholds in self._thresholds.items():
            if self._options.strategy == "auto" and not thresholds.known and not thresholds.look_again():
                self.calibrate(device)
                measured.append(device)
        return measured

    def calibrate(self, device: int | None = None) -> Calibration:
        """Measure from which fragment size the engine keeps up with the kernel (95%), each way, and remember it.

        Takes about a second, 64 MiB of pinned memory and as much of the device's.
        """
        pool = self._pool(device)
        self._driver.use_device(pool.device)
        nbytes = 64 * MIB
        host = self._driver.host_alloc(nbytes)
        try:
            memory = self._driver.mem_alloc(nbytes)
            try:
                found = {
                    "get": self._crossing(pool.device, memory, host, nbytes),
                    "put": self._crossing(pool.device, host, memory, nbytes),
                }
            finally:
                self._driver.use_device(pool.device)
                self._driver.mem_free(memory)
        finally:
            self._driver.host_free(host)
        saved = self._thresholds[pool.device].save(found)
        return Calibration(found["get"], found["put"], saved)

    def _crossing(self, device: int, destination: int, source: int, nbytes: int) -> int:
        size = 2 * MIB
        while size > 16 * KIB:
            smaller = size // 2
            count = nbytes // smaller
            # every second block first, so that neighbours are not merged into one copy
            order = [*range(0, count, 2), *range(1, count, 2)]
            fragments = [(destination + n * smaller, source + n * smaller, smaller) for n in order]
            engine = self._seconds(device, fragments, "engine")
            if engine > self._seconds(device, fragments, "kernel") / 0.95:
                return size
            size = smaller
        return size

    def _seconds(self, device: int, fragments: list[Fragment], strategy: Strategy) -> float:
        times = []
        for _ in range(6):
            begin = time.perf_counter()
            self.copy(fragments, device=device, strategy=strategy).wait()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])

    def quiesce(self) -> None:
        """Until no copy runs that was queued before."""
        for pool in self._pools.values():
            pool.quiesce()

    def close(self) -> None:
        """Waits for copies under way. Twice is success."""
        for pool in self._pools.values():
            pool.close()


def abandon(borrowed: Borrowed, stream: int | None = None) -> None:
    """Give back what a copy borrowed whose queueing failed half-way, once what was queued of it (on ``stream`` too) is
    over."""
    driver = borrowed.pool.driver
    try:
        others = [] if stream is None else [stream]
        for used in (*borrowed.streams, *borrowed.lanes, *others):
            driver.stream_synchronize(used)
    except CudaError:  # the context is lost, and what was borrowed with it
        borrowed.pool.lose()
        return
    borrowed.give_back()


def _flat(fragments: Fragments) -> tuple[Flat, int, int]:
    """Destination, source, bytes, destination, ..., and the fewest and the most bytes of one.

    Without empty fragments, and with neighbours joined.
    """
    try:
        if isinstance(fragments, (list, tuple)):
            flat: Flat = array("Q", chain.from_iterable(fragments))
        else:
            buffer: Any = fragments
            view = memoryview(buffer)
            if view.itemsize != 8 or view.format.lstrip("@=<") not in ("Q", "L", "q", "l") or not view.c_contiguous:
                raise InvalidRequest(
                    f"fragments of format {view.format!r}", hint="give a contiguous buffer of 64-bit integers"
                )
            flat = array("Q", view.cast("B").tobytes())
    except (TypeError, OverflowError) as error:
        raise InvalidRequest(f"fragments: {error}", hint="give tuples (destination, source, bytes)") from error
    if len(flat) % 3:
        raise InvalidRequest(
            f"{len(flat)} integers are not fragments", hint="give destination, source and bytes of each"
        )
    if len(flat) == 3 and 0 < flat[2] <= _LARGEST:
        return flat, flat[2], flat[2]
    sizes = flat[2::3].tolist()
    smallest, largest = min(sizes, default=0), max(sizes, default=0)
    if largest > _LARGEST:
        raise InvalidRequest(f"a fragment of {largest} bytes")
    # those who cut one range into pieces give the pieces in a row: two of them tell, without a look at thousands
    joined = len(flat) > 3 and flat[3] == flat[0] + flat[2] and flat[4] == flat[1] + flat[2]
    if joined or (smallest == 0 and flat):
        flat = _merged(flat)
        sizes = flat[2::3].tolist()
        smallest, largest = min(sizes, default=0), max(sizes, default=0)
    return flat, smallest, largest


def _merged(flat: Flat) -> Flat:
    merged: Flat = array("Q")
    end_destination = end_source = -1
    for destination, source, nbytes in zip(flat[0::3], flat[1::3], flat[2::3], strict=True):
        if nbytes == 0:
            continue
        if destination == end_destination and source == end_source:
            merged[-1] += nbytes
        else:
            merged.extend((destination, source, nbytes))
        end_destination, end_source = destination + nbytes, source + nbytes
    return merged


def _rows(flat: Flat) -> Flat:
    rows: Flat = array("Q")
    for destination, source, nbytes in zip(flat[0::3], flat[1::3], flat[2::3], strict=True):
        for at in range(0, nbytes, _ROW):
            rows.extend((destination + at, source + at, min(_ROW, nbytes - at)))
    return rows
