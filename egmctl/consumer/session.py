"""Many objects located once and read in parts, repeatedly, within the lease: no call to the Master for a read.

A read checks, before and after its copy, that the lease holds, that the connection to the Master that granted it
stands, and that the provider is the one that was bound. What it cannot see is a removal by force inside the lease;
`Session.unchanged` asks the Master about that. A copy that fails is made again from other replicas of the objects; the
Master is asked only where their provider was not bound when the session located them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from types import TracebackType

from egmctl.consumer.buffers import Buffers
from egmctl.consumer.choose import NOT_THE_PLACE, choose
from egmctl.consumer.context import keeps_device
from egmctl.consumer.engine import Backoff, Engine, Part
from egmctl.consumer.errors import InvalidRequest, LeaseExpired, ProviderGone, StaleAllocation, StoreClosed
from egmctl.consumer.gather import Entries, Indices, gather
from egmctl.consumer.host_copy import Completion
from egmctl.consumer.master_link import Asked, Location, is_transient
from egmctl.consumer.pins import Again, Pins, Place, Target
from egmctl.consumer.requests import check_range
from egmctl.errors import EgmError

__all__ = ["Session"]

_Found = tuple[Location, Place, Target]
_Begin = Callable[[dict[str, _Found]], Completion]
_Avoided = dict[Place, EgmError]
"""Places that are not read from, each with why."""
_CHOICES = 16
"""Choices of replicas that are tried for one read."""


class Session:
    """Objects that were located together. A context manager; its calls wait for each other when threads share it."""

    def __init__(self, engine: Engine, buffers: Buffers, keys: Sequence[str]) -> None:
        self._engine = engine
        self._driver = engine.driver
        self._buffers = buffers
        self._keys = tuple(keys)
        self._lock = threading.Lock()
        self._pins: Pins | None = None
        self._found: dict[str, _Found] = {}
        self._failed: _Avoided = {}
        self._asked: Asked | None = None
        self._lease_until = 0.0
        self._epoch = 0

    @keeps_device
    def __enter__(self) -> Session:
        with self._lock:
            self._locate()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @keeps_device
    def close(self) -> None:
        """Let go of the memory. Twice is success."""
        with self._lock:
            pins, self._pins = self._pins, None
            if pins is not None:
                pins.close()

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each object."""
        return {key: place.nbytes for key, (_, place, _) in self._found.items()}

    @property
    def lease_left(self) -> float:
        """Seconds for which reads are still allowed; negative when the lease has run out."""
        return self._lease_until - time.monotonic()

    def read_into(self, key: str, offset: int, address: int, nbytes: int, *, stream: int | None = None) -> int:
        """``nbytes`` from ``offset`` of one object into a registered buffer; returned when they are there and right.

        Raises `LeaseExpired` and `ProviderGone` (call `renew`), `InvalidRequest`, `InvalidBuffer`, and what the copy
        failed with: `GetFailed` with the reason of each replica where there are several.
        """
        return self.batch_read_into([(key, offset, address, nbytes)], stream=stream)

    @keeps_device
    def batch_read_into(self, reads: Sequence[tuple[str, int, int, int]], *, stream: int | None = None) -> int:
        """Several (key, offset, address, bytes) at once, as `read_into`; returns the bytes of all."""
        with self._lock:
            parts, total = [], 0
            for key, offset, address, nbytes in reads:
                buffer = self._buffers.find(address, nbytes)
                check_range(key, self._object(key)[1].nbytes, offset, nbytes)
                if nbytes:
                    parts.append((key, Part(offset, address, nbytes, buffer)))
                total += nbytes

            def begin(found: dict[str, _Found]) -> Completion:
                routes = self._engine.routes()
                for key, part in parts:
                    routes.add(found[key][2], part, write=False)
                return self._engine.copy(routes, stream)

            self._copy([read[0] for read in reads], begin, stream)
        return total

    def gather(
        self,
        offsets: Indices,
        entry_bytes: int,
        destination: int,
        *,
        keys: Sequence[str] | None = None,
        objects: Indices | None = None,
        count: int | None = None,
        stream: int | None = None,
    ) -> int:
        """Entries of ``entry_bytes`` at ``offsets`` (bytes) of the objects, side by side from ``destination`` on;
        returns the bytes.

        ``objects`` says for each entry which of ``keys`` (the session's, unless given) it is in; left out, there is one
        key. Both are `Indices`: integers here or on a GPU.
        Raises `BadOffset` when an entry is not inside its object, and what `read_into` raises.
        """
        return self.gather_entries(
            self._keys if keys is None else keys, Entries(offsets, entry_bytes, objects, count), destination, stream
        )

    @keeps_device
    def gather_entries(self, keys: Sequence[str], entries: Entries, destination: int, stream: int | None) -> int:
        """As `gather`, with the entries as they are."""
        with self._lock:
            for key in keys:
                self._object(key)

            def begin(found: dict[str, _Found]) -> Completion:
                spaces = [(target, place.nbytes) for _, place, target in [found[key] for key in keys]]
                return gather(self._engine, self._buffers, spaces, entries, destination, stream)

            self._copy(keys, begin, stream)
        return entries.nbytes

    @keeps_device
    def renew(self) -> tuple[str, ...]:
        """Ask the Master again: a new lease, and the keys whose object is another one, or may be, than before. Raises
        as `EgmStore.get_into` when one of them cannot be located any more."""
        with self._lock:
            before = self._found
            self._locate()
            return tuple(
                key
                for key, (location, _, _) in self._found.items()
                if key not in before or not location.still_holds(before[key][1], before[key][0])
            )

    @keeps_device
    def unchanged(self) -> bool:
        """Whether the Master says that all objects are still the ones located, so that everything read since then was
        right."""
        with self._lock:
            self._opened()
            assert self._asked is not None
            for key, answer in zip(self._keys, self._asked.again()() or (), strict=False):
                location, place, _ = self._object(key)
                if not isinstance(answer, Location) or not answer.still_holds(place, location):
                    return False
            return not self._opened().confirm()  # also of providers that are not read any more, but were

    def _locate(self) -> None:
        backoff = Backoff(self._engine.timing.retry)
        hurried = 0
        while True:
            pins = self._engine.pins()
            try:
                found, asked = self._attempt(pins)
                break
            except Again as error:
                pins.close()
                hurried += error.at_once
                if not (error.at_once and hurried <= 3) and not backoff.sleep():
                    raise error.error from error
            except BaseException as error:
                pins.close()
                if not (isinstance(error, EgmError) and is_transient(error) and backoff.sleep()):
                    raise
        old, self._pins = self._pins, pins
        if old is not None:
            old.close()
        self._found, self._asked = found, asked
        self._lease_until = min((location.lease_until for location, _, _ in found.values()), default=0.0)
        self._epoch = next((location.epoch for location, _, _ in found.values()), self._engine.master.epoch)

    def _attempt(self, pins: Pins) -> tuple[dict[str, _Found], Asked]:
        if not self._keys:
            raise InvalidRequest("a session has at least one key")
        found = {}
        failed = tuple(self._failed.items())
        asked = self._engine.master.locate(self._keys)
        for key, answer in zip(self._keys, asked(), strict=True):
            if isinstance(answer, EgmError):
                raise answer
            place, target = choose(pins, answer, failed)
            found[key] = (answer, place, target)
        return found, asked

    def _opened(self) -> Pins:
        if self._pins is None:
            raise StoreClosed("the session is not open", hint="use it in a with statement")
        return self._pins

    def _object(self, key: str) -> _Found:
        self._opened()
        try:
            return self._found[key]
        except KeyError:
            raise InvalidRequest("is not an object of this session", where=f"object {key!r}") from None

    def _copy(self, keys: Sequence[str], begin: _Begin, stream: int | None) -> None:
        """Copy from where the objects lie; should that fail, from others of their replicas."""
        self._check_lease()
        try:
            self._carry_out(begin, self._found, stream)
        except NOT_THE_PLACE:
            raise
        except EgmError as error:
            self._copy_elsewhere(keys, begin, stream, error)
        self._check_after({self._found[key][1].endpoint for key in keys})

    def _copy_elsewhere(self, keys: Sequence[str], begin: _Begin, stream: int | None, failure: EgmError) -> None:
        """A failure does not tell which of several places it was. So those at one provider are avoided, then those at
        the next, then at two of them; what had to be avoided is not read any more in this session."""
        untried = deque(_more_to_avoid(self._failed, [self._found[key] for key in keys], failure))
        for _ in range(_CHOICES):
            if not untried:
                break
            avoided = untried.popleft()
            self._check_lease()
            try:
                found = {key: self._avoiding(avoided, key) for key in keys}
            except (EgmError, Again) as error:
                failure = error.error if isinstance(error, Again) else error
                continue
            try:
                self._carry_out(begin, found, stream)
            except NOT_THE_PLACE:
                raise
            except EgmError as error:
                failure = error
                untried += _more_to_avoid(avoided, found.values(), error)
                continue
            self._failed = avoided
            self._found.update(found)
            return
        raise failure

    def _avoiding(self, avoided: _Avoided, key: str) -> _Found:
        """Where an object is read when these places are not. Raises as `choose`."""
        found = self._object(key)
        location, place, _ = found
        if place not in avoided:
            return found
        failed = tuple(avoided.items())
        try:
            return (location, *choose(self._opened(), location, failed))
        except Again as again:
            if not again.bound:
                raise
        # Asked before its provider was bound, the Master proves nothing; asked now, it may speak of another object.
        (answer,) = self._engine.master.locate([key])()
        if isinstance(answer, EgmError):
            raise answer
        places = tuple(place for place in location.places if answer.still_holds(place, location))
        if not places:
            raise StaleAllocation("is another object now, or may be", where=f"object {key!r}", hint="call renew()")
        return (location, *choose(self._opened(), answer._replace(places=places), failed))

    def _carry_out(self, begin: _Begin, found: dict[str, _Found], stream: int | None) -> None:
        try:
            begin(found).wait(None)
        except EgmError:
            raise
        except BaseException:
            # The copy may still run, or have been begun without our knowing: nothing may be unmapped under it.
            self._engine.quiesce(stream)
            raise

    def _check_lease(self) -> None:
        if self.lease_left <= 0:
            raise LeaseExpired(
                "the lease of this session has run out", where=f"{len(self._keys)} objects", hint="call renew()"
            )
        if not self._same_master():
            raise StaleAllocation(
                "the connection to the Master that granted the lease broke",
                hint="call renew(); after a restart of the Master its objects are gone",
            )

    def _check_after(self, endpoints: Container[str]) -> None:
        self._check_lease()
        gone = self._opened().confirm(endpoints, not_older_than=self._engine.timing.remote_check)
        if gone:
            raise ProviderGone(
                "the provider ended, or is taking its memory down", where=", ".join(sorted(gone)), hint="call renew()"
            )

    def _same_master(self) -> bool:
        master = self._engine.master
        return master.epoch == self._epoch and master.connected()


def _more_to_avoid(avoided: _Avoided, found: Iterable[_Found], error: EgmError) -> list[_Avoided]:
    """After a copy that failed: for each provider read from, what is avoided already and the places there. Objects that
    have no other replica stay."""
    by_provider: dict[str, _Avoided] = {}
    for location, place, _ in found:
        if len(location.places) > 1:
            by_provider.setdefault(place.endpoint, dict(avoided))[place] = error
    return list(by_provider.values())
