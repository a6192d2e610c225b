"""Gets: locate, copy within the lease, wait, and believe the bytes only after asking again.

After the copy: the incarnation bound before locating is still there; the Master connection is still the one of the
first question (a Master started anew knows nothing of the old leases); and the object still lies at the same place
under the same replica number, which the Master never gives twice. The last also covers a lease that ran out, a removal
by force and an overwrite during the copy: in each the number is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from egmctl.consumer.choose import NOT_THE_PLACE, Failures, choose
from egmctl.consumer.engine import Engine, Routes, settle
from egmctl.consumer.errors import (
    GetFailed,
    StaleAllocation,
    StoreError,
)
from egmctl.consumer.host_copy import Completion
from egmctl.consumer.master_link import Asked, Location, is_transient
from egmctl.consumer.pins import Again, Place
from egmctl.consumer.requests import Plain, ReadRequests
from egmctl.consumer.rounds import Round
from egmctl.errors import EgmError
from egmctl.mooncake.calls import Spots

__all__ = ["ReadRound", "as_store_error"]


class _Flight(NamedTuple):
    number: int  # of the request
    location: Location
    place: Place
    result: int


class _Asked(NamedTuple):
    """A question after the requests of these numbers."""

    numbers: Sequence[int]
    asked: Asked

    def send(self) -> None:
        self.asked.send()

    def wait(self) -> None:
        self.asked.wait()


def _usual(numbers: Sequence[int], answers: Sequence[Location | EgmError], results: Sequence[int]) -> list[_Flight]:
    """Where each object has one replica."""
    return [
        _Flight(number, location, location.places[0], result)
        for number, location, result in zip(numbers, answers, results, strict=True)
        if isinstance(location, Location)  # as are all of them
    ]


@dataclass
class _Piece:
    """What is copied together: ``results`` of the requests ``numbers``. ``asked`` is the question, when all that it
    named is copied; ``said`` what was answered of each, made of that when it is looked at."""

    numbers: Sequence[int]
    results: Sequence[int]
    endpoints: set[str]
    lease_until: float
    completion: Completion
    asked: Asked | None
    said: Sequence[_Flight] | None = None
    moved: set[int] = field(default_factory=set)
    question: Callable[[], Sequence[Location | EgmError] | None] | None = None
    judged: bool = False

    @property
    def flights(self) -> Sequence[_Flight]:
        if self.said is None:
            self.said = _usual(self.numbers, self.asked(), self.results) if self.asked is not None else ()
        return self.said

    def close(self) -> None:
        """It is judged: what was known of the objects is let go of, while others are copied."""
        self.judged = True
        self.said, self.asked, self.question = (), None, None


class ReadRound(Round[_Piece, _Asked]):
    """`start` locates and begins to copy, `settle` decides what to believe."""

    def __init__(
        self,
        engine: Engine,
        requests: ReadRequests,
        stream: int | None = None,
        todo: Sequence[int] | None = None,
        failures: Failures | None = None,
    ) -> None:
        """``todo`` are the numbers of the requests; all of them, unless given. ``failures`` are known from rounds
        before, and added to."""
        super().__init__(engine, range(len(requests)) if todo is None else todo, stream)
        self._requests = requests
        self.failures: Failures = {} if failures is None else failures
        self._over = 0  # pieces whose copies were over while others were still located

    def _question(self, numbers: Sequence[int]) -> _Asked:
        return _Asked(numbers, self._engine.master.locating(self._requests.keys(numbers)))

    def _launch(self, asked: _Asked) -> None:
        self._copy_located(*asked)
        while self._over < len(self._pieces) and self._pieces[self._over].completion.done():
            self._ask_again(self._pieces[self._over])
            self._over += 1

    def _copy_located(self, numbers: Sequence[int], asked: Asked) -> None:
        routes = self._engine.routes()
        plain = None if self.failures else self._requests.plain(numbers)
        at: Sequence[int] = ()
        if plain is not None:
            at, spots = asked.columns()
            plain = plain.only(at)
            if not at or not self._line_up(plain, spots, asked.asked_at, routes):
                at = ()
            elif len(at) == len(numbers):
                try:
                    completion = self._engine.copy(routes, self._stream)
                except EgmError as error:
                    self._fail(_usual(numbers, asked(), plain.sizes), error)
                    return
                until = asked.asked_at + min(spots.leases) / 1000
                self._pieces.append(_Piece(numbers, plain.sizes, set(spots.te_endpoints), until, completion, asked))
                return
        answers = asked()
        flights: list[_Flight] = []
        if plain is not None and at:
            flights = _usual([numbers[each] for each in at], [answers[each] for each in at], plain.sizes)
        lined = set(at)
        apart: dict[str, tuple[Routes, list[_Flight]]] = {}
        for position, (number, answer) in enumerate(zip(numbers, answers, strict=True)):
            if position in lined:
                continue
            try:
                self._launch_one(number, answer, routes, flights, apart)
            except (EgmError, Again) as error:
                self.outcomes[number] = error
        self._copy(routes, flights, asked if not lined and len(flights) == len(numbers) else None)
        for its_routes, its_flights in apart.values():
            self._copy(its_routes, its_flights, None)

    def _line_up(self, plain: Plain, spots: Spots, asked_at: float, routes: Routes) -> bool:
        """What most of a batch is: each whole, into one buffer of its size, out of a chunk that can be reached. All of
        them are added to ``routes``, or none."""
        fragments, column = routes.line(plain.buffer)
        pool = self.pins.line_up(spots, plain.sizes, asked_at, column)
        if pool is None:
            return False
        fragments += zip(plain.addresses, pool, plain.sizes, strict=True)
        return True

    def _launch_one(
        self,
        number: int,
        located: Location | EgmError,
        routes: Routes,
        flights: list[_Flight],
        apart: dict[str, tuple[Routes, list[_Flight]]],
    ) -> None:
        request = self._requests[number]
        if isinstance(located, EgmError):
            raise Again(as_store_error(located)) if is_transient(located) else located
        place, target = choose(self.pins, located, self.failures.get(number, ()))
        result, parts = request.laid_out(place.nbytes)
        if number in self.failures:
            if place.endpoint not in apart:
                apart[place.endpoint] = self._engine.routes(), []
            routes, flights = apart[place.endpoint]
        routes.add_all([(target, part) for part in parts], write=False)
        flights.append(_Flight(number, located, place, result))

    def _copy(self, routes: Routes, flights: list[_Flight], asked: Asked | None) -> None:
        if not flights:
            return
        try:
            completion = self._engine.copy(routes, self._stream)
        except EgmError as error:
            self._fail(flights, error)
            return
        numbers = [flight.number for flight in flights]
        results = [flight.result for flight in flights]
        endpoints = {flight.place.endpoint for flight in flights}
        until = min([flight.location.lease_until for flight in flights])
        self._pieces.append(_Piece(numbers, results, endpoints, until, completion, asked, flights))

    def wait(self, timeout: float | None) -> bool:
        """Until the copies are over; a lease that is half gone meanwhile is asked for again."""
        until = None if timeout is None else time.monotonic() + timeout
        before: _Piece | None = None
        for piece in self._pieces:
            while True:
                now = time.monotonic()
                patience = max(0.05, (piece.lease_until - now) / 2)
                try:
                    if piece.completion.wait(patience if until is None else min(max(0.0, until - now), patience)):
                        break
                except EgmError as error:
                    self._fail(piece.flights, error)
                    piece.close()
                    break
                if until is not None and time.monotonic() >= until:
                    return False
                self._renew(piece)
            self._ask_again(piece)  # while the pieces behind it are still being copied
            if before is not None and before.question is not None and not before.judged:
                with suppress(EgmError):  # `settle` tries it once more
                    self._judge(before, before.question())
            before = piece
        return True

    def _renew(self, piece: _Piece) -> None:
        piece.lease_until = time.monotonic() + 60.0  # should the Master not answer: asked again after the copy
        staying = [each for each in piece.flights if each.number not in piece.moved]
        if not staying:
            return
        try:
            answers = self._engine.master.locate([each.location.key for each in staying])()
        except EgmError:
            return
        until = [piece.lease_until]
        for flight, answer in zip(staying, answers, strict=True):
            if isinstance(answer, Location) and answer.still_holds(flight.place, flight.location):
                until.append(answer.lease_until)
            elif isinstance(answer, Location) or not is_transient(answer):
                piece.moved.add(flight.number)
        piece.lease_until = min(until)

    def _ask_again(self, piece: _Piece) -> None:
        if not piece.judged and piece.question is None:
            with suppress(EgmError):  # `settle` tries it once more
                piece.question = self._look_again(piece)

    def _look_again(self, piece: _Piece) -> Callable[[], Sequence[Location | EgmError] | None]:
        if piece.asked is not None:
            return piece.asked.again()
        return self._engine.master.locate([flight.location.key for flight in piece.flights])

    def settle(self) -> None:
        """Judge what was copied by what the Master says after the copy. Call once `wait` has returned True."""
        try:
            for piece in self._pieces:
                if not piece.judged:
                    self._judge(piece, (piece.question or self._look_again(piece))())
            bad = self.pins.confirm() if self._pieces else set()
            if bad:
                self._disbelieve(bad)
        finally:
            self._let_go()

    def _disbelieve(self, bad: set[str]) -> None:
        for piece in self._pieces:
            gone = piece.endpoints & bad
            for number in piece.numbers if gone else ():
                if not isinstance(self.outcomes.get(number), (EgmError, Again)):
                    self.outcomes[number] = Again(
                        StaleAllocation("the provider ended during the copy", where=", ".join(sorted(gone)))
                    )

    def _judge(self, piece: _Piece, answers: Sequence[Location | EgmError | None] | None) -> None:
        if answers is None and not piece.moved:  # nearly always: nothing has changed
            self.outcomes.update(zip(piece.numbers, piece.results, strict=True))
        else:
            flights = piece.flights
            for flight, answer in zip(flights, answers or [None] * len(flights), strict=True):
                self.outcomes[flight.number] = self._verdict(piece, flight, answer)
        piece.close()

    def _verdict(self, piece: _Piece, flight: _Flight, answer: Location | EgmError | None) -> int | EgmError | Again:
        if isinstance(answer, EgmError):
            return Again(as_store_error(answer)) if is_transient(answer) else _changed(flight, answer)
        if flight.number in piece.moved or (
            answer is not None and not answer.still_holds(flight.place, flight.location)
        ):
            return _changed(flight, None)
        return flight.result

    def abandon(self, *, torn: bool = False) -> None:
        """Wait for copies under way, then let go of the memory; nothing is believed. ``torn``: by an interrupt, that
        may have come between a copy's beginning and the note of it."""
        settle([piece.completion for piece in self._pieces])
        if torn:
            self._engine.quiesce(self._stream)
        self.pins.close()

    def give_up(self, error: EgmError) -> None:
        """`abandon`, to be tried again when the Master only could not be asked; any other error is raised."""
        self.abandon()
        if not is_transient(error):
            raise error
        self._pieces = []
        for number in self._todo:
            self.outcomes[number] = Again(as_store_error(error))

    def _fail(self, flights: Sequence[_Flight], error: EgmError) -> None:
        """Where an object has another replica, that is tried next; the reason is kept for when there is none left. What
        was copied from several providers is first copied again apart, which shows whose fault it was."""
        mixed = len({flight.place.endpoint for flight in flights}) > 1
        for flight in flights:
            self.outcomes[flight.number] = error
            if isinstance(error, NOT_THE_PLACE) or not (mixed or len(flight.location.places) > 1):
                continue
            failed = self.failures.setdefault(flight.number, [])
            if not mixed:
                failed.append((flight.place, error))
            self.outcomes[flight.number] = Again(as_store_error(error), at_once=True)


def _changed(flight: _Flight, error: EgmError | None) -> Again:
    what = f"the Master now says {error.message}" if error else "it moved, or the Master was restarted"
    return Again(
        GetFailed(f"changed while it was read: {what}", where=f"object {flight.location.key!r}", hint="read it again"),
        at_once=True,
    )


def as_store_error(error: EgmError) -> StoreError:
    if isinstance(error, StoreError):
        return error
    failed = GetFailed(error.message, where=error.where, hint=error.hint, facts=error.facts)
    failed.__cause__ = error
    return failed
