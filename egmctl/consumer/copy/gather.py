"""Many small entries at offsets: sparse reads out of objects in DRAM, and writes into the space of a put.

The offsets may be the output of a kernel: they stay on the device, the bounds are checked there, and so is the order.
What limits small entries spread over gigabytes is address translation, which takes each 2 MiB page in turn; entries
of one page are therefore brought together first. A pool whose entries that are read together lie within 512 MiB needs
none of that: put one layer's, or one sequence's, entries into one object rather than all layers' behind each other.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

from egmctl.consumer.copy.arrays import DeviceArray, HostArray, Numbers, as_numbers
from egmctl.consumer.copy.completion import Finished, Submitted
from egmctl.consumer.copy.copier import abandon
from egmctl.consumer.copy.jobs import BINS, EntryJob, Kernels, Order, Range
from egmctl.consumer.copy.options import CopyOptions, OrderMode
from egmctl.consumer.copy.pool import Borrowed, DevicePool
from egmctl.consumer.errors import InvalidBuffer, InvalidRequest
from egmctl.memory.driver import Driver, MemoryType
from egmctl.units import GIB, KIB

__all__ = ["GpuGatherer"]

# Measured on H200, offsets never seen before, GB/s in the order given and in page order:
#   656 B x 524288: over 1 GiB 46.9 / 46.0, 2 GiB 34.0 / 46.2, 4 GiB 25.5 / 46.3, 12 GiB 20.4 / 47.2
#   656 B over 4 GiB: 2048 entries 13 / 16, 8192 22 / 30, 32768 27 / 41; over 2 GiB: 2048 13 / 12, 8192 25 / 27
#   262144 over 4 GiB: 256 B 12 / 36, 1152 B 41 / 47, 1536 B 48.6 / 48.0, 2048 B 48.8 / 48.6
ORDER_BELOW = 3 * KIB // 2
"""Entries of this size and more fill the link in any order."""
ORDER_SPAN = GIB
"""Up to this span the translations of all pages stay at hand."""
ORDER_COUNT = 4096
"""Fewer entries are over before ordering them has paid for itself."""
LINE = 64
"""Host memory takes a line that is written in part more slowly: puts of entries that leave such lines are ordered
within the page too, so that neighbours meet (656 B x 786432 over 512 MiB: 44.8 in the order given, 46.5 so)."""
ORDER_RAGGED_COUNT = 65536
_MOST = 1 << 31


class GpuGatherer:
    """Gathers and scatters on ``devices``. Safe to use from several threads."""

    def __init__(self, driver: Driver, devices: Sequence[int], options: CopyOptions, kernels: Kernels) -> None:
        self._driver = driver
        self._options = options
        self._kernels = kernels
        self._pools = {device: DevicePool(driver, device) for device in devices}

    def gather(
        self,
        object_ranges: Range | Sequence[Range],
        offsets: Any,
        entry_bytes: int,
        destination: int,
        *,
        device: int | None = None,
        objects: Any = None,
        stream: int | None = None,
        order: OrderMode | None = None,
    ) -> Submitted | Finished:
        """Entry i, ``entry_bytes`` at byte ``offsets[i]`` of its object, goes to ``destination + i * entry_bytes``.

        ``object_ranges``: where the object lies, or several objects: then ``objects[i]`` is the number of entry i's.
        ``offsets`` and ``objects``: see `as_numbers`; on the device they are read when the kernel runs, in host memory
        they are copied now. ``destination`` holds ``len(offsets) * entry_bytes`` bytes that the device can write.
        It all runs on ``stream``, in line with what is queued there; without one, on a stream of the gatherer's own,
        and then offsets on the device must be there already (or their array must name its stream).
        An offset that is negative or would end outside its object leaves its entry untouched, and ``wait`` raises
        `BadOffset` with the first one's index.
        """
        return self._entries(object_ranges, offsets, entry_bytes, destination, device, objects, stream, order, False)

    def scatter(
        self,
        object_ranges: Range | Sequence[Range],
        offsets: Any,
        entry_bytes: int,
        source: int,
        *,
        device: int | None = None,
        objects: Any = None,
        stream: int | None = None,
        order: OrderMode | None = None,
    ) -> Submitted | Finished:
        """The reverse: ``source + i * entry_bytes`` goes to byte offset ``offsets[i]`` of its object's space.

        Give only space that this put has reserved. Entries that overlap are written in no particular order.
        """
        return self._entries(object_ranges, offsets, entry_bytes, source, device, objects, stream, order, True)

    def _entries(
        self,
        object_ranges: Range | Sequence[Range],
        offsets: Any,
        entry_bytes: int,
        dense: int,
        device: int | None,
        objects: Any,
        stream: int | None,
        order: OrderMode | None,
        put: bool,
    ) -> Submitted | Finished:
        if entry_bytes <= 0 or dense <= 0:
            raise InvalidRequest(f"entries of {entry_bytes} bytes at {dense:#x}")
        where = as_numbers(offsets)
        ranges = _ranges(object_ranges, objects is not None)
        which = None if objects is None else as_numbers(objects, "objects")
        if which is not None and which.length != where.length:
            raise InvalidRequest(f"{which.length} object numbers for {where.length} offsets")
        if where.length == 0:
            return Finished()
        if where.length > _MOST:
            raise InvalidRequest(f"{where.length} entries in one gather", hint=f"at most {_MOST}")
        pool = self._pool(device)
        borrowed = pool.borrow()
        try:
            self._check(where, "offsets", pool.device)
            if which is not None:
                self._check(which, "objects", pool.device)
            chosen = self._stream(borrowed, stream, where, which)
            word = borrowed.error_word()
            table = self._table(borrowed, ranges, chosen) if which is not None else 0
            job = EntryJob(
                offsets=_readable(borrowed, where),
                offset_bytes=where.where.width,
                objects=0 if which is None else _readable(borrowed, which),
                object_bytes=8 if which is None else which.where.width,
                ranges=table,
                range_count=len(ranges),
                only=ranges[0] if which is None else Range(0, 0),
                dense=dense,
                entries=where.length,
                entry_bytes=entry_bytes,
                bad_index=word.lowest,
                bad_flag=word.flag,
                order=self._order(borrowed, order or self._options.order, where.length, entry_bytes, ranges, put),
                blocks=self._options.blocks,
                threads=self._options.threads,
            )
            (self._kernels.scatter if put else self._kernels.gather)(pool.device, chosen, job)
            event = borrowed.event()
            self._driver.event_record(event, chosen)
        except BaseException:
            abandon(borrowed, stream)
            raise
        submitted = Submitted(
            borrowed,
            (event,),
            (where.owner, which),
            ("scatter" if put else "gather", where.length),
            prompt=stream is None and where.stream is None and where.length * entry_bytes <= 1 << 30,
        )
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

    def _check(self, numbers: Numbers, name: str, device: int) -> None:
        """That the kernel may read an array that was given by address: it would lose the context over it."""
        where = numbers.where
        if not isinstance(where, DeviceArray):
            return
        at = f"{name} at {where.address:#x}"
        info = self._driver.pointer_info(where.address)
        if info.type is MemoryType.UNREGISTERED:
            raise InvalidBuffer("are neither GPU memory nor pinned", where=at, hint="give host memory as a NumPy array")
        if info.type is MemoryType.DEVICE and info.device != device:
            raise InvalidBuffer(f"lie on GPU {info.device}, and GPU {device} reads them", where=at)
        end = where.address + where.length * where.width
        if info.range_start and info.range_size and end > info.range_start + info.range_size:
            raise InvalidBuffer(
                f"{where.length} integers of {where.width} bytes reach beyond their allocation", where=at
            )

    def _stream(self, borrowed: Borrowed, stream: int | None, *arrays: Numbers | None) -> int:
        chosen = borrowed.stream() if stream is None else stream
        for numbers in arrays:
            if numbers is not None and numbers.stream is not None and numbers.stream != chosen:
                event = borrowed.event()
                self._driver.event_record(event, numbers.stream)
                self._driver.stream_wait_event(chosen, event)
        return chosen

    def _table(self, borrowed: Borrowed, ranges: Sequence[Range], stream: int) -> int:
        # each entry looks its range up, at random: that wants the device's own memory
        flat = array("Q", chain.from_iterable(ranges))
        nbytes = len(flat) * 8
        staging, table = borrowed.pinned(nbytes), borrowed.scratch(nbytes)
        ctypes.memmove(staging, flat.buffer_info()[0], nbytes)
        self._driver.memcpy_async(table, staging, nbytes, stream)
        return table

    def _order(
        self, borrowed: Borrowed, mode: OrderMode, count: int, entry_bytes: int, ranges: Sequence[Range], put: bool
    ) -> Order | None:
        if mode == "never" or (mode == "auto" and (entry_bytes >= ORDER_BELOW or count < ORDER_COUNT)):
            return None
        ragged = put and entry_bytes % LINE != 0
        span = sum(nbytes for _, nbytes in ranges)
        if mode == "auto" and span <= ORDER_SPAN and not (ragged and count >= ORDER_RAGGED_COUNT):
            return None
        starts, ranks = borrowed.scratch(4 * (BINS + 1)), borrowed.scratch(4 * count)
        items, second = borrowed.scratch(16 * count), borrowed.scratch(16 * count) if ragged else 0
        return Order(borrowed.counts(), starts, ranks, items, second, span)

    def prepare(self) -> None:
        """Compile and load the kernels for every device now, which the first gather does otherwise."""
        for device in self._pools:
            self._kernels.prepare(device)

    def quiesce(self) -> None:
        """Until no gather runs that was queued before on streams of the gatherer's own."""
        for pool in self._pools.values():
            pool.quiesce()

    def close(self) -> None:
        """Waits for gathers under way. Twice is success."""
        for pool in self._pools.values():
            pool.close()


def _ranges(given: Range | Sequence[Range], many: bool) -> list[Range]:
    ranges = [given] if isinstance(given, Range) else [Range(*each) for each in given]
    if not ranges or (len(ranges) > 1 and not many):
        raise InvalidRequest(
            f"{len(ranges)} objects and no object numbers", hint="one object, or objects= with a number for each entry"
        )
    for address, nbytes in ranges:
        if address <= 0 or nbytes < 0 or address + nbytes > 1 << 63:
            raise InvalidRequest(f"an object of {nbytes} bytes at {address:#x}")
    return ranges


def _readable(borrowed: Borrowed, numbers: Numbers) -> int:
    """An address at which the device reads the numbers."""
    where = numbers.where
    if isinstance(where, DeviceArray):
        return where.address
    return _staged(borrowed, where)


def _staged(borrowed: Borrowed, numbers: HostArray) -> int:
    staging = borrowed.pinned(numbers.data.nbytes)
    ctypes.memmove(staging, bytes(numbers.data), numbers.data.nbytes)
    return staging
