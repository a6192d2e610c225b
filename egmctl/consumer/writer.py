"""Puts: reserve, copy to every replica, wait, and publish only what is known to lie in the space reserved.

Before PutEnd: the incarnation bound before reserving is still there, the Master connection is still the one that
granted the space, and the deadline has not passed. Space is given back only when no copy into it runs any more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from egmctl.consumer.engine import Engine, Oversize, Routes, settle
from egmctl.consumer.errors import InterruptedPut, NoSpace, Unreachable
from egmctl.consumer.host_copy import Completion, Group
from egmctl.consumer.master_link import Requested, Reserved, is_transient
from egmctl.consumer.pins import Again, Target
from egmctl.consumer.publishing import NONE, Flights, Publishing
from egmctl.consumer.requests import Plain, WriteRequest, WriteRequests, Writes
from egmctl.consumer.rounds import Round
from egmctl.errors import EgmError
from egmctl.mooncake.master import ReplicateConfig

__all__ = ["WriteRound"]


class _LostSpace(Exception):
    """The space may be somebody else's by now: nothing more is written to it."""


@dataclass
class _Asked:
    """Space that is asked for, for the requests of these numbers. ``request`` is None where nothing needs any."""

    numbers: Sequence[int]
    keys: Sequence[str]
    sizes: Sequence[int]
    plain: Plain | None
    request: Requested | None
    space: Publishing
    seconds: float
    deadline: float = 0.0

    def send(self) -> None:
        if self.request is not None:
            self.space.hold(self.keys)
            self.deadline = time.monotonic() + self.seconds
            self.request.send()

    def wait(self) -> None:
        if self.request is not None:
            self.request.wait()


@dataclass
class _Piece:
    """What was granted together and is copied together."""

    flights: Flights
    completion: Completion
    deadline: float


