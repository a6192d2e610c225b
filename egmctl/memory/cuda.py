"""Memory kinds ``cuda-fabric`` and ``cuda-posix``: pinned DRAM on a NUMA node through the driver's VMM calls.

Base and length of everything are our own record: the driver's ``cuMemGetAddressRange`` does not answer for HOST_NUMA
memory everywhere. None of these calls needs a CUDA context, so an agent takes no GPU memory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from egmctl.errors import FailedError, PreflightError
from egmctl.memory import linux
from egmctl.memory.base import Chunk, ChunkSpec, MemoryKind, ReleaseError, Share
from egmctl.memory.driver import AllocationProp, Attribute, CudaError, Driver, HandleType, Location, get_driver
from egmctl.steps import step
from egmctl.units import MIB, format_size

__all__ = ["ADDRESS_ALIGNMENT", "CudaChunk", "CudaProvider", "driver_or_refuse", "explained", "releasing"]

ADDRESS_ALIGNMENT = 16 * MIB
"""Mooncake's slab: its ``cachelib`` allocator takes only multiples of it as bases."""

_HANDLE_TYPES: dict[str, HandleType] = {"cuda-fabric": HandleType.FABRIC, "cuda-posix": HandleType.POSIX_FD}
_INVALID_VALUE, _OUT_OF_MEMORY, _NO_DEVICE, _INVALID_DEVICE = 1, 2, 100, 101
_NOT_PERMITTED, _NOT_SUPPORTED = 800, 801
_OFFERS = 256


def driver_or_refuse(kind: str) -> Driver:
    """The driver, or `PreflightError` where there is none or no GPU: this machine cannot have that kind."""
    try:
        driver = get_driver()
        if driver.device_count() > 0:
            return driver
        raise CudaError("cuDeviceGetCount", "CUDA_ERROR_NO_DEVICE", _NO_DEVICE)
    except CudaError as error:
        raise PreflightError(
            error.message,
            where=f"memory kind {kind}",
            hint=error.hint or _no_gpu_hint(error),
            facts=error.facts,
        ) from error


def _no_gpu_hint(error: CudaError) -> str:
    if error.number == _NO_DEVICE:
        return (
            'make a GPU visible to this process (CUDA_VISIBLE_DEVICES, the container\'s devices), or use memory = "shm"'
        )
    return 'see what nvidia-smi says of the driver, or use memory = "shm"'


def _where(spec: ChunkSpec) -> str:
    return f"chunk {spec.index}, NUMA node {spec.numa_node}"


def _hint(error: CudaError, kind: str) -> str:
    if error.number == _NOT_PERMITTED and kind == "cuda-fabric":
        return "this process can open no IMEX channel; `egmctl doctor --for cuda-fabric` says which and how to make one"
    if error.number == _OUT_OF_MEMORY:
        return "free memory on this node, or plan a smaller capacity"
    if error.number in (_INVALID_VALUE, _INVALID_DEVICE, _NOT_SUPPORTED):
        return f"this driver gives no {kind} memory there; see `egmctl doctor --for {kind}`"
    return error.hint or f"see `egmctl doctor --for {kind}`"


@contextmanager
def explained(where: str, kind: str) -> Iterator[None]:
    """Errors of the driver, with the place and a hint."""
    try:
        yield
    except CudaError as error:
        raise CudaError(error.call, error.name, error.number, where=where, hint=_hint(error, kind)) from error


@contextmanager
def releasing(where: str) -> Iterator[None]:
    """Whatever goes wrong in a release leaves the rest owned."""
    try:
        yield
    except CudaError as error:
        raise ReleaseError(
            f"releasing the memory: {error.message}", where=where, hint="run teardown again", facts=error.facts
        ) from error
    except OSError as error:
        raise ReleaseError(
            f"releasing the memory: {error.strerror or error} ({errno.errorcode.get(error.errno or 0, '?')})",
            where=where,
            hint="run teardown again",
        ) from error


