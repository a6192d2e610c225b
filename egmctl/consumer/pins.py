"""What one operation holds: the incarnations it relies on and the mappings it copies through."""

from __future__ import annotations

import time
from collections.abc import Container, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from egmctl.consumer.binding import Binding, ChunkAt
from egmctl.consumer.bindings import Bindings
from egmctl.consumer.errors import AmbiguousSegment, ProviderGone, StaleAllocation, StoreError
from egmctl.consumer.mappings import Lease, MappingCache
from egmctl.errors import EgmError
from egmctl.mooncake.calls import Spots

__all__ = ["Again", "Near", "Pins", "Place", "Target"]


class Place(NamedTuple):
    """Where the Master says that a replica in memory lies: ``nbytes`` at the provider's ``address``."""

    replica: int
    address: int
    nbytes: int
    endpoint: str
    protocol: str = ""


class Again(Exception):
    """This attempt proves nothing; the next may. ``error`` is what to say when there is no next.

    ``at_once``: there is no reason to wait. ``bound``: all that was missing is that the Master be asked after its
    provider was bound, which it is now.
    """

    def __init__(self, error: StoreError, *, at_once: bool = False, bound: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.at_once = at_once or bound
        self.bound = bound


class Target(NamedTuple):
    """A place, mapped here. ``address`` is the CPU's (None where it has no access), ``device_address`` the GPUs'."""

    address: int | None
    device_address: int | None
    where: str
    key: Hashable


class Near(NamedTuple):
    """A chunk that is mapped: asked about it since ``asked_at``, the Master's answers mean this one."""

    asked_at: float
    start: int
    end: int
    here: int | None
    device: int | None
    key: Hashable


_EXPECTED = 4
_NEAR = 24  # chunks are mostly multiples of 16 MiB, so that nearly every address finds its chunk by these bits


class Pins:
    """Bindings and mappings of one operation, until `close`: nothing is unmapped under its copies. Not thread-safe."""

    def __init__(self, bindings: Bindings, mappings: MappingCache) -> None:
        self._bindings = bindings
        self._mappings = mappings
        self._bound: dict[str, Binding] = {}
        self._leases: dict[Hashable, tuple[Lease, ChunkAt, Binding]] = {}
        self._confirmed: dict[str, tuple[float, bool]] = {}
        self._near: dict[tuple[str, int], Near] = {}
        self._chunks: dict[Hashable, tuple[str, Near]] = {}
        self._expected: dict[Hashable, tuple[Lease, ChunkAt, Binding]] = {}
        self._held: list[Lease] = []

    def near(self, place: Place, asked_at: float) -> Near | None:
        """The chunk that holds all of ``place``, when it was mapped before in this operation: nothing can go wrong."""
        _, address, nbytes, endpoint, _ = place
        near = self._near.get((endpoint, address >> _NEAR))
        if near is None or not near.start <= address < near.end:  # two chunks may share a part
            near = self._nearby(endpoint, address)
        if near is not None and near.asked_at <= asked_at and near.start <= address and address + nbytes <= near.end:
            return near
        return None

    def line_up(self, spots: Spots, sizes: Sequence[int], asked_at: float, column: int) -> list[int] | None:
        """The addresses of all of ``spots`` as ``column`` of `Near` has them. None when one is not as large as said, or
        cannot be reached so: `resolve` then says of each what is the matter with it."""
        if list(spots.sizes) != list(sizes):
            return None
        parts = list(zip(spots.te_endpoints, [address >> _NEAR for address in spots.addresses], strict=True))
        table = self._near
        nears: list[Any] = list(map(table.get, parts))
        if not all(nears):
            try:
                for part, address, nbytes in zip(parts, spots.addresses, sizes, strict=True):
                    if part not in table:
                        self.resolve(Place(0, address, nbytes, part[0]), asked_at)
            except (EgmError, Again):
                return None
            nears = list(map(table.get, parts))
        found = [
            near[column] - near[1] + address
            for near, address, nbytes in zip(nears, spots.addresses, sizes, strict=True)
            if near[1] <= address and address + nbytes <= near[2] and near[0] <= asked_at and near[column] is not None
        ]
        return found if len(found) == len(sizes) else None

    def _nearby(self, endpoint: str, address: int) -> Near | None:
        """The first look at a part of a chunk that is in use already, or expected; the next one is found at once."""
        for named, near in self._chunks.values():
            if near.start <= address < near.end and named == endpoint:
                self._near[endpoint, address >> _NEAR] = near
                return near
        for identity, (lease, chunk, binding) in self._expected.items():
            if (
                chunk.base <= address < chunk.base + chunk.nbytes
                and binding.endpoint == endpoint
                and self._bound.setdefault(endpoint, binding) is binding
            ):
                self._leases[identity] = lease, chunk, binding
                del self._expected[identity]
                self._note(binding, chunk, lease)
                return self._nearby(endpoint, address)
        return None

    def resolve(self, place: Place, asked_at: float) -> Target:
        """``place`` as addresses of this process, when the Master was asked at ``asked_at`` (monotonic).

        Raises `Again` when the incarnation was bound only after that, or is not yet sure of its endpoint, `Unreachable`
        and other errors when it cannot be reached.
        """
        near = self.near(place, asked_at)
        if near is not None:
            offset = place.address - near.start
            return Target(
                None if near.here is None else near.here + offset,
                None if near.device is None else near.device + offset,
                place.endpoint,
                near.key,
            )
        return self._resolve(place, asked_at)

    def _resolve(self, place: Place, asked_at: float) -> Target:
        binding = self._bound.get(place.endpoint)
        if binding is None:
            try:
                binding = self._bindings.get(place.endpoint)
            except ProviderGone as error:
                raise Again(error) from error
            self._bound[place.endpoint] = binding
        if binding.bound_at > asked_at:
            raise Again(StaleAllocation("bound only after it was located", where=place.endpoint), bound=True)
        if not binding.exclusive:
            binding.outdated = True
            raise Again(
                AmbiguousSegment(
                    "its provider has not established yet that the Master lists only its own segments there",
                    where=place.endpoint,
                    hint="after a restart on a fixed port this takes until the Master has dropped the old segments",
                )
            )
        try:
            chunk = binding.chunk(place.address, place.nbytes)
            lease = self._lease(binding, chunk)
        except ProviderGone as error:
            binding.outdated = True
            raise Again(error, at_once=True) from error
        self._note(binding, chunk, lease)
        return self.resolve(place, asked_at)

    def _note(self, binding: Binding, chunk: ChunkAt, lease: Lease) -> None:
        mapping = lease.mapping
        # Memory behind a fabric handle may be another host's, which only GPUs reach: the CPU is given no access to it.
        self._chunks[chunk.identity] = (
            binding.endpoint,
            Near(
                binding.bound_at,
                chunk.base,
                chunk.base + chunk.nbytes,
                None if binding.kind == "cuda-fabric" else mapping.address,
                getattr(mapping, "device_address", mapping.address),
                chunk.identity,
            ),
        )

    def used(self) -> list[tuple[str, int]]:
        """Some of the chunks, for a later operation to `expect`."""
        return [(endpoint, near.start) for endpoint, near in list(self._chunks.values())[:_EXPECTED]]

    def expect(self, chunks: Iterable[tuple[str, int]]) -> None:
        """Take hold of chunks that most likely will be met, as far as they are mapped and nobody has to be asked. To be
        done while an answer of the Master is waited for. What is not met counts for nothing, and is let go of by
        `expect_no_more` or when another chunk has to be mapped."""
        for endpoint, address in chunks:
            binding = self._bindings.at_hand(endpoint)
            if binding is None or binding.watch is None or not binding.exclusive:
                continue
            with suppress(StaleAllocation):
                chunk = binding.chunk(address, 1)
                if chunk.identity not in self._leases and chunk.identity not in self._expected:
                    lease = self._mappings.at_hand(chunk.identity, self._held)
                    if lease is not None:
                        self._expected[chunk.identity] = lease, chunk, binding

    def expect_no_more(self) -> None:
        if self._expected:
            expected, self._expected = self._expected, {}
            self._mappings.release([lease for lease, _, _ in expected.values()])

    @property
    def watched(self) -> bool:
        """Whether `confirm` needs to ask nobody."""
        return all(binding.watch is not None for binding in self._bound.values())

    def confirm(self, among: Container[str] | None = None, *, not_older_than: float = 0.0) -> set[str]:
        """The endpoints (``among`` those given) whose incarnation is not provably the one bound any more.

        One that can be watched is looked at each time; one that must be asked over the network is not asked again if
        it answered within ``not_older_than`` seconds.
        """
        bad = set()
        for endpoint, binding in self._bound.items():
            if among is not None and endpoint not in among:
                continue
            asked, good = self._confirmed.get(endpoint, (0.0, False))
            if binding.watch is None and good and time.monotonic() - asked < not_older_than:
                continue
            now = time.monotonic()
            used = [chunk for _, chunk, bound in self._leases.values() if bound is binding]
            good = self._bindings.confirm(binding, used)
            self._confirmed[endpoint] = (now, good)
            if not good:
                binding.outdated = True
                bad.add(endpoint)
        return bad

    def close(self) -> None:
        """Only when no copy runs any more. Twice is once."""
        self._mappings.release(self._held)
        self._leases, self._expected = {}, {}

    def _lease(self, binding: Binding, chunk: ChunkAt) -> Lease:
        held = self._leases.get(chunk.identity)
        if held is None:
            lease = self._mappings.at_hand(chunk.identity, self._held)
            if lease is None:
                self.expect_no_more()  # what is only expected makes room, where that is bounded
                lease = self._mappings.acquire(
                    chunk.identity, chunk.nbytes, lambda: self._bindings.map_chunk(binding, chunk), self._held
                )
            self._leases[chunk.identity] = (lease, chunk, binding)
            return lease
        return held[0]
