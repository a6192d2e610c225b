"""What the provider and the consumer know of memory, whatever its kind.

A provider creates chunks through a `ProviderMemory` and hands each out as a `Share`; a consumer turns a share into a
`Mapping` at an address of its own. One file per memory kind implements both ends; nothing else calls CUDA VMM or mmap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from egmctl.errors import CleanupPendingError

__all__ = ["Chunk", "ChunkSpec", "Mapping", "MemoryKind", "ProviderMemory", "ReleaseError", "Share"]

MemoryKind = Literal["cuda-fabric", "cuda-posix", "shm"]


class ReleaseError(CleanupPendingError):
    """A release that failed: what it names is still owned, and releasing it again may succeed.

    ``left`` is what can be closed again, where the caller has no other hold on it.
    """

    left: Mapping | None = None


@dataclass(frozen=True)
class ChunkSpec:
    """One chunk as planned: ``nbytes`` on ``numa_node``."""

    index: int
    numa_node: int
    nbytes: int


@dataclass(frozen=True)
class Share:
    """What another process needs to import a chunk. It is a capability: neither printed nor logged.

    Exactly one of ``fd`` (``shm``, ``cuda-posix``; the receiver owns and closes it) and ``fabric`` (64 bytes) is set.
    """

    kind: MemoryKind
    numa_node: int
    nbytes: int
    fd: int | None = None
    fabric: bytes | None = None

    def __repr__(self) -> str:
        return f"Share({self.kind}, numa_node={self.numa_node}, nbytes={self.nbytes}, handle redacted)"


class Chunk(Protocol):
    """A chunk that exists: allocated on its node, mapped in this process at ``address``."""

    @property
    def spec(self) -> ChunkSpec: ...

    @property
    def address(self) -> int:
        """The provider's address; what the Master and the descriptor name. Never used for another chunk."""

    def share(self) -> Share:
        """A new share; with a descriptor, a duplicate that the caller closes."""

    def host_view(self) -> memoryview:
        """The chunk's bytes, readable and writable by the CPU."""


class ProviderMemory(Protocol):
    """Owns the chunks of one pool in the agent."""

    @property
    def kind(self) -> MemoryKind: ...

    @property
    def warnings(self) -> list[str]:
        """What a person should know of this machine, each once; grows as chunks are created."""

    def preflight(self, specs: Sequence[ChunkSpec]) -> None:
        """Refuse (`PreflightError`, with the remedy) what this machine cannot do. Call it before the first create."""

    def granularity(self, numa_node: int) -> int:
        """Bytes that sizes on this node are a multiple of."""

    def create(self, spec: ChunkSpec, progress: Callable[[int], None]) -> Chunk:
        """Allocate, bind, populate and map one chunk; ``progress`` is called with bytes done in this chunk.

        All of it or nothing: on failure what was done is undone before the error leaves.
        """

    def release(self, chunk: Chunk) -> None:
        """The exact reverse; the address range stays reserved. Raises `ReleaseError` and keeps what is left, for a
        further call to release. Releasing twice is success."""

    def owned(self) -> list[ChunkSpec]:
        """The chunks that exist, those half released included."""

    def chunks(self) -> list[Chunk]:
        """The chunks behind `owned`: what a failed create or release has left can be released through them."""

    def close(self) -> None:
        """Give the reserved addresses back; refused (`ReleaseError`) while a chunk exists."""


class Mapping(Protocol):
    """An imported chunk at an address of this process's own."""

    @property
    def address(self) -> int:
        """Where it starts here: a host pointer, and for CUDA kinds a device pointer as well."""

    @property
    def nbytes(self) -> int: ...

    @property
    def device_address(self) -> int | None:
        """The same bytes for a GPU; None when no device was given access."""

    def host_view(self) -> memoryview:
        """The bytes, readable and writable by the CPU; valid until `close`."""

    def close(self) -> None:
        """Unmap, then let go of the memory, then of the address range. Twice is success."""