class CudaChunk:
    """One chunk: its allocation handle, its mapping, and the one thing that was exported of it."""

    def __init__(self, driver: Driver, kind: MemoryKind, spec: ChunkSpec, address: int) -> None:
        self._driver = driver
        self._kind = kind
        self._spec = spec
        self._address = address
        self._handle: int | None = None
        self._mapped = False
        self._fd: int | None = None
        self._fabric: bytes | None = None
        self._whole = False

    @property
    def spec(self) -> ChunkSpec:
        return self._spec

    @property
    def address(self) -> int:
        return self._address

    def __repr__(self) -> str:
        return f"CudaChunk({self._kind}, {_where(self._spec)}, {format_size(self._spec.nbytes)} at {self._address:#x})"

    def share(self) -> Share:
        if not self._whole:
            raise FailedError("the chunk is released", where=_where(self._spec))
        fd = os.dup(self._fd) if self._fd is not None else None
        return Share(self._kind, self._spec.numa_node, self._spec.nbytes, fd=fd, fabric=self._fabric)

    def host_view(self) -> memoryview:
        if not self._whole:
            raise FailedError("the chunk is released", where=_where(self._spec))
        return linux.view(self._address, self._spec.nbytes)

    def _build(
        self, allocate: Callable[[ChunkSpec], int], access: Sequence[Location], progress: Callable[[int], None]
    ) -> None:
        spec, driver = self._spec, self._driver
        with explained(_where(spec), self._kind):
            with step("memory.cuda.create", chunk=spec.index):
                handle = self._handle = allocate(spec)
            with step("memory.cuda.map", chunk=spec.index):
                driver.mem_map(self._address, spec.nbytes, 0, handle)
                self._mapped = True
            with step("memory.cuda.access", chunk=spec.index):
                driver.set_access(self._address, spec.nbytes, access)
            with step("memory.cuda.export", chunk=spec.index):
                if self._kind == "cuda-fabric":
                    self._fabric = driver.export_fabric(handle)
                else:
                    self._fd = driver.export_fd(handle)
        self._whole = True
        progress(spec.nbytes)

    def _dismantle(self) -> None:
        """The reverse, each part once: what fails stays ours, and is tried again the next time."""
        spec = self._spec
        self._whole, self._fabric = False, None
        with releasing(_where(spec)):
            if self._fd is not None:
                with step("memory.cuda.close", chunk=spec.index):
                    fd, self._fd = self._fd, None
                    os.close(fd)
            if self._mapped:
                with step("memory.cuda.unmap", chunk=spec.index):
                    self._driver.mem_unmap(self._address, spec.nbytes)
                    self._mapped = False
            if self._handle is not None:
                with step("memory.cuda.release", chunk=spec.index):
                    self._driver.mem_release(self._handle)
                    self._handle = None


