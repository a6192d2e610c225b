"""What reads and writes have in common: the parts they work with, where bytes go, and how long they try."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, repeat
from typing import Any, NamedTuple, Protocol, TypeVar

from egmctl.consumer.bindings import Bindings
from egmctl.consumer.buffers import Buffer
from egmctl.consumer.errors import InvalidBuffer, InvalidRequest, NoSpace
from egmctl.consumer.flow import Throttle
from egmctl.consumer.host_copy import Completion, Copier, Done, Fragment, Group
from egmctl.consumer.mappings import MappingCache
from egmctl.consumer.master_link import MasterLink
from egmctl.consumer.pins import Near, Pins, Target
from egmctl.memory.driver import CudaError, Driver

__all__ = [
    "Backoff",
    "Engine",
    "Gatherer",
    "Oversize",
    "Part",
    "Routes",
    "Timing",
    "in_turn",
    "split_batch",
]


@dataclass(frozen=True)
class Timing:
    """Seconds. ``retry`` is how long a get or put is tried again when its provider, the Master or the object's place
    changed; ``no_space`` how long the Master's "no space" is taken for a passing one, while it evicts.

    ``put_deadline`` counts from before the request for space. A later put is not published. It has to stay below the
    Master's discard time (30 s) and below the lease time (10 s), after which a pool offers its memory to a Master that
    was started anew. ``stock_expiry`` is for how long a stock provider whose handles changed under one endpoint is not
    believed: longer than a Master keeps the segments of the one before (31 s at most, by default).
    """

    retry: float = 3.0
    no_space: float = 2.0
    put_deadline: float = 8.0
    request: float = 5.0
    bind: float = 5.0
    remote_check: float = 1.0
    stock_expiry: float = 40.0


class Gatherer(Protocol):
    """Moves entries on a GPU; `egmctl.consumer.copy.GpuGatherer` is one."""

    def gather(
        self,
        object_ranges: Any,
        offsets: Any,
        entry_bytes: int,
        destination: int,
        *,
        device: int | None = None,
        objects: Any = None,
        stream: int | None = None,
    ) -> Completion: ...

    def scatter(
        self,
        object_ranges: Any,
        offsets: Any,
        entry_bytes: int,
        source: int,
        *,
        device: int | None = None,
        objects: Any = None,
        stream: int | None = None,
    ) -> Completion: ...


_REMEMBERED = 10.0
"""Seconds after which a size that was refused is asked for again: there may be larger chunks by then."""


class Asking(Protocol):
    """A question to the Master."""

    def send(self) -> None: ...

    def wait(self) -> None:
        """Until the answer is there; raises when none will come."""


T = TypeVar("T")
A = TypeVar("A", bound=Asking)


class Part(NamedTuple):
    """``nbytes`` of an object from ``offset``, in a registered buffer at ``address``."""

    offset: int
    address: int
    nbytes: int
    buffer: Buffer


_HERE, _DEVICE = Near._fields.index("here"), Near._fields.index("device")


class Routes:
    """Collects fragments by what copies them: the CPU (None) or the engines of a GPU."""

    def __init__(self, devices: bool) -> None:
        self._devices = devices
        self._by_route: dict[int | None, list[Fragment]] = {}

    def add(self, target: Target, part: Part, *, write: bool) -> None:
        """Raises `InvalidBuffer` when nothing copies between this buffer and this memory."""
        device, fragment = self._route(target, part, write)
        self._by_route.setdefault(device, []).append(fragment)

    def line(self, buffer: Buffer) -> tuple[list[Fragment], int]:
        """The fragments that go the way of ``buffer``, to be added to, and which field of `Near` they take."""
        device = buffer.device if self._devices else None
        return self._by_route.setdefault(device, []), _HERE if device is None else _DEVICE

    def add_all(self, moves: Sequence[tuple[Target, Part]], *, write: bool) -> None:
        """All of them, or none when `add` would raise."""
        for device, fragment in [self._route(target, part, write) for target, part in moves]:
            self._by_route.setdefault(device, []).append(fragment)

    def _route(self, target: Target, part: Part, write: bool) -> tuple[int | None, Fragment]:
        device = part.buffer.device if self._devices else None
        pool = target.address if device is None else target.device_address
        if pool is None:
            raise InvalidBuffer(
                f"{part.buffer.kind} memory cannot be copied to or from the memory of another host",
                where=f"buffer {part.address:#x}",
                hint="use pinned host memory or GPU memory, with devices=[...] given when connecting",
            )
        pool += part.offset
        return device, (pool, part.address, part.nbytes) if write else (part.address, pool, part.nbytes)

    def __iter__(self) -> Iterator[tuple[int | None, list[Fragment]]]:
        return ((device, fragments) for device, fragments in self._by_route.items() if fragments)


@dataclass
class Backoff:
    """Waits between attempts: from 50 ms, doubling up to half a second, never beyond the deadline."""

    seconds: float
    started: float = field(default_factory=time.monotonic)
    next: float = 0.05

    def sleep(self) -> bool:
        """False when the time is up."""
        left = self.started + self.seconds - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(self.next, left))
        self.next = min(self.next * 2, 0.5)
        return True


class Oversize:
    """Objects that fit no chunk. Which chunks the Master has is not known, but once it has said "no space" to an object
    larger than every chunk met so far, the next such one is not asked for: it would evict others' objects for nothing.
    """

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings
        self._nbytes = 0
        self._until = 0.0

    @property
    def active(self) -> bool:
        """Whether anything has to be refused at all."""
        return self._nbytes != 0 and time.monotonic() < self._until

    def note(self, nbytes: int) -> None:
        """The Master had no space for ``nbytes``."""
        largest = self._bindings.largest_chunk()
        if largest and nbytes > largest:
            now = time.monotonic()
            self._nbytes = min(nbytes, self._nbytes) if now < self._until else nbytes
            self._until = now + _REMEMBERED

    def refusal(self, key: str, nbytes: int) -> NoSpace | None:
        """Why ``nbytes`` are not asked for; None when they may be."""
        if not self._nbytes or nbytes < self._nbytes or time.monotonic() >= self._until:
            return None
        largest = self._bindings.largest_chunk()
        if nbytes <= largest:
            return None
        return NoSpace(
            f"{nbytes} bytes are more than any chunk holds (the largest one known has {largest}), and an object never "
            "spans chunks",
            where=f"object {key!r}",
            hint="split it, or provision a pool with larger chunks (max_chunk_size)",
            facts={"number": NoSpace.number, "largest_chunk": largest},
        )


class Engine:
    """The parts of one store that every operation uses."""

    def __init__(
        self,
        master: MasterLink,
        bindings: Bindings,
        mappings: MappingCache,
        host_copier: Copier,
        device_copier: Copier | None,
        throttle: Throttle,
        timing: Timing,
        gatherer: Gatherer | None = None,
        driver: Driver | None = None,
    ) -> None:
        self.master = master
        self.bindings = bindings
        self.mappings = mappings
        self.host_copier = host_copier
        self.device_copier = device_copier
        self.throttle = throttle
        self.timing = timing
        self.gatherer = gatherer
        self.driver = driver
        self.oversize = Oversize(bindings)
        self.usual: Sequence[tuple[str, int]] = ()
        """Chunks that the operation before used, see `Pins.expect`."""

    def pins(self) -> Pins:
        return Pins(self.bindings, self.mappings)

    def routes(self) -> Routes:
        return Routes(self.device_copier is not None)

    def copy(self, routes: Routes, stream: int | None, before: Callable[[], None] | None = None) -> Completion:
        """Start copying; ``before`` may stop it ahead of each piece by raising."""
        started: list[Completion] = []
        try:
            for device, fragments in routes:
                if device is None and stream is not None:
                    self._wait_for(stream)
                copier = self.host_copier if device is None or self.device_copier is None else self.device_copier
                started.append(self.throttle.copy(copier, fragments, device=device, stream=stream, before=before))
        except BaseException:
            settle(started)
            raise
        if not started:
            return Done()
        return started[0] if len(started) == 1 else Group(started)

    def quiesce(self, stream: int | None = None) -> None:
        """Until no copy of this store runs that was begun before, nor what ``stream`` holds: for whoever was
        interrupted, and cannot know which copies it has begun."""
        for part in (self.device_copier, self.gatherer, self.host_copier):
            waits = getattr(part, "quiesce", None)
            if waits is not None:
                waits()
        if stream is not None and self.driver is not None:
            with suppress(CudaError):
                self.driver.stream_synchronize(stream)

    def _wait_for(self, stream: int) -> None:
        """The CPU cannot be queued behind a stream: it waits for what the stream holds."""
        if self.driver is None:
            raise InvalidRequest("a stream was given to a store without GPUs", hint="connect with devices=[...]")
        self.driver.stream_synchronize(stream)


def settle(completions: Sequence[Completion]) -> None:
    """Wait until none of them runs, whatever they end with."""
    try:
        Group(completions).wait(None)
    except Exception:  # noqa: S110 - the caller is already on its way out with an error
        pass


_RAMP = (12, 24, 48)
"""Each piece is asked for and its copies are queued within the time in which the piece before is copied, for objects of
1 MiB at 55 GB/s."""
_MOST = 64
_SHORTEST = 12
_MOST_AHEAD = 4


@lru_cache(maxsize=64)
def split_batch(count: int) -> tuple[slice, ...]:
    """Pieces of a batch: short ones first, so that copying begins soon, and short ones last, so that little is left to
    be asked when the last copy ends. At most some 250, all of which are on their way to the Master at once."""
    most = max(_MOST, count // 250)
    sizes: list[int] = []
    left = count
    for size in chain(_RAMP, repeat(most)):
        if left <= size + _SHORTEST:
            break
        sizes.append(size)
        left -= size
    while left > _SHORTEST:
        sizes.append((left + 1) // 2)
        left //= 2
    sizes.append(left)
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return tuple([slice(start, start + size) for start, size in zip(starts, sizes, strict=False)])


def in_turn(
    pieces: Sequence[T], make: Callable[[T], A], meanwhile: Callable[[], None], ran_dry: Callable[[], bool]
) -> Iterator[A]:
    """Ask about one piece after the other, by the questions that ``make`` makes: each of them, once its answer is there
    and the next has been sent. ``meanwhile`` is done while the first is waited for.

    No more are under way at once, since a Master may answer only after it has looked at what came meanwhile: asking for
    much more makes the copies begin later. But where all copies are over (``ran_dry``) before there is an answer,
    because the Master is far away, there will be more of them.
    """
    questions = map(make, pieces)  # each is made when its turn comes, while an answer is waited for
    following = next(questions, None)
    if following is None:
        return
    following.send()
    asked = deque([following])
    meanwhile()
    following = next(questions, None)
    ahead, yielded = 1, 0
    while asked:
        asked[0].wait()
        current = asked.popleft()
        if yielded > 1 and ahead < _MOST_AHEAD and ran_dry():
            ahead += 1
        while following is not None and len(asked) < ahead:
            following.send()
            asked.append(following)
            following = next(questions, None) if len(asked) < ahead else None
        yield current
        yielded += 1
        if following is None:
            following = next(questions, None)


def check_batch(keys: Sequence[str], *others: Sequence[object]) -> None:
    """Raises `InvalidRequest` for lists of unequal length."""
    lengths = {len(keys), *map(len, others)}
    if len(lengths) > 1:
        raise InvalidRequest(f"the lists of a batch have different lengths: {sorted(lengths)}")
