"""What a copy kernel is asked to do, and the seam behind which kernels stand.

`Kernels` has two implementations: `egmctl.consumer.copy.kernels.CudaKernels`, and
`egmctl.consumer.copy.host_kernels.HostKernels`, which obeys the same rules on memory that the CPU reaches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

from egmctl.memory.driver import Driver

__all__ = [
    "BINS",
    "PAGE_SHIFT",
    "EntryJob",
    "Kernels",
    "LazyKernels",
    "Order",
    "Range",
    "TableJob",
    "install_kernels",
    "make_kernels",
]

PAGE_SHIFT = 21
"""Entries are ordered by 2 MiB page, the granularity of the mappings (hardware figures in the README)."""
BINS = 8192
"""Pages apart by a multiple of BINS share a bin: 16 GiB are covered before that happens, and then it costs little."""


class Range(NamedTuple):
    """``nbytes`` at ``address``, in this process's address space: an object, or the space of one."""

    address: int
    nbytes: int


class TableJob(NamedTuple):
    """``rows`` rows {destination, source, nbytes} of 64-bit integers at ``table``, each cut into ``pieces`` of
    ``piece_bytes`` (shorter rows have fewer); none is over ``longest``. ``put``: the destination is the DRAM side."""

    table: int
    rows: int
    longest: int
    pieces: int
    piece_bytes: int
    put: bool
    blocks: int
    threads: int


class Order(NamedTuple):
    """Device memory in which entries are put in page order.

    ``counts`` and ``starts`` hold ``BINS + 1`` 32-bit words each, ``counts`` zero before and after; ``ranks`` 4 bytes
    an entry, ``items`` 16, and ``sorted`` 16, or it is 0 and the order within a page is left as it comes. ``span`` is
    the bytes over which the entries are spread.
    """

    counts: int
    starts: int
    ranks: int
    items: int
    sorted: int
    span: int


class EntryJob(NamedTuple):
    """``entries`` entries of ``entry_bytes`` between dense memory and the ranges of objects.

    ``offsets`` is the address of as many signed integers of ``offset_bytes`` (4 or 8): byte offsets inside ``only``,
    or, when ``objects`` is not 0, inside the range whose number stands there (``object_bytes`` each), of the
    ``range_count`` ranges {address, nbytes} at ``ranges``. An entry that would leave its range is not touched: it sets
    the 32-bit word at ``bad_flag`` (host memory) to 1 and lowers the 64-bit word at ``bad_index`` to its index.
    """

    offsets: int
    offset_bytes: int
    objects: int
    object_bytes: int
    ranges: int
    range_count: int
    only: Range
    dense: int
    entries: int
    entry_bytes: int
    bad_index: int
    bad_flag: int
    order: Order | None
    blocks: int
    threads: int


class Kernels(Protocol):
    """Queue work on a stream of a device; the device's context is current on this thread."""

    def prepare(self, device: int) -> None:
        """Compile now rather than at the first use."""

    def copy_table(self, device: int, stream: int, job: TableJob) -> None: ...
    def gather(self, device: int, stream: int, job: EntryJob) -> None:
        """Ranges to dense memory."""

    def scatter(self, device: int, stream: int, job: EntryJob) -> None:
        """Dense memory to ranges; entries that overlap are written in no particular order."""


_factory: Callable[[Driver], Kernels] | None = None


def install_kernels(factory: Callable[[Driver], Kernels] | None) -> None:
    """Put other kernels in the place of the CUDA ones, for tests without a GPU; None restores them."""
    global _factory
    _factory = factory


def make_kernels(driver: Driver) -> Kernels:
    """The kernels of this process."""
    if _factory is not None:
        return _factory(driver)
    from egmctl.consumer.copy.kernels import CudaKernels

    return CudaKernels(driver)


class LazyKernels:
    """The kernels of this process, made when they are first used: copies by the engine alone need no compiler."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._made: Kernels | None = None
        self._lock = threading.Lock()

    def _kernels(self) -> Kernels:
        if self._made is None:
            with self._lock:
                if self._made is None:
                    self._made = make_kernels(self._driver)
        return self._made

    def prepare(self, device: int) -> None:
        self._kernels().prepare(device)

    def copy_table(self, device: int, stream: int, job: TableJob) -> None:
        self._kernels().copy_table(device, stream, job)

    def gather(self, device: int, stream: int, job: EntryJob) -> None:
        self._kernels().gather(device, stream, job)

    def scatter(self, device: int, stream: int, job: EntryJob) -> None:
        self._kernels().scatter(device, stream, job)
