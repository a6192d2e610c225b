"""The consumer's end of the CUDA kinds: a handle of another process, imported and mapped here."""

from __future__ import annotations

from collections.abc import Sequence

from egmctl.errors import FailedError
from egmctl.memory import linux
from egmctl.memory.base import MemoryKind, ReleaseError, Share
from egmctl.memory.cuda import ADDRESS_ALIGNMENT, explained, releasing
from egmctl.memory.driver import Driver, Location, get_driver
from egmctl.steps import step

__all__ = ["CudaMapping", "import_cuda"]


class CudaMapping:
    """An imported chunk, for the given GPUs, and for the CPU where that was granted."""

    def __init__(self, driver: Driver, kind: MemoryKind, nbytes: int) -> None:
        self.nbytes = nbytes
        self._driver = driver
        self._kind = kind
        self._handle: int | None = None
        self._address: int | None = None
        self._mapped = False
        self._cpu = False
        self._gpus = False

    @property
    def address(self) -> int:
        if self._address is None:
            raise FailedError("the mapping is closed", where=f"{self._kind} mapping")
        return self._address

    @property
    def device_address(self) -> int | None:
        return self._address if self._gpus else None

    def host_view(self) -> memoryview:
        if not self._cpu:
            raise FailedError(
                "the CPU has no access to this mapping", where=f"{self._kind} mapping", hint="import it with devices=[]"
            )
        return linux.view(self.address, self.nbytes)

    def _build(self, share: Share, devices: Sequence[int], address: int | None) -> None:
        driver, nbytes = self._driver, self.nbytes
        with step("memory.cuda.import"):
            if share.fabric is not None:
                self._handle = driver.import_fabric(share.fabric)
            elif share.fd is not None:
                self._handle = driver.import_fd(share.fd)
            else:
                raise FailedError("the share carries no handle", where=f"{self._kind} import")
        with step("memory.cuda.import_reserve", nbytes=nbytes):
            self._address = driver.address_reserve(nbytes, ADDRESS_ALIGNMENT, address or 0)
        if address is not None and self._address != address:
            raise FailedError(f"the address {address:#x} is taken in this process", where=f"{self._kind} import")
        with step("memory.cuda.import_map"):
            driver.mem_map(self._address, nbytes, 0, self._handle)
            self._mapped = True
        access = [Location("device", device) for device in devices]
        # Memory behind a fabric handle may be another host's, to which only GPUs have a path.
        cpu = self._kind == "cuda-posix" or not devices
        if cpu:
            access.append(Location("host_numa", share.numa_node))
        with step("memory.cuda.import_access"):
            driver.set_access(self._address, nbytes, access)
        self._cpu, self._gpus = cpu, bool(devices)

    def close(self) -> None:
        self._cpu = self._gpus = False
        with releasing(f"{self._kind} mapping"):
            if self._mapped:
                with step("memory.cuda.import_unmap"):
                    self._driver.mem_unmap(self.address, self.nbytes)
                    self._mapped = False
            if self._handle is not None:
                with step("memory.cuda.import_release"):
                    self._driver.mem_release(self._handle)
                    self._handle = None
            if self._address is not None:
                with step("memory.cuda.import_free"):
                    self._driver.address_free(self._address, self.nbytes)
                    self._address = None


def import_cuda(share: Share, *, devices: Sequence[int], address: int | None = None) -> CudaMapping:
    """Import, reserve, map, grant access. A descriptor in ``share`` stays the caller's.

    Raises `CudaError` with everything undone; a `ReleaseError` from the undoing carries the mapping as ``left``.
    """
    mapping = CudaMapping(get_driver(), share.kind, share.nbytes)
    try:
        with explained(f"{share.kind} import", share.kind):
            mapping._build(share, devices, address)
    except BaseException:
        try:
            mapping.close()
        except ReleaseError as error:
            error.left = mapping
            raise
        raise
    return mapping