class CudaProvider:
    """`ProviderMemory` for the CUDA kinds; the GPUs in ``devices`` (all visible ones when None) get access.

    Addresses come from one reservation for the whole pool, made by the first chunk, handed out upwards and never
    twice; chunks created beyond ``total_bytes`` (one released and made anew) get a further reservation. Left to
    itself the driver gives every fresh process the same address; ``avoid`` are ranges to stay away from.
    """

    def __init__(
        self,
        kind: MemoryKind,
        total_bytes: int,
        *,
        address_hint: int | None = None,
        devices: Sequence[int] | None = None,
        avoid: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.kind: MemoryKind = kind
        self.warnings: list[str] = []
        self._driver = driver_or_refuse(kind)
        with explained(f"memory kind {kind}", kind):
            self._devices = tuple(range(self._driver.device_count()) if devices is None else devices)
            flag = Attribute.GPU_DIRECT_RDMA_WITH_CUDA_VMM
            self._rdma = all(self._driver.attribute(device, flag) == 1 for device in self._devices)
        self._total_bytes = total_bytes
        self._hint = address_hint
        self._avoid = tuple(avoid)
        self._chunks: list[CudaChunk] = []
        self._ranges: list[tuple[int, int]] = []
        self._next = self._end = 0

    def granularity(self, numa_node: int) -> int:
        with explained(f"NUMA node {numa_node}", self.kind):
            return self._driver.granularity(self._prop(numa_node))

    def preflight(self, specs: Sequence[ChunkSpec]) -> None:
        """Sizes against the granularity of each node; `egmctl.checks.preflight` has tried whether there is any."""
        for spec in specs:
            self._fitting(spec)

    def _fitting(self, spec: ChunkSpec) -> int:
        """The granularity on the chunk's node, of which the chunk is a multiple."""
        granularity = self.granularity(spec.numa_node)
        if spec.nbytes <= 0 or spec.nbytes % granularity:
            raise FailedError(
                f"{spec.nbytes} bytes are not a multiple of the granularity {granularity}",
                where=_where(spec),
                hint="make the plan anew",
            )
        return granularity

    def create(self, spec: ChunkSpec, progress: Callable[[int], None]) -> Chunk:
        granularity = self._fitting(spec)
        chunk = CudaChunk(self._driver, self.kind, spec, self._take(spec.nbytes, granularity))
        self._chunks.append(chunk)
        access = [Location("device", device) for device in self._devices]
        access.append(Location("host_numa", spec.numa_node))
        try:
            chunk._build(self._allocate, access, progress)
        except BaseException:
            self.release(chunk)  # raises ReleaseError, with the first failure as its context, when it cannot
            raise
        return chunk

    def release(self, chunk: Chunk) -> None:
        mine = next((one for one in self._chunks if one is chunk), None)
        if mine is not None:
            mine._dismantle()
            self._chunks.remove(mine)

    def owned(self) -> list[ChunkSpec]:
        return [chunk.spec for chunk in self._chunks]

    def chunks(self) -> list[Chunk]:
        return list(self._chunks)

    def close(self) -> None:
        if self._chunks:
            raise ReleaseError(
                f"{len(self._chunks)} chunks still exist", where="address range", hint="release the chunks first"
            )
        with releasing("address range"):
            while self._ranges:
                with step("memory.cuda.unreserve"):
                    self._driver.address_free(*self._ranges[-1])
                    self._ranges.pop()
        self._next = self._end = 0

    def _prop(self, node: int, rdma: bool = False) -> AllocationProp:
        return AllocationProp(Location("host_numa", node), _HANDLE_TYPES[self.kind], gpu_direct_rdma=rdma)

    def _allocate(self, spec: ChunkSpec) -> int:
        """With the GPU-direct-RDMA flag where the driver takes it, which the attribute alone does not say: on H200
        it is 1, and HOST_NUMA memory with the flag is CUDA_ERROR_INVALID_VALUE."""
        if self._rdma:
            try:
                return self._driver.mem_create(spec.nbytes, self._prop(spec.numa_node, rdma=True))
            except CudaError as error:
                if error.number not in (_INVALID_VALUE, _NOT_SUPPORTED):
                    raise
                self._rdma = False
        return self._driver.mem_create(spec.nbytes, self._prop(spec.numa_node))

    def _take(self, nbytes: int, granularity: int) -> int:
        alignment = max(ADDRESS_ALIGNMENT, granularity)
        size = -(-nbytes // alignment) * alignment
        if self._next + size > self._end:
            first = not self._ranges
            wanted = max(size, -(-self._total_bytes // alignment) * alignment if first else 0)
            with explained("address range", self.kind):
                self._next = self._reserve(wanted, alignment, self._hint if first else None)
                self._end = self._next + wanted
        address = self._next
        self._next += size
        return address

    def _reserve(self, nbytes: int, alignment: int, hint: int | None) -> int:
        if hint is None and self._avoid:
            return self._reserve_elsewhere(nbytes, alignment)
        with step("memory.cuda.reserve", nbytes=nbytes):
            address = self._driver.address_reserve(nbytes, alignment, hint or 0)
            self._ranges.append((address, nbytes))
        if hint is not None and address != hint:
            self.close()
            raise FailedError(f"the driver gave {address:#x} instead", where=f"address {hint:#x}")
        return address

    def _reserve_elsewhere(self, nbytes: int, alignment: int) -> int:
        """Beyond all that is to be avoided; where the driver does not go there when asked, it is given no other choice
        by holding on to what it offers."""
        end = max(end for _, end in self._avoid)
        wish = -(-end // alignment) * alignment
        offered: list[tuple[int, int]] = []
        try:
            for _ in range(_OFFERS):
                with step("memory.cuda.reserve_elsewhere", nbytes=nbytes):
                    address = self._driver.address_reserve(nbytes, alignment, wish)
                    self._ranges.append((address, nbytes))
                if all(stop <= address or address + nbytes <= start for start, stop in self._avoid):
                    return address
                offered.append((address, nbytes))
        finally:
            for one in offered:
                with step("memory.cuda.unreserve_offer"):
                    self._driver.address_free(*one)
                    self._ranges.remove(one)
        raise PreflightError(
            f"the driver offers only addresses that were published before under the same endpoint ({_OFFERS} tries)",
            where=f"memory kind {self.kind}",
            hint="give local_hostname another port, or none",
        )
