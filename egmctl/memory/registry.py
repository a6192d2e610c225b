"""Which ranges of the agent's memory are registered: remotely accessible ones, which a descriptor may list, and
local-only ones, which it never does.

Everything is refused here, at registration, that would otherwise fail in a consumer much later ("requested address not
found"): memory without a handle, a range that is not mapped to its end, one registered already or overlapping another.
"""

from __future__ import annotations

import os
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from egmctl.errors import FailedError
from egmctl.memory import linux
from egmctl.memory.base import Chunk, ReleaseError, Share

__all__ = ["FABRIC_HANDLE_BYTES", "Registry", "RegistrationError"]

FABRIC_HANDLE_BYTES = 64


class RegistrationError(FailedError):
    """A range that is not registered, and why."""

    code = "registration"


@dataclass(frozen=True, order=True)
class _Range:
    start: int
    end: int
    name: str


class Registry:
    """The registered ranges of one agent. Not thread-safe: one thread does all work on a pool."""

    def __init__(self) -> None:
        self._ranges: list[_Range] = []
        self._remote: dict[int, Chunk] = {}
        self._fabric: dict[int, bytes] = {}

    def register_remote(self, chunks: Sequence[Chunk]) -> None:
        """Make chunks accessible to others, all or none. Raises `RegistrationError`, also for one that is already."""
        mapped = _Mapped.now() if chunks else None
        before = list(self._ranges), dict(self._remote), dict(self._fabric)
        try:
            for chunk in chunks:
                spec = chunk.spec
                name = f"chunk {spec.index}"
                self._add(chunk.address, spec.nbytes, name)
                end = mapped.end_from(chunk.address) if mapped is not None else 0
                if end < chunk.address + spec.nbytes:
                    raise RegistrationError(
                        f"only {max(0, end - chunk.address)} of its {spec.nbytes} bytes are mapped, readable and "
                        "writable",
                        where=f"{name}, {chunk.address:#x}",
                        hint="this is a defect in egmctl; tear the pool down and provision it anew",
                    )
                self._fabric[spec.index] = _handle(chunk, name)
                self._remote[spec.index] = chunk
        except BaseException:
            self._ranges, self._remote, self._fabric = before
            raise

    def register_local(self, name: str, address: int, nbytes: int) -> None:
        """Note memory for transfers by this process alone. Raises `RegistrationError`."""
        self._add(address, nbytes, name)

    def unregister_remote(self, indices: Iterable[int] | None = None) -> None:
        """Take chunks (all when None) out again; what is not registered is out already."""
        for index in list(self._remote) if indices is None else list(indices):
            chunk = self._remote.pop(index, None)
            self._fabric.pop(index, None)
            if chunk is not None:
                self._drop(chunk.address)

    def unregister_local(self, address: int) -> None:
        """The same for local-only memory, by its start."""
        self._drop(address)

    def holds(self, chunk: Chunk) -> bool:
        """Whether this very chunk is registered."""
        return self._remote.get(chunk.spec.index) is chunk

    def remote(self) -> list[tuple[Chunk, bytes]]:
        """What may be published, by index: chunks and their fabric handles (empty where the kind has none)."""
        return [(self._remote[index], self._fabric[index]) for index in sorted(self._remote)]

    def check_release(self, chunk: Chunk) -> None:
        """Raises `ReleaseError` for a chunk that others may still be told about."""
        if self.holds(chunk):
            raise ReleaseError(
                "is still registered: a descriptor may name its addresses",
                where=f"chunk {chunk.spec.index}, {chunk.address:#x}",
                hint="withdraw the publication first: run teardown again",
            )

    def _add(self, address: int, nbytes: int, name: str) -> None:
        if nbytes <= 0 or address <= 0 or address + nbytes > 1 << 64:
            raise RegistrationError("is no range of addresses", where=f"{name}, {address:#x}, {nbytes} bytes")
        new = _Range(address, address + nbytes, name)
        at = bisect_right(self._ranges, new)
        for other in self._ranges[max(0, at - 1) : at + 1]:
            if other.start < new.end and new.start < other.end:
                same = (other.start, other.end) == (new.start, new.end)
                raise RegistrationError(
                    "is registered already" if same else f"overlaps {other.name} at {other.start:#x}",
                    where=f"{name}, {address:#x}, {nbytes} bytes",
                    hint="unregister the other range first",
                )
        insort(self._ranges, new)

    def _drop(self, address: int) -> None:
        self._ranges = [one for one in self._ranges if one.start != address]


def _handle(chunk: Chunk, name: str) -> bytes:
    """The fabric handle, b"" for kinds whose handle is a descriptor; refused when there is neither, or a wrong one."""
    share: Share = chunk.share()
    if share.fd is not None:
        os.close(share.fd)
    exported = (share.fd is not None) if share.kind != "cuda-fabric" else share.fabric is not None
    problem = "" if exported else f"{share.kind} memory without a handle: nobody could import it"
    if share.fabric is not None and len(share.fabric) != FABRIC_HANDLE_BYTES:
        problem = f"its fabric handle has {len(share.fabric)} bytes, not {FABRIC_HANDLE_BYTES}"
    if share.nbytes != chunk.spec.nbytes:
        problem = f"what is exported are {share.nbytes} of its {chunk.spec.nbytes} bytes"
    if problem:
        raise RegistrationError(
            problem,
            where=f"{name}, {chunk.address:#x}",
            hint=f"see `egmctl doctor --for {share.kind}`",
        )
    return share.fabric or b""


class _Mapped:
    """This process's readable and writable ranges, neighbours joined."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        self._starts = [start for start, _ in ranges]
        self._ends = [end for _, end in ranges]

    @classmethod
    def now(cls) -> _Mapped:
        joined: list[tuple[int, int]] = []
        for start, end in linux.writable_ranges():
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        return cls(joined)

    def end_from(self, address: int) -> int:
        """Where the range ends that holds ``address``; 0 when none does."""
        at = bisect_right(self._starts, address) - 1
        return self._ends[at] if at >= 0 and address < self._ends[at] else 0
