"""The door to Linux for memory: mmap, NUMA policy, populating and sealing, each an `OSError` with its errno on failure.

Python's own `mmap` neither takes an address nor keeps a range reserved, and nothing in it knows NUMA; hence libc. Calls
through `ctypes.CDLL` let other threads run. Numbers are from the kernel's uapi headers (x86-64 and aarch64).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap as _mmap
import os
import platform
import random
from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "SEALS",
    "file_seals",
    "huge_page_sizes",
    "free_huge_pages",
    "map_file",
    "memfd",
    "online_nodes",
    "page_nodes",
    "page_size",
    "populate",
    "reserve",
    "reserve_over",
    "reserved_huge_pages",
    "seal",
    "set_node",
    "unlikely_address",
    "unmap",
    "view",
    "writable_ranges",
]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long

_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 0x01, 0x02, 0x10, 0x20
_MAP_NORESERVE = 0x4000
_MAP_FIXED_NOREPLACE = 0x100000
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MPOL_BIND = 2
_MFD_NOEXEC_SEAL = 0x0008  # Linux 6.3
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAX_NODES = 1024

# asm/unistd_64.h and asm-generic/unistd.h
_SYSCALLS = {
    "mbind": {"x86_64": 237, "aarch64": 235},
    "move_pages": {"x86_64": 279, "aarch64": 239},
}

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _fail(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def _syscall(call: str, *arguments: object) -> int:
    number = _SYSCALLS[call].get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"{call}: no system call number known for {platform.machine()}")
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise _fail(call)
    return result


def page_size() -> int:
    """Bytes of a normal page."""
    return _mmap.PAGESIZE


def online_nodes() -> list[int]:
    """NUMA nodes that are online; ``[0]`` where the kernel says nothing of NUMA."""
    try:
        text = Path("/sys/devices/system/node/online").read_text(encoding="ascii")
    except OSError:
        return [0]
    nodes: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        nodes.extend(range(int(first), int(last or first) + 1))
    return nodes or [0]


def huge_page_sizes() -> list[int]:
    """Bytes of each huge page size this kernel offers, smallest first."""
    sizes = []
    for folder in Path("/sys/kernel/mm/hugepages").glob("hugepages-*kB"):
        sizes.append(int(folder.name[len("hugepages-") : -len("kB")]) * 1024)
    return sorted(sizes)


def free_huge_pages(page_bytes: int, node: int) -> int:
    """Free huge pages of one size on one node."""
    return _huge_pages(page_bytes, node, "free_hugepages")


def reserved_huge_pages(page_bytes: int, node: int) -> int:
    """Huge pages of one size that one node has, used ones included."""
    return _huge_pages(page_bytes, node, "nr_hugepages")


def _huge_pages(page_bytes: int, node: int, name: str) -> int:
    for folder in (f"/sys/devices/system/node/node{node}/hugepages", "/sys/kernel/mm/hugepages"):
        try:
            return int(Path(folder, f"hugepages-{page_bytes // 1024}kB", name).read_text(encoding="ascii"))
        except OSError:
            continue
    return 0


def memfd(name: str, nbytes: int, huge_page_bytes: int = 0) -> int:
    """A sealable, close-on-exec file in memory of ``nbytes``, with huge pages of one size when asked."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge_page_bytes:
        flags |= os.MFD_HUGETLB | (huge_page_bytes.bit_length() - 1) << os.MFD_HUGE_SHIFT
    try:
        fd = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel that does not know the flag
            raise
        fd = os.memfd_create(name, flags)
    try:
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def seal(fd: int) -> None:
    """Nobody may shrink, grow or unseal the file from now on."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)


def file_seals(fd: int) -> int:
    """The seals of a file; 0 for one that cannot have any."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return 0
        raise


