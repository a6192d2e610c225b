"""The real CUDA driver behind the `Driver` door, through ``cuda.bindings.driver`` (12.9 and later).

The bindings return a tuple whose first item is the result; here anything but success is a `CudaError`. They let other
threads run during a call. Plain integers stand for pointers and handles, which the bindings take as they are.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import uuid
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from egmctl.memory.driver import AllocationProp, CudaError, HandleType, Location, MemoryType, PointerInfo

__all__ = ["CudaDriver"]

_HOST_PORTABLE_MAPPED = 0x01 | 0x02  # CU_MEMHOSTREGISTER_* and CU_MEMHOSTALLOC_*: PORTABLE, DEVICEMAP
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_INVALID_VALUE = 1
_NOT_READY = 600


def _missing(call: str, reason: str) -> CudaError:
    return CudaError(
        call,
        "DRIVER_NOT_FOUND",
        -1,
        where=reason,
        hint="install the NVIDIA driver, and egmctl with the extra: pip install 'egmctl[cuda]'",
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The driver's library itself, which the bindings have loaded, for what they do not know or answer wrongly."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


class CudaDriver:
    """`Driver` over ``cuda.bindings``; initialises the driver, and raises DRIVER_NOT_FOUND (-1) where there is none."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise _missing("import cuda.bindings", str(error)) from error
        self._cuda: Any = driver
        self._success = driver.CUresult.CUDA_SUCCESS
        self._lock = threading.Lock()
        self._contexts: dict[int, Any] = {}
        self._batch: Callable[..., int] | None = None
        try:
            (result,) = driver.cuInit(0)
        except RuntimeError as error:  # cuda.pathfinder's DynamicLibNotFoundError is one
            raise _missing("cuInit", str(error)) from error
        self._check("cuInit", result)

    def _check(self, call: str, result: Any) -> None:
        if result != self._success:
            raise CudaError(call, getattr(result, "name", str(result)), int(result))

    def _call(self, call: str, *arguments: Any) -> Any:
        """The value of one driver call, None where it has none."""
        function: Callable[..., tuple[Any, ...]] | None = getattr(self._cuda, call, None)
        if function is None:
            raise CudaError(call, "FUNCTION_NOT_FOUND", -2, hint="update cuda-bindings")
        try:
            result, *values = function(*arguments)
        except RuntimeError as error:  # the bindings know the function, this driver does not
            raise CudaError(
                call, "FUNCTION_NOT_FOUND", -2, where=str(error), hint="update the NVIDIA driver"
            ) from error
        if result != self._success:
            self._check(call, result)
        return values[0] if len(values) == 1 else tuple(values) or None

    # machine

    def version(self) -> int:
        return int(self._call("cuDriverGetVersion"))

    def device_count(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def _device(self, device: int) -> Any:
        return self._call("cuDeviceGet", device)

    def device_name(self, device: int) -> str:
        return bytes(self._call("cuDeviceGetName", 128, self._device(device))).split(b"\0")[0].decode()

    def device_uuid(self, device: int) -> str:
        return f"GPU-{uuid.UUID(bytes=bytes(self._call('cuDeviceGetUuid', self._device(device)).bytes))}"

    def device_bdf(self, device: int) -> str:
        return bytes(self._call("cuDeviceGetPCIBusId", 32, self._device(device))).split(b"\0")[0].decode().lower()

    def attribute(self, device: int, attribute: int) -> int | None:
        handle = self._device(device)
        try:
            number = self._cuda.CUdevice_attribute(attribute)
        except ValueError:
            return self._attribute_by_number(int(handle), attribute)
        try:
            return int(self._call("cuDeviceGetAttribute", number, handle))
        except CudaError as error:
            if error.number == _INVALID_VALUE:
                return None
            raise

    def _attribute_by_number(self, handle: int, attribute: int) -> int | None:
        """For attributes that are newer than the bindings: the library is loaded already, ask it directly."""
        value = ctypes.c_int()
        library = _library()
        if library is None:
            return None
        result = library.cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(attribute), ctypes.c_int(handle))
        return value.value if result == 0 else None

    def memory_info(self, device: int) -> tuple[int, int]:
        self.use_device(device)
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def use_device(self, device: int) -> None:
        context = self._contexts.get(device)
        if context is None:
            with self._lock:
                context = self._contexts.get(device)
                if context is None:
                    context = self._call("cuDevicePrimaryCtxRetain", self._device(device))
                    self._contexts[device] = context
        self._check("cuCtxSetCurrent", *self._cuda.cuCtxSetCurrent(context))

    def current_context(self) -> int:
        return int(self._call("cuCtxGetCurrent") or 0)

    def set_current_context(self, context: int) -> None:
        self._call("cuCtxSetCurrent", context)

    # virtual memory management

    def _location(self, location: Location) -> Any:
        types = self._cuda.CUmemLocationType
        result = self._cuda.CUmemLocation()
        if location.kind == "device":
            result.type = types.CU_MEM_LOCATION_TYPE_DEVICE
        else:
            result.type = types.CU_MEM_LOCATION_TYPE_HOST_NUMA
        result.id = location.id
        return result

    def _prop(self, prop: AllocationProp) -> Any:
        result = self._cuda.CUmemAllocationProp()
        result.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        result.location = self._location(prop.location)
        result.requestedHandleTypes = self._cuda.CUmemAllocationHandleType(int(prop.handle_type))
        if prop.gpu_direct_rdma:
            result.allocFlags.gpuDirectRDMACapable = 1
        return result

    def granularity(self, prop: AllocationProp, recommended: bool = False) -> int:
        options = self._cuda.CUmemAllocationGranularity_flags
        which = (
            options.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED if recommended else options.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        )
        return int(self._call("cuMemGetAllocationGranularity", self._prop(prop), which))

    def mem_create(self, nbytes: int, prop: AllocationProp) -> int:
        return int(self._call("cuMemCreate", nbytes, self._prop(prop), 0))

    def mem_release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def address_reserve(self, nbytes: int, alignment: int = 0, hint: int = 0) -> int:
        return int(self._call("cuMemAddressReserve", nbytes, alignment, hint, 0))

    def address_free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def mem_map(self, address: int, nbytes: int, offset: int, handle: int) -> None:
        self._call("cuMemMap", address, nbytes, offset, handle, 0)

    def mem_unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def set_access(self, address: int, nbytes: int, locations: Sequence[Location]) -> None:
        descriptions = []
        for location in locations:
            description = self._cuda.CUmemAccessDesc()
            description.location = self._location(location)
            description.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            descriptions.append(description)
        self._call("cuMemSetAccess", address, nbytes, descriptions, len(descriptions))

    def _handle_type(self, kind: HandleType) -> Any:
        return self._cuda.CUmemAllocationHandleType(int(kind))

    def export_fd(self, handle: int) -> int:
        fd = int(self._call("cuMemExportToShareableHandle", handle, self._handle_type(HandleType.POSIX_FD), 0))
        os.set_inheritable(fd, False)
        return fd

    def export_fabric(self, handle: int) -> bytes:
        exported = self._call("cuMemExportToShareableHandle", handle, self._handle_type(HandleType.FABRIC), 0)
        return bytes(exported.data)

    def import_fd(self, fd: int) -> int:
        return int(self._call("cuMemImportFromShareableHandle", fd, self._handle_type(HandleType.POSIX_FD)))

    def import_fabric(self, handle: bytes) -> int:
        if len(handle) != 64:
            raise CudaError("cuMemImportFromShareableHandle", "CUDA_ERROR_INVALID_VALUE", _INVALID_VALUE)
        return int(self._call("cuMemImportFromShareableHandle", bytes(handle), self._handle_type(HandleType.FABRIC)))

    # host memory

    def host_register(self, address: int, nbytes: int) -> None:
        self._call("cuMemHostRegister", address, nbytes, _HOST_PORTABLE_MAPPED)

    def host_unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def host_device_pointer(self, address: int) -> int:
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    def host_alloc(self, nbytes: int) -> int:
        return int(self._call("cuMemHostAlloc", nbytes, _HOST_PORTABLE_MAPPED))

    def host_free(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    # device memory and copies

    def mem_alloc(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes))

    def mem_free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def pointer_info(self, address: int) -> PointerInfo:
        kinds = self._cuda.CUpointer_attribute
        try:
            kind = int(self._call("cuPointerGetAttribute", kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address))
        except CudaError as error:
            if error.number == _INVALID_VALUE:
                return PointerInfo(MemoryType.UNREGISTERED)
            raise
        device = None
        if kind == int(self._cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE):
            device = self._ordinal(kinds.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
        start = self._range(kinds.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address)
        size = self._range(kinds.CU_POINTER_ATTRIBUTE_RANGE_SIZE, address)
        return PointerInfo(MemoryType.HOST if device is None else MemoryType.DEVICE, device, start, size)

    def _ordinal(self, attribute: Any, address: int) -> int:
        """The library's own answer: cuda-bindings 13.3.1 said 0 for memory of every GPU of two H200."""
        library = _library()
        if library is None:
            return int(self._call("cuPointerGetAttribute", attribute, address))
        value = ctypes.c_int()
        result = library.cuPointerGetAttribute(
            ctypes.byref(value), ctypes.c_int(int(attribute)), ctypes.c_uint64(address)
        )
        self._check("cuPointerGetAttribute", self._cuda.CUresult(result))
        return value.value

    def _range(self, attribute: Any, address: int) -> int | None:
        try:
            value = self._call("cuPointerGetAttribute", attribute, address)
        except CudaError:
            return None
        return int(value) if value is not None else None

    def stream_create(self) -> int:
        return int(self._call("cuStreamCreate", _STREAM_NON_BLOCKING))

    def stream_destroy(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def stream_synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def event_create(self, timing: bool = False) -> int:
        return int(self._call("cuEventCreate", 0 if timing else _EVENT_DISABLE_TIMING))

    def event_destroy(self, event: int) -> None:
        self._call("cuEventDestroy", event)

    def event_record(self, event: int, stream: int) -> None:
        self._check("cuEventRecord", *self._cuda.cuEventRecord(event, stream))

    def event_query(self, event: int) -> bool:
        (result,) = self._cuda.cuEventQuery(event)
        if result == self._success:
            return True
        if int(result) != _NOT_READY:
            self._check("cuEventQuery", result)
        return False

    def event_synchronize(self, event: int) -> None:
        self._check("cuEventSynchronize", *self._cuda.cuEventSynchronize(event))

    def event_elapsed_ms(self, start: int, end: int) -> float:
        return float(self._call("cuEventElapsedTime", start, end))

    def memcpy(self, destination: int, source: int, nbytes: int) -> None:
        """Done when it returns, which ``cuMemcpy`` between device pointers alone does not promise."""
        self._call("cuMemcpy", destination, source, nbytes)
        self._call("cuStreamSynchronize", 0)

    def memcpy_async(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        (result,) = self._cuda.cuMemcpyAsync(destination, source, nbytes, stream)
        if result != self._success:
            self._check("cuMemcpyAsync", result)

    def memcpy_batch_async(
        self, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        count = len(sizes)
        if not len(destinations) == len(sources) == count:
            raise CudaError("cuMemcpyBatchAsync", "CUDA_ERROR_INVALID_VALUE", _INVALID_VALUE)
        if count == 0:
            return
        if self._batch is None:
            self._batch = self._find_batch()
        columns = [
            each if isinstance(each, array) and each.typecode == "Q" else array("Q", each)
            for each in (destinations, sources, sizes)
        ]
        result = self._batch(*(column.buffer_info()[0] for column in columns), count, stream)
        if result:
            known = self._cuda.CUresult
            name = next((each.name for each in known if int(each) == result), str(result))  # or newer than the bindings
            raise CudaError("cuMemcpyBatchAsync", name, result)

    def _find_batch(self) -> Callable[..., int]:
        """From the library itself: the bindings make an object of each address, which takes as long as the copies."""
        library = _library()
        # CUDA 12's form also tells the index of the copy that failed.
        function = getattr(library, "cuMemcpyBatchAsync_v2", None)
        tells = function is None
        if function is None:
            function = getattr(library, "cuMemcpyBatchAsync", None)
        if function is None:
            raise CudaError("cuMemcpyBatchAsync", "FUNCTION_NOT_FOUND", -2, hint="update the NVIDIA driver")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        function.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, *[pointer] * (1 + tells)]
        attributes = self._cuda.CUmemcpyAttributes()
        attributes.srcAccessOrder = self._cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        attribute, first, failed = int(attributes.getPtr()), (size * 1)(0), size()
        told = (ctypes.byref(failed),) if tells else ()

        def batch(destinations: int, sources: int, sizes: int, count: int, stream: int) -> int:
            result: int = function(destinations, sources, sizes, count, attribute, first, 1, *told, stream)
            return result

        batch.__dict__["keeps"] = attributes
        return batch

    def memset(self, address: int, value: int, nbytes: int) -> None:
        """Done when it returns."""
        self._call("cuMemsetD8", address, value, nbytes)
        self._call("cuStreamSynchronize", 0)