class WriteRound(Round[_Piece, _Asked]):
    """`start` reserves and begins to copy, `settle` publishes. `abandon` gives everything back that is not."""

    def __init__(
        self,
        engine: Engine,
        requests: WriteRequests,
        config: ReplicateConfig,
        stream: int | None = None,
        todo: Sequence[int] | None = None,
    ) -> None:
        """``todo`` are the numbers of the requests; all of them, unless given."""
        super().__init__(engine, range(len(requests)) if todo is None else todo, stream)
        self._requests = requests
        self._config = config
        self._over = 0  # pieces whose copies are known to be over
        self._ended = 0  # of these, pieces that were published as far as they may be
        self._space = Publishing(engine, self.outcomes)

    def _question(self, numbers: Sequence[int]) -> _Asked:
        oversize = self._engine.oversize if self._engine.oversize.active else None
        plain = self._requests.plain(numbers) if oversize is None and isinstance(self._requests, Writes) else None
        if plain is not None:
            keys, sizes = plain.keys, plain.sizes
        else:
            numbers, keys, sizes = self._look_at(numbers, oversize)
        request = self._engine.master.putting(keys, sizes, self._config) if numbers else None
        return _Asked(numbers, keys, sizes, plain, request, self._space, self._engine.timing.put_deadline)

    def _look_at(self, todo: Sequence[int], oversize: Oversize | None) -> tuple[list[int], list[str], list[int]]:
        """The numbers of the requests that can be asked for, with their keys and sizes."""
        numbers, keys, sizes = [], [], []
        for number in todo:
            try:
                request = self._requests[number]
                refusal = None if oversize is None else oversize.refusal(request.key, request.nbytes)
                if refusal is not None:
                    raise refusal
            except EgmError as error:
                self.outcomes[number] = error
                continue
            numbers.append(number)
            keys.append(request.key)
            sizes.append(request.nbytes)
        return numbers, keys, sizes

    def _launch(self, asked: _Asked) -> None:
        request = asked.request
        if request is None:
            return
        routes = self._engine.routes()
        flights, rest = self._line_up(asked, request, routes)
        launched: list[tuple[int, int, Reserved]] = []
        refused: list[str] = []
        custom: list[tuple[WriteRequest, list[Target]]] = []
        answers = request() if rest else ()
        for at in rest:
            number, key, nbytes, reserved = asked.numbers[at], asked.keys[at], asked.sizes[at], answers[at]
            if isinstance(reserved, EgmError):
                self._space.refused(key)
                self.outcomes[number] = (
                    self._no_space(key, nbytes, reserved) if isinstance(reserved, NoSpace) else reserved
                )
                continue
            try:
                self._launch_one(self._requests[number], reserved, routes, custom)
            except (EgmError, Again) as error:
                self.outcomes[number] = error
                refused.append(key)
                continue
            launched.append((number, nbytes, reserved))
        if launched:
            more = Flights(
                [number for number, _, _ in launched],
                [reserved.key for _, _, reserved in launched],
                [nbytes for _, nbytes, _ in launched],
                [[place.endpoint for place in reserved.places] for _, _, reserved in launched],
                request.epoch,
            )
            flights = flights.joined(more) if flights.keys else more
        if flights.keys:
            self._copy(flights, routes, custom, asked.deadline)
        if refused:
            self._space.revoke(refused)

    def _line_up(self, asked: _Asked, request: Requested, routes: Routes) -> tuple[Flights, Sequence[int]]:
        """What most of a batch is: each with one replica, from one buffer, into a chunk that can be reached. They are
        added to ``routes``, all of them or none; the others' positions are returned as well."""
        everything = range(len(asked.numbers))
        at, spots = request.columns() if asked.plain is not None else ((), None)
        if asked.plain is None or spots is None or not at:
            return NONE, everything
        plain = asked.plain.only(at)
        fragments, column = routes.line(plain.buffer)
        pool = self.pins.line_up(spots, plain.sizes, request.asked_at, column)
        if pool is None:
            return NONE, everything
        fragments += zip(pool, plain.addresses, plain.sizes, strict=True)
        endpoints = list(zip(spots.te_endpoints))
        if len(at) == len(everything):
            return Flights(asked.numbers, plain.keys, plain.sizes, endpoints, request.epoch), ()
        numbers = [asked.numbers[each] for each in at]
        return Flights(numbers, plain.keys, plain.sizes, endpoints, request.epoch), _others(everything, at)

    def _launch_one(
        self,
        request: WriteRequest,
        reserved: Reserved,
        routes: Routes,
        custom: list[tuple[WriteRequest, list[Target]]],
    ) -> None:
        if any(place.nbytes < request.nbytes for place in reserved.places):
            raise self._space.less(request.key, request.nbytes)
        targets = self._targets(reserved)
        if request.custom is not None:
            custom.append((request, targets))
        # Nothing may be written for a put that is refused: its space is given back while the others are copied.
        routes.add_all([(target, part) for target in targets for part in request.parts], write=True)

    def _no_space(self, key: str, nbytes: int, error: NoSpace) -> EgmError | Again:
        """No space now, or none ever: the second is not asked for again, since the Master evicts others each time."""
        self._engine.oversize.note(nbytes)
        return self._engine.oversize.refusal(key, nbytes) or Again(error)

    def _targets(self, reserved: Reserved) -> list[Target]:
        targets: list[Target] = []
        reasons = list(reserved.elsewhere)
        later: Again | None = None
        for place in reserved.places:
            try:
                targets.append(self.pins.resolve(place, reserved.asked_at))
            except Again as error:
                # Not worth asking again in this round unless every replica is.
                later = error if later is None or later.bound else later
            except Unreachable as error:
                reasons.append(str(error))
        if later is not None:
            raise later
        if reasons or not targets:
            raise Unreachable(
                "the Master gave space that cannot be reached directly: "
                + ("; ".join(reasons) or "none of it is in memory"),
                where=f"object {reserved.key!r}",
                hint="mount a pool on this host with room for it, or put it through a Mooncake client",
                facts={"reasons": reasons},
            )
        return targets

    def _copy(
        self,
        flights: Flights,
        routes: Routes,
        custom: Sequence[tuple[WriteRequest, list[Target]]],
        deadline: float,
    ) -> None:
        epoch = flights.epoch
        master = self._engine.master

        def still_ours() -> None:
            if time.monotonic() > deadline or master.epoch != epoch or not master.connected():
                raise _LostSpace

        started: list[Completion] = []
        try:
            started.append(self._engine.copy(routes, self._stream, still_ours))
            for request, targets in custom:
                still_ours()
                assert request.custom is not None
                started.append(request.custom(targets, self._stream))
        except _LostSpace:
            settle(started)
            late = time.monotonic() > deadline
            for number, key in zip(flights.numbers, flights.keys, strict=True):
                self.outcomes[number] = self._space.expired(key) if late else self._space.cut_off(key)
            if late:
                self._space.revoke(flights.keys)
            return
        except EgmError as error:
            settle(started)
            for number in flights.numbers:
                self.outcomes[number] = error
            self._space.revoke(flights.keys)
            return
        except BaseException:
            settle(started)
            raise
        completion = started[0] if len(started) == 1 else Group(started)
        self._pieces.append(_Piece(flights, completion, deadline))

    def wait(self, timeout: float | None) -> bool:
        until = None if timeout is None else time.monotonic() + timeout
        last = len(self._pieces) - 1
        for at in range(self._over, len(self._pieces)):
            piece = self._pieces[at]
            if at == max(0, last - 1):
                self._space.prepare(self._pieces[last].flights)
            try:
                if not piece.completion.wait(None if until is None else max(0.0, until - time.monotonic())):
                    return False
            except EgmError as error:
                for number in piece.flights.numbers:
                    self.outcomes[number] = error
                piece.flights = NONE
            self._over = at + 1
            if at < last and self._pieces[at + 1].completion.done():
                continue  # published together with that one
            if self.pins.watched:  # nobody has to be asked: published while the pieces behind it are being copied
                self._end(self.pins.confirm())
            if at < last - 1 and not self._pieces[at + 1].completion.done():  # the last one has to be published soon
                self._space.record(but=1)
        return True

    def settle(self) -> None:
        """Publish what may be published, give the rest back. Call once `wait` has returned True."""
        try:
            self._end(self.pins.confirm())
            self._space.record()
            self._space.give_back()
        finally:
            self._let_go()

    def _end(self, bad: set[str]) -> None:
        over, until = self._pieces[self._ended : self._over], self._over
        self._space.end([(piece.flights, piece.deadline) for piece in over], bad)
        self._ended = until
        for piece in over:
            piece.flights = NONE

    def abandon(self, *, torn: bool = False) -> None:
        """Wait for copies under way, then give the space back and let go of the memory. Twice is once. ``torn``: by an
        interrupt, that may have come between a copy's beginning and the note of it."""
        settle([piece.completion for piece in self._pieces])
        if torn:
            self._engine.quiesce(self._stream)
        self._space.give_back()
        self.pins.close()

    def give_up(self, error: EgmError) -> None:
        """`abandon`, to be tried again when the Master only could not be asked; any other error is raised."""
        self.abandon()
        if not is_transient(error):
            raise error
        self._pieces = []
        for number in self._todo:
            if number not in self.outcomes:
                try:
                    key = self._requests[number].key
                except EgmError as wrong:
                    self.outcomes[number] = wrong
                    continue
                failed = InterruptedPut(error.message, where=error.where or f"object {key!r}", hint=error.hint)
                failed.__cause__ = error
                failed.facts["revoked"] = True if self._space.was_revoked(key) else None
                self.outcomes[number] = Again(failed)


def _others(everything: Sequence[int], at: Sequence[int]) -> list[int]:
    lined = set(at)
    return [each for each in everything if each not in lined]
