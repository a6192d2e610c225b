"""Buffers registered for local transfers: known to this process alone, never published."""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from egmctl.consumer.errors import InvalidBuffer
from egmctl.memory.driver import Driver, MemoryType

__all__ = ["Buffer", "Buffers"]

_MS_ASYNC = 1  # <sys/mman.h>; writes nothing back, but fails with ENOMEM where a page of the range is not mapped
_libc = ctypes.CDLL(None, use_errno=True)
_libc.msync.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True)
class Buffer:
    """``nbytes`` at ``address``; ``device`` is the GPU that copies it (None: the CPU)."""

    address: int
    nbytes: int
    kind: Literal["pageable", "pinned", "device"]
    device: int | None

    @cached_property
    def end(self) -> int:
        return self.address + self.nbytes


def _is_mapped(address: int, nbytes: int) -> bool:
    start = address & ~(mmap.PAGESIZE - 1)
    return bool(_libc.msync(start, address + nbytes - start, _MS_ASYNC) == 0)


class Buffers:
    """The registered buffers of a store, by address. Overlaps are refused."""

    def __init__(self, driver: Driver | None, devices: Sequence[int]) -> None:
        self._driver = driver
        self._devices = tuple(devices)
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._buffers: list[Buffer] = []
        self._last: Buffer | None = None

    def register(self, address: int, nbytes: int) -> Buffer:
        """Raises `InvalidBuffer` for an empty, unmapped or overlapping range, or a GPU that the store was not given.
        Registering the very same range again is success."""
        buffer = self._describe(address, nbytes)
        with self._lock:
            at = bisect.bisect_left(self._starts, address)
            if at < len(self._starts) and self._buffers[at] == buffer:
                return buffer
            before = self._buffers[at - 1] if at else None
            after = self._buffers[at] if at < len(self._buffers) else None
            for other in (before, after):
                if other and other.address < address + nbytes and address < other.address + other.nbytes:
                    raise InvalidBuffer(
                        f"overlaps the {other.nbytes} bytes registered at {other.address:#x}",
                        where=f"buffer {address:#x}, {nbytes} bytes",
                        hint="unregister the other one first",
                    )
            self._starts.insert(at, address)
            self._buffers.insert(at, buffer)
        return buffer

    def unregister(self, address: int) -> None:
        """Raises `InvalidBuffer` when no buffer starts at ``address``."""
        with self._lock:
            at = bisect.bisect_left(self._starts, address)
            if at == len(self._starts) or self._starts[at] != address:
                raise InvalidBuffer("is not registered", where=f"buffer {address:#x}")
            del self._starts[at], self._buffers[at]
            self._last = None

    def find(self, address: int, nbytes: int) -> Buffer:
        """The buffer that holds all of the range. Raises `InvalidBuffer`."""
        buffer = self._last  # a batch mostly stays in one
        if buffer is not None and buffer.address <= address and address + nbytes <= buffer.end and nbytes >= 0:
            return buffer
        with self._lock:
            at = bisect.bisect_right(self._starts, address) - 1
            if at >= 0:
                buffer = self._buffers[at]
                if address + nbytes <= buffer.end and nbytes >= 0:
                    self._last = buffer
                    return buffer
        raise InvalidBuffer(
            "is not inside a registered buffer",
            where=f"{nbytes} bytes at {address:#x}",
            hint="call register_buffer(address, nbytes) for the whole buffer first",
        )

    def __len__(self) -> int:
        with self._lock:
            return len(self._buffers)

    def _describe(self, address: int, nbytes: int) -> Buffer:
        where = f"buffer {address:#x}, {nbytes} bytes"
        if nbytes <= 0 or address <= 0 or address + nbytes > 1 << 64:
            raise InvalidBuffer("is empty or outside the address space", where=where)
        if self._driver is not None:
            self._driver.use_device(self._devices[0])
            info = self._driver.pointer_info(address)
            if info.range_start and info.range_size and address + nbytes > info.range_start + info.range_size:
                raise InvalidBuffer(f"reaches beyond its allocation of {info.range_size} bytes", where=where)
            if info.type is MemoryType.DEVICE:
                if info.device not in self._devices:
                    raise InvalidBuffer(
                        f"lies on GPU {info.device}, and this store was opened for {list(self._devices)}",
                        where=where,
                        hint="name the GPU in devices= when connecting",
                    )
                return Buffer(address, nbytes, "device", info.device)
            if info.type is MemoryType.HOST:
                return Buffer(address, nbytes, "pinned", self._devices[0])
        if not _is_mapped(address, nbytes):
            raise InvalidBuffer(
                f"is not mapped in process {os.getpid()}",
                where=where,
                hint="give the address of host memory; for GPU memory name the GPU in devices= when connecting",
            )
        return Buffer(address, nbytes, "pageable", None)