def _mmap_call(address: int, nbytes: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if result == _MAP_FAILED or result is None:
        raise _fail("mmap")
    return int(result)


def _mmap_exactly(address: int, nbytes: int, protection: int, flags: int, fd: int) -> int:
    result = _mmap_call(address, nbytes, protection, flags | _MAP_FIXED_NOREPLACE, fd)
    if result != address:  # before Linux 4.17 the flag is only a hint
        unmap(result, nbytes)
        raise OSError(errno.EEXIST, f"mmap: {os.strerror(errno.EEXIST)}")
    return result


def reserve(nbytes: int, alignment: int, hint: int | None = None) -> int:
    """An aligned range of addresses that nothing can be mapped into by accident; no memory.

    With ``hint`` exactly there, or `OSError` (EEXIST when taken). Without, somewhere random in [2^44, 2^46), so that
    two incarnations of an agent practically never share an address; failing that, where the kernel likes.
    """
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    if hint is not None:
        return _mmap_exactly(hint, nbytes, _PROT_NONE, flags, -1)
    for _ in range(8):
        wish = unlikely_address(alignment)
        try:
            return _mmap_exactly(wish, nbytes, _PROT_NONE, flags, -1)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOMEM, errno.EINVAL):
                raise
    start = _mmap_call(0, nbytes + alignment, _PROT_NONE, flags, -1)
    address = -(-start // alignment) * alignment
    if address > start:
        unmap(start, address - start)
    rest = start + nbytes + alignment - (address + nbytes)
    if rest:
        unmap(address + nbytes, rest)
    return address


def unlikely_address(alignment: int) -> int:
    """Somewhere random in [2^44, 2^46), where neither programs, libraries nor drivers go by themselves."""
    wish = random.SystemRandom().randrange(1 << 44, 1 << 46)
    return wish - wish % alignment


def reserve_over(address: int, nbytes: int) -> None:
    """Replace what is mapped in a range of ours by a bare reservation, in one act: nothing can slip in between."""
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    _mmap_call(address, nbytes, _PROT_NONE, flags, -1)


def map_file(fd: int, nbytes: int, *, over: int | None = None, exactly: int | None = None) -> int:
    """Map a file shared, readable and writable: over a reservation of ours, exactly at a free address, or anywhere.

    A core dump leaves it out: it may be hundreds of GiB, and other people's data.
    """
    if over is not None:
        address = _mmap_call(over, nbytes, _PROT_READ_WRITE, _MAP_SHARED | _MAP_FIXED, fd)
    elif exactly is not None:
        address = _mmap_exactly(exactly, nbytes, _PROT_READ_WRITE, _MAP_SHARED, fd)
    else:
        address = _mmap_call(0, nbytes, _PROT_READ_WRITE, _MAP_SHARED, fd)
    _libc.madvise(address, nbytes, _MADV_DONTDUMP)  # a kernel that cannot is no reason to fail
    return address


def unmap(address: int, nbytes: int) -> None:
    if _libc.munmap(address, nbytes) != 0:
        raise _fail("munmap")


def _mask(node: int) -> ctypes.Array[ctypes.c_ulong]:
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MAX_NODES // bits))()
    mask[node // bits] = 1 << node % bits
    return mask


def set_node(address: int, nbytes: int, node: int) -> None:
    """Pages of this range come from ``node`` alone (MPOL_BIND). The policy belongs to the file behind the mapping."""
    if not 0 <= node < _MAX_NODES:
        raise OSError(errno.EINVAL, f"mbind: no such NUMA node: {node}")
    arguments = (
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_BIND),
        _mask(node),
        ctypes.c_ulong(_MAX_NODES + 1),  # the kernel counts one bit fewer than it is told
        ctypes.c_uint(0),
    )
    _syscall("mbind", *arguments)


def page_nodes(addresses: Sequence[int]) -> list[int]:
    """The node of the page at each address; a negative errno where there is none (-2: not there yet)."""
    count = len(addresses)
    pages = (ctypes.c_void_p * count)(*addresses)
    status = (ctypes.c_int * count)()
    _syscall(
        "move_pages",
        ctypes.c_int(0),
        ctypes.c_ulong(count),
        pages,
        ctypes.c_void_p(0),
        status,
        ctypes.c_int(0),
    )
    return list(status)


_populate_write = True


def populate(address: int, nbytes: int, fd: int, offset: int) -> None:
    """Give every page of this range of a mapped file its memory, or fail with `OSError`: never a signal.

    ``MADV_POPULATE_WRITE`` reports what a touch would die of (EFAULT for SIGBUS); kernels before 5.14 allocate through
    the file, where the mapping's policy holds as well.
    """
    global _populate_write
    while _populate_write:
        if _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
            return
        number = ctypes.get_errno()
        if number in (errno.EINTR, errno.EAGAIN):
            continue
        if number != errno.EINVAL:
            raise OSError(number, f"madvise(MADV_POPULATE_WRITE): {os.strerror(number)}")
        _populate_write = False
    os.posix_fallocate(fd, offset, nbytes)


def writable_ranges() -> list[tuple[int, int]]:
    """(start, end) of what this process may read and write, in ascending order."""
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, access, _ = line.split(None, 2)
            if access.startswith("rw"):
                start, _, end = span.partition("-")
                found.append((int(start, 16), int(end, 16)))
    return found


def view(address: int, nbytes: int) -> memoryview:
    """The bytes at an address, without a copy; valid only while they are mapped."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
