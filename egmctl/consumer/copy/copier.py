"""Copies of fragments between GPU memory and mapped DRAM: by the copy engines, by the kernel, or by both."""

from __future__ import annotations

import ctypes
import logging
import statistics
import time
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from egmctl.consumer.copy.completion import Finished, Submitted
from egmctl.consumer.copy.jobs import Kernels, TableJob
from egmctl.consumer.copy.options import CopyOptions, Direction, Strategy, Thresholds
from egmctl.consumer.copy.pool import Borrowed, DevicePool
from egmctl.consumer.errors import InvalidRequest
from egmctl.errors import EgmError
from egmctl.memory.driver import CudaError, Driver, MemoryType
from egmctl.units import KIB, MIB

__all__ = ["Calibration", "Fragment", "GpuCopier"]

Fragment = tuple[int, int, int]
"""(destination address, source address, bytes)."""

_log = logging.getLogger(__name__)

_FEW = 4  # up to so many small fragments cost less by the engine than a kernel's launch
_BATCH_FROM = 16  # fewer are queued one by one, which is as fast and needs no lists
_BULK = 16 * MIB  # fragments of this size fill the link from two streams
_PIECE = 16 * KIB
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
        self._on_device: dict[int, bool] = {}
        self._batches = True
        self._no_kernel: EgmError | None = None

    def copy(
        self,
        fragments: Sequence[Fragment],
        *,
        device: int | None = None,
        stream: int | None = None,
        strategy: Strategy | None = None,
    ) -> Submitted | Finished:
        """Queue the fragments; they do not overlap, and run in no particular order.

        ``device`` is the GPU that copies (the first one unless given). The copy starts after what is queued on
        ``stream`` now, and runs on streams of the copier's own: let the caller's stream wait for it with
        ``order(stream)`` of what is returned. Memory that is pageable only the engine can copy.
        Raises `InvalidRequest`, `StoreClosed`, `CudaError`, and `KernelError` when strategy ``kernel`` was asked for
        and it cannot be compiled here (``auto`` then uses the engine, and warns once).
        """
        todo = _merged(fragments)
        if not todo:
            return Finished()
        pool = self._pool(device)
        borrowed = pool.borrow()
        small, large = self._split(todo, pool.device, strategy or self._options.strategy)
        try:
            after = None
            if stream is not None:
                after = borrowed.event()
                self._driver.event_record(after, stream)
            used: list[int] = []
            if large:
                used += self._by_engine(borrowed, large, after)
            if small:
                used.append(self._by_kernel(borrowed, small, after))
            for other in used[1:]:
                event = borrowed.event()
                self._driver.event_record(event, other)
                self._driver.stream_wait_event(used[0], event)
            event = borrowed.event()
            self._driver.event_record(event, used[0])
        except BaseException:
            abandon(borrowed)
            raise
        submitted = Submitted(borrowed, event)
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

    def _split(
        self, fragments: list[Fragment], device: int, strategy: Strategy
    ) -> tuple[list[Fragment], list[Fragment]]:
        """(for the kernel, for the engine)."""
        if strategy == "kernel":
            return fragments, []
        if strategy == "engine" or len(fragments) <= _FEW:
            return [], fragments
        direction: Direction = "put" if self._is_put(fragments[0]) else "get"
        below = self._thresholds[device].kernel_below(direction)
        small = [fragment for fragment in fragments if fragment[2] < below]
        if len(small) <= _FEW or not self._has_kernel(device):
            return [], fragments
        return small, [fragment for fragment in fragments if fragment[2] >= below]

    def _has_kernel(self, device: int) -> bool:
        """Whether `auto` may choose the kernel; said aloud once when not, since small fragments are slow then."""
        if self._no_kernel is None:
            try:
                self._kernels.prepare(device)
            except EgmError as error:
                _log.warning("small blocks go by the copy engine, which is slow for them: %s (%s)", error, error.hint)
                self._no_kernel = error
        return self._no_kernel is None

    def _is_put(self, fragment: Fragment) -> bool:
        """Whether the destination is DRAM. It decides which threshold and which side's lines the kernel follows, so a
        remembered answer that has become wrong costs speed and nothing else."""
        page = fragment[0] >> 21
        known = self._on_device.get(page)
        if known is None:
            if len(self._on_device) >= 4096:
                self._on_device.clear()
            known = self._driver.pointer_info(fragment[0]).type is MemoryType.DEVICE
            self._on_device[page] = known
        return not known

    def _by_engine(self, borrowed: Borrowed, fragments: list[Fragment], after: int | None) -> list[int]:
        count = len(fragments)
        bulk = count < _BATCH_FROM or sum(nbytes for _, _, nbytes in fragments) >= _BULK * count
        wanted = min(count, 2 if bulk else self._options.streams, self._options.streams)
        streams = [borrowed.stream() for _ in range(wanted)]
        for number, stream in enumerate(streams):
            if after is not None:
                self._driver.stream_wait_event(stream, after)
            share = fragments[number::wanted]
            if bulk or not self._by_batch(share, stream):
                for destination, source, nbytes in share:
                    self._driver.memcpy_async(destination, source, nbytes, stream)
        return streams

    def _by_batch(self, fragments: list[Fragment], stream: int) -> bool:
        """False when this driver or its bindings know no batches (before CUDA 12.8)."""
        if not self._batches:
            return False
        destinations, sources, sizes = zip(*fragments, strict=True)
        try:
            self._driver.memcpy_batch_async(destinations, sources, sizes, stream)
        except CudaError as error:
            if error.name != "FUNCTION_NOT_FOUND":
                raise
            self._batches = False
            return False
        return True

    def _by_kernel(self, borrowed: Borrowed, fragments: list[Fragment], after: int | None) -> int:
        options = self._options
        longest = max(nbytes for _, _, nbytes in fragments)
        if longest > _ROW:
            fragments = _rows(fragments)
            longest = _ROW
        # the kernel reads its table from pinned memory: no copy ahead of it, and 24 bytes a fragment over the link
        flat = array("Q", chain.from_iterable(fragments))
        table = borrowed.pinned(len(flat) * 8)
        ctypes.memmove(table, flat.buffer_info()[0], len(flat) * 8)
        stream = borrowed.stream()
        if after is not None:
            self._driver.stream_wait_event(stream, after)
        pieces = -(-longest // _PIECE)
        job = TableJob(
            table=table,
            rows=len(fragments),
            nbytes=sum(flat[2::3]),
            pieces=pieces,
            piece_bytes=_PIECE,
            put=self._is_put(fragments[0]),
            blocks=options.blocks,
            threads=options.threads,
        )
        self._kernels.copy_table(borrowed.pool.device, stream, job)
        return stream

    def prepare(self) -> None:
        """Compile and load the kernel for every device now, which the first copy that needs it does otherwise."""
        for device in self._pools:
            self._kernels.prepare(device)

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

    def close(self) -> None:
        """Waits for copies under way. Twice is success."""
        for pool in self._pools.values():
            pool.close()


def abandon(borrowed: Borrowed) -> None:
    """Give back what a copy borrowed whose queueing failed half-way, once what was queued of it is over."""
    driver = borrowed.pool.driver
    try:
        for stream in borrowed.streams:
            driver.stream_synchronize(stream)
    except CudaError:
        return  # the context is lost, and what was borrowed with it
    borrowed.give_back()


def _merged(fragments: Sequence[Fragment]) -> list[Fragment]:
    """Without empty ones, and neighbours that go on where the last one ended made one."""
    merged: list[Fragment] = []
    end_destination = end_source = -1
    for fragment in fragments:
        destination, source, nbytes = fragment
        if nbytes <= 0:
            if nbytes < 0:
                raise InvalidRequest(f"a fragment of {nbytes} bytes")
            continue
        if destination == end_destination and source == end_source:
            first = merged[-1]
            merged[-1] = (first[0], first[1], first[2] + nbytes)
        else:
            merged.append(fragment)
        end_destination, end_source = destination + nbytes, source + nbytes
    return merged


def _rows(fragments: Sequence[Fragment]) -> list[Fragment]:
    return [
        (destination + at, source + at, min(_ROW, nbytes - at))
        for destination, source, nbytes in fragments
        for at in range(0, nbytes, _ROW)
    ]
