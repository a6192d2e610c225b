"""The one door to the CUDA driver: plain integers in, plain integers out, a `CudaError` for anything but success.

`Driver` is the seam where CI puts a model of the driver that obeys the same rules. The real one is
`egmctl.memory.cuda_driver.CudaDriver`, imported only when CUDA is asked for (it costs 110 ms).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

from egmctl.errors import FailedError

__all__ = [
    "AllocationProp",
    "Attribute",
    "CudaError",
    "Driver",
    "HandleType",
    "Location",
    "PointerInfo",
    "get_driver",
    "install_driver",
]


class CudaError(FailedError):
    """A driver call that did not succeed. ``name`` is the driver's own (``CUDA_ERROR_NOT_PERMITTED``)."""

    code = "cuda"

    def __init__(self, call: str, name: str, number: int, *, where: str = "", hint: str = "") -> None:
        super().__init__(
            f"{call}: {name} ({number})", where=where, hint=hint, facts={"call": call, "name": name, "number": number}
        )
        self.call = call
        self.name = name
        self.number = number


class Attribute(IntEnum):
    """CUdevice_attribute numbers (cuda.h)."""

    MULTIPROCESSOR_COUNT = 16
    PCI_BUS_ID = 33
    PCI_DEVICE_ID = 34
    PCI_DOMAIN_ID = 50
    VIRTUAL_MEMORY_MANAGEMENT = 102
    HANDLE_TYPE_POSIX_FD = 103
    GPU_DIRECT_RDMA_WITH_CUDA_VMM = 110
    HANDLE_TYPE_FABRIC = 128
    NUMA_CONFIG = 130
    NUMA_ID = 131
    HOST_NUMA_ID = 134
    HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT = 141
    HOST_NUMA_MULTINODE_IPC = 143


class HandleType(IntEnum):
    """CUmemAllocationHandleType."""

    NONE = 0
    POSIX_FD = 1
    FABRIC = 8


@dataclass(frozen=True)
class Location:
    """CUmemLocation: ``device`` an ordinal, ``host_numa`` a node."""

    kind: str  # "device" | "host_numa"
    id: int


@dataclass(frozen=True)
class AllocationProp:
    """CUmemAllocationProp, always pinned."""

    location: Location
    handle_type: HandleType
    gpu_direct_rdma: bool = False


class MemoryType(Enum):
    """Where a pointer leads; UNREGISTERED is pageable host memory."""

    HOST = "host"
    DEVICE = "device"
    UNREGISTERED = "unregistered"


@dataclass(frozen=True)
class PointerInfo:
    """What the driver says of an address; ``device`` is the ordinal of device memory, else None."""

    type: MemoryType
    device: int | None = None
    range_start: int | None = None
    range_size: int | None = None


class Driver(Protocol):
    """The calls egmctl makes. Each raises `CudaError`; streams, events and handles are integers."""

    # machine
    def version(self) -> int: ...
    def device_count(self) -> int: ...
    def device_name(self, device: int) -> str: ...
    def device_uuid(self, device: int) -> str:
        """``GPU-xxxxxxxx-...``."""

    def device_bdf(self, device: int) -> str: ...
    def attribute(self, device: int, attribute: int) -> int | None:
        """None when this driver does not know the attribute: unknown is not no."""

    def memory_info(self, device: int) -> tuple[int, int]:
        """(free, total) bytes of HBM."""

    def use_device(self, device: int) -> None:
        """Retain the primary context once per process and make it current on this thread."""

    def current_context(self) -> int:
        """This thread's current context, whoever made it; 0 for none."""

    def set_current_context(self, context: int) -> None:
        """What `current_context` said, to be so again."""

    # virtual memory management
    def granularity(self, prop: AllocationProp, recommended: bool = False) -> int: ...
    def mem_create(self, nbytes: int, prop: AllocationProp) -> int: ...
    def mem_release(self, handle: int) -> None: ...
    def address_reserve(self, nbytes: int, alignment: int = 0, hint: int = 0) -> int: ...
    def address_free(self, address: int, nbytes: int) -> None: ...
    def mem_map(self, address: int, nbytes: int, offset: int, handle: int) -> None: ...
    def mem_unmap(self, address: int, nbytes: int) -> None: ...
    def set_access(self, address: int, nbytes: int, locations: Sequence[Location]) -> None:
        """Read and write for each location."""

    def export_fd(self, handle: int) -> int:
        """A new file descriptor, close-on-exec, the caller's to close."""

    def export_fabric(self, handle: int) -> bytes:
        """64 bytes."""

    def import_fd(self, fd: int) -> int:
        """The descriptor stays the caller's."""

    def import_fabric(self, handle: bytes) -> int: ...

    # host memory
    def host_register(self, address: int, nbytes: int) -> None:
        """Portable and mapped."""

    def host_unregister(self, address: int) -> None: ...
    def host_device_pointer(self, address: int) -> int: ...
    def host_alloc(self, nbytes: int) -> int:
        """Pinned host memory."""

    def host_free(self, address: int) -> None: ...

    # device memory and copies, on the current context
    def mem_alloc(self, nbytes: int) -> int: ...
    def mem_free(self, address: int) -> None: ...
    def pointer_info(self, address: int) -> PointerInfo: ...
    def stream_create(self) -> int: ...
    def stream_destroy(self, stream: int) -> None: ...
    def stream_synchronize(self, stream: int) -> None: ...
    def stream_wait_event(self, stream: int, event: int) -> None: ...
    def event_create(self, timing: bool = False) -> int: ...
    def event_destroy(self, event: int) -> None: ...
    def event_record(self, event: int, stream: int) -> None: ...
    def event_query(self, event: int) -> bool:
        """True when all work before it is done."""

    def event_synchronize(self, event: int) -> None: ...
    def event_elapsed_ms(self, start: int, end: int) -> float: ...
    def memcpy(self, destination: int, source: int, nbytes: int) -> None: ...
    def memcpy_async(self, destination: int, source: int, nbytes: int, stream: int) -> None: ...
    def memcpy_batch_async(
        self, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None: ...
    def memset(self, address: int, value: int, nbytes: int) -> None: ...


_factory: Callable[[], Driver] | None = None
_driver: Driver | None = None


def install_driver(factory: Callable[[], Driver] | None) -> None:
    """Put another driver in the place of the real one, for tests (see `egmctl.seams`); None restores it."""
    global _factory, _driver
    _factory = factory
    _driver = None


def get_driver() -> Driver:
    """The driver of this process, initialised on the first call.

    Raises `CudaError` (``DRIVER_NOT_FOUND``, -1) where there is no driver or no ``cuda.bindings``.
    """
    global _driver
    if _driver is None:
        if _factory is not None:
            _driver = _factory()
        else:
            from egmctl.memory.cuda_driver import CudaDriver

            _driver = CudaDriver()
    return _driver
