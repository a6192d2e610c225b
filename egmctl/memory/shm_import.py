"""The consumer's end of memory kind ``shm``: a chunk of another process, mapped here."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from egmctl.errors import FailedError
from egmctl.memory import linux
from egmctl.memory.base import ReleaseError, Share
from egmctl.memory.driver import get_driver
from egmctl.steps import step
from egmctl.units import format_size

__all__ = ["ShmMapping", "import_shm"]


class ShmMapping:
    """An imported chunk. ``device_address`` is what GPUs use, None when it was not registered with CUDA."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._address: int | None = None
        self._registered = False
        self._device = 0
        self.device_address: int | None = None

    @property
    def address(self) -> int:
        if self._address is None:
            raise FailedError("the mapping is closed", where="shm mapping")
        return self._address

    def host_view(self) -> memoryview:
        return linux.view(self.address, self.nbytes)

    def _register(self, devices: Sequence[int]) -> None:
        driver = get_driver()
        for device in devices:
            driver.use_device(device)
        with step("memory.shm.register"):
            driver.host_register(self.address, self.nbytes)
            self._registered, self._device = True, devices[-1]
        self.device_address = driver.host_device_pointer(self.address)

    def close(self) -> None:
        if self._registered:
            driver = get_driver()
            driver.use_device(self._device)  # whichever thread closes it need not have a context
            with step("memory.shm.unregister"):
                driver.host_unregister(self.address)
                self._registered, self.device_address = False, None
        if self._address is not None:
            try:
                with step("memory.shm.import_unmap"):
                    linux.unmap(self._address, self.nbytes)
                    self._address = None
            except OSError as error:
                raise ReleaseError(f"unmapping: {error}", where="shm mapping") from error


def import_shm(share: Share, *, devices: Sequence[int], address: int | None = None) -> ShmMapping:
    """Map a chunk of another process; with ``devices`` also register it with CUDA for all of them.

    The descriptor stays the caller's. One that could be shrunk under us, or is shorter than it says, is refused.
    """
    if share.fd is None:
        raise FailedError("the share carries no descriptor", where="shm import")
    seals, size = linux.file_seals(share.fd), os.fstat(share.fd).st_size
    if seals & linux.SEALS != linux.SEALS:
        raise FailedError(
            "the shared file is not sealed, so its owner could shrink it under a reader",
            where="shm import",
            hint="the sender is no egmctl agent, or an agent of another version",
            facts={"seals": seals},
        )
    if size < share.nbytes or share.nbytes <= 0:
        raise FailedError(
            f"the shared file has {size} bytes, the chunk should have {share.nbytes}",
            where="shm import",
            hint="ask the provider again",
            facts={"file_bytes": size, "chunk_bytes": share.nbytes},
        )
    mapping = ShmMapping(share.nbytes)
    try:
        _map_shared(mapping, share.fd, address)
        if devices:
            mapping._register(devices)
    except BaseException:
        mapping.close()
        raise
    return mapping


def _map_shared(mapping: ShmMapping, fd: int, address: int | None) -> None:
    try:
        with step("memory.shm.import_map"):
            mapping._address = linux.map_file(fd, mapping.nbytes, exactly=address)
    except OSError as error:
        taken = f" at {address:#x}" if address is not None else ""
        raise FailedError(
            f"mapping {format_size(mapping.nbytes)}{taken}: {error.strerror or error} ({error.errno})",
            where="shm import",
            hint="the address is in use in this process" if error.errno == errno.EEXIST else "see `ulimit -v`",
        ) from error
