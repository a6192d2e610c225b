"""The copy kernels on a GPU: compiled by NVRTC through ``cuda.core`` for the device's architecture, launched through
the driver. Import this only where there is a GPU.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

from cuda.bindings import driver as cuda

from egmctl.consumer.copy.jobs import BINS, PAGE_SHIFT, EntryJob, TableJob
from egmctl.consumer.copy.source import ENTRY_POINTS, SOURCE
from egmctl.errors import PreflightError
from egmctl.memory.driver import CudaError, Driver
from egmctl.units import KIB, MIB

__all__ = ["CudaKernels", "KernelError"]

_COMPUTE_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_TABLE_JOB = struct.Struct("=4Q4I")
_ENTRY_JOB = struct.Struct("=6Q5Q2Q5Q8I")
_ORDER_BLOCKS, _ORDER_THREADS = 264, 512  # 0.11 ms for a million entries on H200; other shapes are within 5%
_PIECE = 16 * KIB  # larger entries are shared between groups of lanes
_WINDOW = 64 * MIB  # entries in page order that are under way at one time span about this
_MOST_TILE = 8


class KernelError(PreflightError):
    """The copy kernels cannot be compiled or loaded here."""

    code = "kernel"


def _compile(arch: str) -> bytes:
    try:
        try:
            from cuda.core import Program, ProgramOptions
        except ImportError:  # before 1.0
            from cuda.core.experimental import Program, ProgramOptions
    except ImportError as error:
        raise KernelError(
            f"the copy kernels need cuda.core: {error}", hint="pip install 'egmctl[cuda]', or use strategy engine"
        ) from error
    try:
        program = Program(SOURCE, "c++", ProgramOptions(std="c++17", arch=arch))
        return bytes(program.compile("cubin").code)
    except Exception as error:  # NVRTC's and the loader's own exceptions have no common base
        raise KernelError(
            f"NVRTC cannot compile the copy kernels for {arch}: {error}",
            hint="install NVRTC of the driver's CUDA version (pip install nvidia-cuda-nvrtc), or use strategy engine",
        ) from error


def _check(call: str, result: Any) -> None:
    if int(result) != 0:
        raise CudaError(call, getattr(result, "name", str(result)), int(result))


class _Argument(threading.local):
    """Each thread's place for the one argument of a kernel, and the address of a pointer to it."""

    def __init__(self) -> None:
        size = max(_TABLE_JOB.size, _ENTRY_JOB.size)
        buffer = ctypes.create_string_buffer(size)
        self.packed = memoryview(buffer).cast("B")
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self.pointer = ctypes.addressof(self._pointers)


class CudaKernels:
    """`egmctl.consumer.copy.jobs.Kernels` on GPUs. Compiles once for an architecture, loads once for a device."""

    _cubins: dict[str, bytes] = {}  # noqa: RUF012 - shared by the process on purpose
    _lock = threading.Lock()

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._functions: dict[int, dict[str, Any]] = {}
        self._argument = _Argument()

    def prepare(self, device: int) -> None:
        if device in self._functions:
            return
        major, minor = (self._driver.attribute(device, number) for number in _COMPUTE_CAPABILITY)
        arch = f"sm_{major}{minor}"
        with self._lock:
            cubin = self._cubins.get(arch)
            if cubin is None:
                cubin = self._cubins[arch] = _compile(arch)
        self._driver.use_device(device)
        result, module = cuda.cuModuleLoadData(cubin)
        _check("cuModuleLoadData", result)
        functions = {}
        for name in ENTRY_POINTS:
            result, functions[name] = cuda.cuModuleGetFunction(module, name.encode())
            _check("cuModuleGetFunction", result)
        self._functions[device] = functions

    def copy_table(self, device: int, stream: int, job: TableJob) -> None:
        work = job.rows * job.pieces
        tile = _tile(work, job.blocks, job.threads)
        packed = _TABLE_JOB.pack(
            job.table, job.rows, job.pieces, job.piece_bytes, job.put, _group(job.longest), tile, 0
        )
        self._launch(device, "egm_table", _fit(work, job.blocks, tile), job.threads, packed, stream)

    def gather(self, device: int, stream: int, job: EntryJob) -> None:
        self._entries(device, stream, job, False)

    def scatter(self, device: int, stream: int, job: EntryJob) -> None:
        self._entries(device, stream, job, True)

    def _entries(self, device: int, stream: int, job: EntryJob, put: bool) -> None:
        pieces = -(-job.entry_bytes // _PIECE)
        work = job.entries * pieces
        order = job.order
        tile = _tile(work, job.blocks, job.threads)
        if order is not None:
            # the entries under way should lie on few pages: see the window
            window = max(1, _WINDOW * job.entries // max(1, order.span))
            while tile > 1 and tile * job.blocks * job.threads // 32 > window:
                tile //= 2
        packed = _ENTRY_JOB.pack(
            job.offsets, job.objects, job.ranges, job.range_count, job.only.address, job.only.nbytes,
            job.dense, job.entries, job.entry_bytes, pieces, _PIECE if pieces > 1 else job.entry_bytes,
            job.bad_index, job.bad_flag,
            *(order[:5] if order else (0, 0, 0, 0, 0)),
            _bins(order.span) if order else 1, PAGE_SHIFT,
            job.offset_bytes, job.object_bytes, put, _group(job.entry_bytes), tile, 0,
        )  # fmt: skip
        blocks = _fit(work, job.blocks, tile)
        if order is None:
            self._launch(device, "egm_offsets", blocks, job.threads, packed, stream)
            return
        sorting = min(_ORDER_BLOCKS, -(-job.entries // _ORDER_THREADS))
        self._launch(device, "egm_bin", sorting, _ORDER_THREADS, packed, stream)
        self._launch(device, "egm_place", sorting, _ORDER_THREADS, packed, stream)
        if order.sorted:
            self._launch(device, "egm_sort", _ORDER_BLOCKS, _ORDER_THREADS, packed, stream)
        self._launch(device, "egm_items", blocks, job.threads, packed, stream)

    def _launch(self, device: int, name: str, blocks: int, threads: int, packed: bytes, stream: int) -> None:
        functions = self._functions.get(device)
        if functions is None:
            self.prepare(device)
            functions = self._functions[device]
        argument = self._argument
        argument.packed[: len(packed)] = packed  # copied by the driver before it returns
        (result,) = cuda.cuLaunchKernel(functions[name], blocks, 1, 1, threads, 1, 1, 0, stream, argument.pointer, 0)
        _check(f"cuLaunchKernel({name})", result)


def _group(nbytes: int) -> int:
    """Lanes for one entry: enough for it at 16 bytes a lane, at least 8 (128 bytes: one line)."""
    return 8 if nbytes <= 128 else 16 if nbytes <= 256 else 32


def _tile(work: int, blocks: int, threads: int) -> int:
    """Pieces of work that a warp looks up at once: as many as leave every warp some, a power of two."""
    each = work * 32 // (blocks * threads)
    return min(_MOST_TILE, 1 << max(0, each.bit_length() - 1)) if each else 1


def _fit(work: int, blocks: int, tile: int) -> int:
    """No block without work: tiles go round the blocks before a block's second warp gets one."""
    return max(1, min(blocks, -(-work // tile)))


def _bins(span: int) -> int:
    """A power of two, at least the pages of the span, at most BINS."""
    pages = max(1, span >> PAGE_SHIFT)
    return min(BINS, 1 << (pages - 1).bit_length())
