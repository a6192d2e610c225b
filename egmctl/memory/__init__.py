"""Memory of every kind behind one interface; the only code that calls CUDA VMM or mmap."""

from __future__ import annotations

from collections.abc import Sequence

from egmctl.errors import FailedError
from egmctl.memory.base import Chunk, ChunkSpec, Mapping, MemoryKind, ProviderMemory, ReleaseError, Share

__all__ = [
    "Chunk",
    "ChunkSpec",
    "Mapping",
    "MemoryKind",
    "ProviderMemory",
    "ReleaseError",
    "Share",
    "import_share",
    "provider_memory",
]


def provider_memory(
    kind: MemoryKind,
    *,
    total_bytes: int,
    huge_page_bytes: int = 0,
    address_hint: int | None = None,
    devices: Sequence[int] | None = None,
    avoid: Sequence[tuple[int, int]] = (),
) -> ProviderMemory:
    """The provider's end of a memory kind, with addresses for ``total_bytes`` reserved and nothing allocated.

    ``huge_page_bytes`` (``shm`` only) is the huge page size to use, 0 for normal pages. ``address_hint`` forces the
    start of the range. ``devices`` are the GPUs that get access (CUDA kinds), all visible ones when None. ``avoid`` are
    ranges, (start, end), in which no chunk may lie (CUDA kinds).
    """
    if kind == "shm":
        from egmctl.memory.shm import ShmProvider

        return ShmProvider(total_bytes, huge_page_bytes=huge_page_bytes, address_hint=address_hint)
    from egmctl.memory.cuda import CudaProvider

    return CudaProvider(kind, total_bytes, address_hint=address_hint, devices=devices, avoid=avoid)


def import_share(share: Share, *, devices: Sequence[int], address: int | None = None) -> Mapping:
    """Map a chunk that another process shared. ``devices`` are ordinals that get access, ``[]`` for the CPU alone.

    A descriptor in ``share`` stays the caller's, who closes it afterwards. ``address`` forces the place (`FailedError`
    when it is taken). The calling thread's current CUDA context is the last device's afterwards.
    """
    if share.kind == "shm":
        from egmctl.memory.shm_import import import_shm

        return import_shm(share, devices=devices, address=address)
    if share.kind in ("cuda-fabric", "cuda-posix"):
        from egmctl.memory.cuda_import import import_cuda

        return import_cuda(share, devices=devices, address=address)
    raise FailedError(f"memory kind {share.kind!r} is unknown", where="import")
