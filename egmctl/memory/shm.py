"""Memory kind ``shm``: a sealed, fully allocated memfd per chunk, on its NUMA node, handed out as a descriptor."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from egmctl.errors import EgmError, FailedError, PreflightError
from egmctl.memory import linux
from egmctl.memory.base import Chunk, ChunkSpec, MemoryKind, ReleaseError, Share
from egmctl.steps import step
from egmctl.units import MIB, format_size

__all__ = ["ADDRESS_ALIGNMENT", "POPULATE_PIECE", "ShmChunk", "ShmProvider"]

ADDRESS_ALIGNMENT = 16 * MIB
"""Mooncake's slab: its ``cachelib`` allocator takes only multiples of it as bases."""

POPULATE_PIECE = 256 * MIB
"""Bytes populated in one system call, and so between two calls of ``progress``."""

_SAMPLES = 1024
"""Pages of a chunk whose node is looked at afterwards."""

_DENIED = (errno.EPERM, errno.ENOSYS, errno.EACCES)


def _where(spec: ChunkSpec) -> str:
    return f"chunk {spec.index}, NUMA node {spec.numa_node}"


class ShmChunk:
    """One chunk: the descriptor, and its mapping inside the pool's reserved range."""

    def __init__(self, spec: ChunkSpec, address: int, huge_page_bytes: int) -> None:
        self._spec = spec
        self._address = address
        self._huge_page_bytes = huge_page_bytes
        self._fd: int | None = None
        self._mapped = False
        self._whole = False

    @property
    def spec(self) -> ChunkSpec:
        return self._spec

    @property
    def address(self) -> int:
        return self._address

    def __repr__(self) -> str:
        return f"ShmChunk({_where(self._spec)}, {format_size(self._spec.nbytes)} at {self._address:#x})"

    def share(self) -> Share:
        if self._fd is None or not self._whole:
            raise FailedError("the chunk is released", where=_where(self._spec))
        duplicate = os.dup(self._fd)  # close-on-exec, as Python's descriptors are
        return Share("shm", self._spec.numa_node, self._spec.nbytes, fd=duplicate)

    def host_view(self) -> memoryview:
        if not self._mapped or not self._whole:
            raise FailedError("the chunk is released", where=_where(self._spec))
        return linux.view(self._address, self._spec.nbytes)

    def _build(self, progress: Callable[[int], None], warn: Callable[[str], None]) -> None:
        spec, where = self._spec, _where(self._spec)
        try:
            with step("memory.shm.file", chunk=spec.index):
                self._fd = linux.memfd(f"egm-chunk-{spec.index}", spec.nbytes, self._huge_page_bytes)
            with step("memory.shm.map", chunk=spec.index):
                linux.map_file(self._fd, spec.nbytes, over=self._address)
                self._mapped = True
            self._bind(warn)
            done = 0
            while done < spec.nbytes:
                piece = min(POPULATE_PIECE, spec.nbytes - done)
                with step("memory.shm.populate", chunk=spec.index, offset=done):
                    linux.populate(self._address + done, piece, self._fd, done)
                done += piece
                progress(done)
            with step("memory.shm.seal", chunk=spec.index):
                linux.seal(self._fd)
        except OSError as error:
            raise self._explain(error, where) from error
        self._check_placement(warn)
        self._whole = True

    def _bind(self, warn: Callable[[str], None]) -> None:
        spec = self._spec
        try:
            with step("memory.shm.bind", chunk=spec.index):
                linux.set_node(self._address, spec.nbytes, spec.numa_node)
        except OSError as error:
            if error.errno in _DENIED:
                warn(_binding_denied(error))
            elif error.errno == errno.EINVAL:
                raise PreflightError(
                    f"mbind: EINVAL ({errno.EINVAL}): this process may not take memory from NUMA node {spec.numa_node}",
                    where=_where(spec),
                    hint="see `egmctl topology` for the nodes that are online and allowed by the cpuset",
                ) from error
            else:
                raise

    def _check_placement(self, warn: Callable[[str], None]) -> None:
        spec = self._spec
        page = self._huge_page_bytes or linux.page_size()
        pages = spec.nbytes // page
        count = min(pages, _SAMPLES)
        samples = [self._address + (k * (pages - 1) // max(count - 1, 1)) * page for k in range(count)]
        try:
            with step("memory.shm.placement", chunk=spec.index):
                nodes = linux.page_nodes(samples)
        except OSError as error:
            if len(linux.online_nodes()) > 1:
                warn(f"where the pages of the chunks lie could not be checked ({error.strerror})")
            return
        wrong = [node for node in nodes if node != spec.numa_node and node != -errno.ENOENT]
        if wrong:
            seen = ", ".join(f"{wrong.count(node)} on node {node}" for node in sorted(set(wrong)))
            raise FailedError(
                f"{len(wrong)} of {count} sampled pages are not on NUMA node {spec.numa_node}: {seen}",
                where=_where(spec),
                hint="a foreign policy or a swapped-out page moved them; free memory on the node and provision again",
                facts={"sampled": count, "misplaced": len(wrong), "nodes": sorted(set(wrong))},
            )

    def _explain(self, error: OSError, where: str) -> EgmError:
        name = errno.errorcode.get(error.errno or 0, "?")
        message = f"{error.strerror or error} ({name}, {error.errno})"
        if self._huge_page_bytes and error.errno in (errno.ENOMEM, errno.EFAULT, errno.ENOSPC):
            return FailedError(
                f"not enough free huge pages: {message}",
                where=where,
                hint=_huge_page_hint(self._huge_page_bytes, self._spec.numa_node, self._spec.nbytes),
            )
        if error.errno in (errno.ENOMEM, errno.EFAULT, errno.ENOSPC):
            hint = "free memory on this node, or plan a smaller capacity"
        elif error.errno in (errno.EMFILE, errno.ENFILE):
            hint = "raise the limit of open files (ulimit -n), or plan larger chunks"
        elif self._huge_page_bytes and error.errno in (errno.EINVAL, errno.ENODEV):
            hint = f"this kernel has no huge pages of {format_size(self._huge_page_bytes)}; set huge_pages = false"
        else:
            hint = "see the agent's log"
        return FailedError(f"allocating {format_size(self._spec.nbytes)}: {message}", where=where, hint=hint)

    def _dismantle(self) -> None:
        """The reverse, each part once: what fails stays ours, and is tried again the next time."""
        self._whole = False
        try:
            if self._mapped:
                with step("memory.shm.unmap", chunk=self._spec.index):
                    linux.reserve_over(self._address, self._spec.nbytes)
                    self._mapped = False
            if self._fd is not None:
                with step("memory.shm.close", chunk=self._spec.index):
                    fd, self._fd = self._fd, None
                    os.close(fd)
        except OSError as error:
            raise ReleaseError(
                f"releasing the memory: {error.strerror or error} ({errno.errorcode.get(error.errno or 0, '?')})",
                where=_where(self._spec),
                hint="run teardown again",
            ) from error


def _binding_denied(error: OSError) -> str:
    """The warning for a machine with one node; with several it is refused."""
    if len(linux.online_nodes()) > 1:
        raise PreflightError(
            f"memory cannot be bound to NUMA nodes here: {error.strerror} ({error.errno})",
            where="mbind",
            hint="allow mbind: in a container add the capability SYS_NICE, or a seccomp profile that permits mbind",
            facts={"errno": error.errno, "nodes": linux.online_nodes()},
        ) from error
    return f"mbind is denied here ({error.strerror}); with one NUMA node the memory lies there anyway"


def _huge_page_hint(page_bytes: int, node: int, nbytes: int) -> str:
    missing = max(-(-nbytes // page_bytes) - linux.free_huge_pages(page_bytes, node), 0)
    wanted = linux.reserved_huge_pages(page_bytes, node) + missing
    folder = f"/sys/devices/system/node/node{node}/hugepages/hugepages-{page_bytes // 1024}kB"
    return f"reserve {missing} more: echo {wanted} > {folder}/nr_hugepages; or set huge_pages = false"


class ShmProvider:
    """`ProviderMemory` for ``shm``. ``warnings`` holds, once each, what a person should know of this machine.

    Addresses come from one reservation for the whole pool, handed out upwards and never twice; chunks created beyond
    ``total_bytes`` (one released and made anew) get a further reservation.
    """

    kind: MemoryKind = "shm"

    def __init__(self, total_bytes: int, *, huge_page_bytes: int = 0, address_hint: int | None = None) -> None:
        if huge_page_bytes and huge_page_bytes not in linux.huge_page_sizes():
            offered = ", ".join(format_size(size) for size in linux.huge_page_sizes()) or "none"
            raise PreflightError(
                f"this kernel has no huge pages of {format_size(huge_page_bytes)} (it has: {offered})",
                where="huge_pages",
                hint="set huge_pages to a size it has, or to false",
            )
        self.warnings: list[str] = []
        self._huge_page_bytes = huge_page_bytes
        self._alignment = max(ADDRESS_ALIGNMENT, huge_page_bytes)
        self._chunks: list[ShmChunk] = []
        self._ranges: list[tuple[int, int]] = []
        self._next = self._end = 0
        self._reserve(max(total_bytes, self._alignment), address_hint)

    def granularity(self, numa_node: int) -> int:
        return self._huge_page_bytes or linux.page_size()

    def preflight(self, specs: Sequence[ChunkSpec]) -> None:
        """Refuse, before anything is allocated, what is known not to work: `PreflightError` with the remedy."""
        for node in sorted({spec.numa_node for spec in specs}):
            wanted = sum(spec.nbytes for spec in specs if spec.numa_node == node)
            self._check_huge_pages(node, wanted)
            self._check_binding(node)

    def _check_huge_pages(self, node: int, wanted: int) -> None:
        page = self._huge_page_bytes
        if page and linux.free_huge_pages(page, node) * page < wanted:
            raise PreflightError(
                f"{-(-wanted // page)} huge pages of {format_size(page)} are wanted,"
                f" {linux.free_huge_pages(page, node)} are free",
                where=f"NUMA node {node}",
                hint=_huge_page_hint(page, node, wanted),
            )

    def _check_binding(self, node: int) -> None:
        address = linux.reserve(linux.page_size(), linux.page_size())
        try:
            linux.set_node(address, linux.page_size(), node)
        except OSError as error:
            if error.errno not in _DENIED:
                raise PreflightError(
                    f"mbind to NUMA node {node}: {error.strerror} ({error.errno})",
                    where=f"NUMA node {node}",
                    hint="see `egmctl topology` for the nodes that are online and allowed by the cpuset",
                ) from error
            self._warn(_binding_denied(error))
        finally:
            linux.unmap(address, linux.page_size())

    def create(self, spec: ChunkSpec, progress: Callable[[int], None]) -> Chunk:
        if spec.nbytes <= 0 or spec.nbytes % self.granularity(spec.numa_node):
            raise FailedError(
                f"{spec.nbytes} bytes are not a multiple of the page size {self.granularity(spec.numa_node)}",
                where=_where(spec),
                hint="make the plan anew",
            )
        chunk = ShmChunk(spec, self._take(spec.nbytes), self._huge_page_bytes)
        self._chunks.append(chunk)
        try:
            chunk._build(progress, self._warn)
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
        """The chunks behind `owned`, for a release of what a failed create or release has left."""
        return list(self._chunks)

    def close(self) -> None:
        if self._chunks:
            raise ReleaseError(
                f"{len(self._chunks)} chunks still exist", where="address range", hint="release the chunks first"
            )
        try:
            while self._ranges:
                with step("memory.shm.unreserve"):
                    linux.unmap(*self._ranges[-1])
                    self._ranges.pop()
        except OSError as error:
            raise ReleaseError(f"giving the address range back: {error}", where="address range") from error
        self._next = self._end = 0

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def _reserve(self, nbytes: int, hint: int | None = None) -> None:
        nbytes = -(-nbytes // self._alignment) * self._alignment
        try:
            with step("memory.shm.reserve", nbytes=nbytes):
                self._next = linux.reserve(nbytes, self._alignment, hint)
                self._end = self._next + nbytes
                self._ranges.append((self._next, nbytes))
        except OSError as error:
            raise FailedError(
                f"reserving {format_size(nbytes)} of addresses: {error.strerror or error}",
                where=f"address {hint:#x}" if hint is not None else "address range",
                hint="raise the limit of address space (ulimit -v), or plan a smaller capacity",
            ) from error

    def _take(self, nbytes: int) -> int:
        size = -(-nbytes // self._alignment) * self._alignment
        if self._next + size > self._end:
            self._reserve(size)
        address = self._next
        self._next += size
        return address
