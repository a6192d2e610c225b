"""The copy kernels' rules carried out by the CPU: for tests, on memory that the CPU reaches.

Not a fallback: nothing in egmctl chooses it. It shows that the code around the kernels is right, and says what the
kernels must do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from egmctl.consumer.copy.jobs import BINS, EntryJob, Range, TableJob

__all__ = ["HostKernels"]


class HostKernels:
    """`egmctl.consumer.copy.jobs.Kernels` by ``memmove``.

    ``pointer(device, address, nbytes)`` is where the CPU finds what the device sees at an address, and
    ``queue(device, stream, work)`` runs work in its place on a stream; unless given, addresses are the CPU's own and
    work is done at once.
    """

    def __init__(
        self,
        pointer: Callable[[int, int, int], int] | None = None,
        queue: Callable[[int, int, Callable[[], None]], None] | None = None,
    ) -> None:
        self._pointer = pointer or (lambda device, address, nbytes: address)
        self._queue = queue or (lambda device, stream, work: work())

    def prepare(self, device: int) -> None:
        pass

    def copy_table(self, device: int, stream: int, job: TableJob) -> None:
        self._queue(device, stream, lambda: self._copy_table(device, job))

    def gather(self, device: int, stream: int, job: EntryJob) -> None:
        self._queue(device, stream, lambda: self._entries(device, job, False))

    def scatter(self, device: int, stream: int, job: EntryJob) -> None:
        self._queue(device, stream, lambda: self._entries(device, job, True))

    def _copy_table(self, device: int, job: TableJob) -> None:
        table = self._pointer(device, job.table, 24 * job.rows)
        for row in range(job.rows):
            destination, source, nbytes = (ctypes.c_uint64 * 3).from_address(table + 24 * row)
            # a kernel copies no more of a row than its pieces hold
            self._move(device, destination, source, min(nbytes, job.pieces * job.piece_bytes))

    def _move(self, device: int, destination: int, source: int, nbytes: int) -> None:
        ctypes.memmove(self._pointer(device, destination, nbytes), self._pointer(device, source, nbytes), nbytes)

    def _entries(self, device: int, job: EntryJob, put: bool) -> None:
        if job.order is not None and any(self._words(device, job.order.counts, BINS + 1)):
            raise RuntimeError("the counts of the page order were not zero")
        if job.order is not None:
            entries = 16 * job.entries
            for scratch, nbytes in (
                (job.order.starts, 4 * BINS + 4),
                (job.order.items, entries),
                (job.order.sorted, entries),
            ):
                if scratch:  # a kernel leaves it dirty
                    ctypes.memset(self._pointer(device, scratch, nbytes), 0xA5, nbytes)
        for index in range(job.entries):
            address = self._locate(device, job, index)
            dense = job.dense + index * job.entry_bytes
            if address is None:
                ctypes.c_uint32.from_address(self._pointer(device, job.bad_flag, 4)).value = 1
                lowest = ctypes.c_uint64.from_address(self._pointer(device, job.bad_index, 8))
                lowest.value = min(lowest.value, index)
            elif put:
                self._move(device, address, dense, job.entry_bytes)
            else:
                self._move(device, dense, address, job.entry_bytes)

    def _locate(self, device: int, job: EntryJob, index: int) -> int | None:
        space = job.only
        if job.objects:
            number = self._number(device, job.objects, index, job.object_bytes)
            if not 0 <= number < job.range_count:
                return None
            space = Range(*(ctypes.c_uint64 * 2).from_address(self._pointer(device, job.ranges + 16 * number, 16)))
        offset = self._number(device, job.offsets, index, job.offset_bytes)
        if offset < 0 or offset + job.entry_bytes > space.nbytes:
            return None
        return space.address + offset

    def _number(self, device: int, array: int, index: int, nbytes: int) -> int:
        kind = ctypes.c_int64 if nbytes == 8 else ctypes.c_int32
        return kind.from_address(self._pointer(device, array + index * nbytes, nbytes)).value

    def _words(self, device: int, address: int, count: int) -> list[int]:
        return list((ctypes.c_uint32 * count).from_address(self._pointer(device, address, 4 * count)))
