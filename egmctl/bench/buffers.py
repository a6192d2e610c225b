"""Buffers to put from and get into, in host memory or on a GPU, whose content a test can set and see."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from egmctl.memory.driver import get_driver

if TYPE_CHECKING:
    from egmctl.consumer import EgmStore

__all__ = ["Buffer", "DeviceBuffer", "HostBuffer", "make_buffer", "registered"]


class Buffer(Protocol):
    """``nbytes`` at ``address``."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def fill(self, data: bytes) -> None:
        """Copy ``data`` to the start."""

    def content(self, nbytes: int) -> bytes:
        """The first ``nbytes``."""

    def close(self) -> None: ...


class HostBuffer:
    """Pageable host memory, touched."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = bytearray(b"\xff") * nbytes
        self._array = (ctypes.c_char * nbytes).from_buffer(self._memory)
        self.address = ctypes.addressof(self._array)

    def fill(self, data: bytes) -> None:
        ctypes.memmove(self.address, data, len(data))

    def content(self, nbytes: int) -> bytes:
        return ctypes.string_at(self.address, nbytes)

    def close(self) -> None:
        """Nothing to do: the memory goes with the object."""


class DeviceBuffer:
    """HBM of one GPU; its content travels through the driver's own copy, which no measurement includes."""

    def __init__(self, nbytes: int, device: int) -> None:
        self.nbytes = nbytes
        self.device = device
        self._driver = get_driver()
        self._driver.use_device(device)
        self.address = self._driver.mem_alloc(nbytes)

    def fill(self, data: bytes) -> None:
        self._driver.use_device(self.device)
        host = ctypes.create_string_buffer(data, len(data))
        self._driver.memcpy(self.address, ctypes.addressof(host), len(data))

    def content(self, nbytes: int) -> bytes:
        self._driver.use_device(self.device)
        host = ctypes.create_string_buffer(max(1, nbytes))
        self._driver.memcpy(ctypes.addressof(host), self.address, nbytes)
        return host.raw[:nbytes]

    def close(self) -> None:
        if self.address:
            self._driver.use_device(self.device)
            self._driver.mem_free(self.address)
            self.address = 0


def make_buffer(nbytes: int, device: int | None) -> Buffer:
    """Host memory, or with ``device`` that GPU's. Raises `CudaError`."""
    return HostBuffer(nbytes) if device is None else DeviceBuffer(nbytes, device)


@contextmanager
def registered(store: EgmStore, nbytes: int, device: int | None) -> Iterator[Buffer]:
    """A buffer that ``store`` knows, until the end of the block. Raises `CudaError`, `InvalidBuffer`."""
    buffer = make_buffer(nbytes, device)
    try:
        store.register_buffer(buffer.address, nbytes)
        try:
            yield buffer
        finally:
            store.unregister_buffer(buffer.address)
    finally:
        buffer.close()
