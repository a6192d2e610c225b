"""Gets: locate, copy within the lease, wait, and believe the bytes only after asking again.

After the copy: the incarnation bound before locating is still there; the Master connection is still the one of the
first question (a Master started anew knows nothing of the old leases); and the object still lies at the same place
under the same replica number, which the Master never gives twice. The last also covers a lease that ran out, a removal
by force and an overwrite during the copy: in each the number is gone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from egmctl.consumer.engine import Engine, Part, Routes, settle, split_batch
from egmctl.consumer.errors import GetFailed, InvalidBuffer, StaleAllocation, StoreError, Unreachable
from egmctl.consumer.host_copy import Completion
from egmctl.consumer.master_link import Answer, Location, is_transient
from egmctl.consumer.pins import Again, Pins, Place, Target
from egmctl.errors import EgmError

__all__ = ["ReadRequest", "ReadRequests", "ReadRound", "as_store_error", "choose", "is_bound"]

Layout = Callable[[int], tuple[int, Sequence[Part]]]
"""From an object's size to (the result to return, which part of it goes where). Raises what is wrong with it."""


class ReadRequest(NamedTuple):
    """One object to be read: all of it into ``parts``, or as ``layout`` says where that is given."""

    key: str
    parts: Sequence[Part] = ()
    layout: Layout | None = None

    def laid_out(self, size: int) -> tuple[int, Sequence[Part]]:
        if self.layout is not None:
            return self.layout(size)
        parts = self.parts
        if len(parts) == 1 and parts[0].nbytes == size:  # mostly
            return size, parts
        capacity = sum(part.nbytes for part in parts)
        if capacity < size:
            raise InvalidBuffer(
                f"has {size} bytes and the buffer given for it {capacity}",
                where=f"object {self.key!r}",
                hint="give a larger buffer, or get a range",
            )
        used = []
        for part in parts:
            if part.offset >= size:
                break
            used.append(part._replace(nbytes=min(part.nbytes, size - part.offset)))
        return size, used


class _Flight(NamedTuple):
    number: int  # of the request
    location: Location
    place: Place
    result: int


_make: Any = tuple.__new__  # a named tuple's own constructor takes twice as long


class _Piece:
    """What was asked for and is copied together."""

    __slots__ = ("completion", "flights", "judged", "lease_until", "moved", "question")

    def __init__(self, flights: list[_Flight], completion: Completion) -> None:
        self.flights = flights
        self.completion = completion
        self.lease_until = min([flight.location.lease_until for flight in flights])
        self.moved: set[int] = set()
        self.question: Answer[Location | None] | None = None
        self.judged = False


class ReadRequests(Protocol):
    """Requests by number. Asking for one may raise what is wrong with it, an `EgmError`."""

    def __len__(self) -> int: ...
    def __getitem__(self, at: int, /) -> ReadRequest: ...


class ReadRound:
    """One attempt at some requests. `start` locates and begins to copy, `wait` waits, `settle` decides; `outcomes` then
    holds for each index its result, an error, or `Again`. `abandon` undoes it at any point."""

    def __init__(
        self,
        engine: Engine,
        requests: ReadRequests,
        stream: int | None = None,
        todo: Sequence[int] | None = None,
    ) -> None:
        """``todo`` are the numbers of the requests; all of them, unless given."""
        self._engine = engine
        self.driver = engine.driver
        self._requests = requests
        self._todo = range(len(requests)) if todo is None else todo
        self._stream = stream
        self._pieces: list[_Piece] = []
        self._over = 0  # pieces whose copies were over while others were still located
        self.pins = Pins(engine.bindings, engine.mappings)
        self.outcomes: dict[int, int | EgmError | Again] = {}

    def start(self) -> None:
        self._start(self._todo)
        # What lies at endpoints that were bound only now is located once more, this time after binding.
        late = [number for number, outcome in self.outcomes.items() if is_bound(outcome)]
        if late:
            for number in late:
                del self.outcomes[number]
            self._start(sorted(late))

    def _start(self, todo: Sequence[int]) -> None:
        pieces = [todo[each] for each in split_batch(len(todo))]
        asked: deque[tuple[list[tuple[int, ReadRequest]], Answer[Location] | None]] = deque()
        sent = 0
        for at in range(len(pieces)):
            # Two to begin with, so that the first is soon there, and both are copied before more is asked for.
            while sent < min(len(pieces), 2 if at < 2 else at + 2):
                asked.append(self._ask(pieces[sent]))
                sent += 1
            requests, answer = asked.popleft()
            if answer is not None:
                self._launch(requests, answer())
            while self._over < len(self._pieces) and self._pieces[self._over].completion.done():
                self._ask_again(self._pieces[self._over])
                self._over += 1

    def _ask(self, todo: Sequence[int]) -> tuple[list[tuple[int, ReadRequest]], Answer[Location] | None]:
        requests: list[tuple[int, ReadRequest]] = []
        for number in todo:
            try:
                requests.append((number, self._requests[number]))
            except EgmError as error:
                self.outcomes[number] = error
        if not requests:
            return requests, None
        return requests, self._engine.master.locate([request.key for _, request in requests])

    def _launch(self, requests: Sequence[tuple[int, ReadRequest]], answers: Sequence[Location | EgmError]) -> None:
        flights: list[_Flight] = []
        routes = self._engine.routes()
        for (number, request), located in zip(requests, answers, strict=True):
            if self._launch_simple(number, request, located, routes, flights):
                continue
            try:
                if isinstance(located, EgmError):
                    raise Again(as_store_error(located)) if is_transient(located) else located
                place, target = choose(self.pins, located)
                result, parts = request.laid_out(place.nbytes)
                routes.add_all([(target, part) for part in parts], write=False)
            except (EgmError, Again) as error:
                self.outcomes[number] = error
                continue
            flights.append(_Flight(number, located, place, result))
        if flights:
            try:
                completion = self._engine.copy(routes, self._stream)
            except EgmError as error:
                self._fail(flights, error)
                return
            self._pieces.append(_Piece(flights, completion))

    def _launch_simple(
        self, number: int, request: ReadRequest, located: Location | EgmError, routes: Routes, flights: list[_Flight]
    ) -> bool:
        """What most objects of a batch are: whole, into one buffer of their size, out of a chunk in use already."""
        parts = request.parts
        if located.__class__ is not Location or len(parts) != 1 or request.layout is not None:
            return False
        place = located.places[0] if located.places else None
        part = parts[0]
        if place is None or part.nbytes != place.nbytes:
            return False
        near = self.pins.near(place, located.asked_at)
        if near is None or not routes.add_near(near, place.address, part, write=False):
            return False
        flights.append(_make(_Flight, (number, located, place, part.nbytes)))
        return True

    def done(self) -> bool:
        return all(piece.completion.done() for piece in self._pieces)

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
                    piece.flights = []
                    break
                if until is not None and time.monotonic() >= until:
                    return False
                self._renew(piece)
            self._ask_again(piece)  # while the pieces behind it are still being copied
            if before is not None and before.flights and before.question is not None and not before.judged:
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
        if piece.flights and piece.question is None:
            with suppress(EgmError):  # `settle` tries it once more
                piece.question = self._look_again(piece)

    def _look_again(self, piece: _Piece) -> Answer[Location | None]:
        return self._engine.master.look_again([flight.location for flight in piece.flights])

    def settle(self) -> None:
        """Judge what was copied by what the Master says after the copy. Call once `wait` has returned True."""
        try:
            for piece in self._pieces:
                if piece.flights and not piece.judged:
                    self._judge(piece, (piece.question or self._look_again(piece))())
            bad = self.pins.confirm() if self._pieces else set()
            if bad:
                self._disbelieve(bad)
        finally:
            self.pins.close()

    def _disbelieve(self, bad: set[str]) -> None:
        for piece in self._pieces:
            for flight in piece.flights:
                if flight.place.endpoint in bad and isinstance(self.outcomes.get(flight.number), int):
                    self.outcomes[flight.number] = Again(
                        StaleAllocation("the provider ended during the copy", where=flight.place.endpoint)
                    )

    def _judge(self, piece: _Piece, answers: Sequence[Location | EgmError | None]) -> None:
        piece.judged = True
        if not piece.moved and answers.count(None) == len(answers):  # nearly always: nothing has changed
            self.outcomes.update([(flight.number, flight.result) for flight in piece.flights])
            return
        for flight, answer in zip(piece.flights, answers, strict=True):
            if isinstance(answer, EgmError):
                self.outcomes[flight.number] = (
                    Again(as_store_error(answer)) if is_transient(answer) else _changed(flight, answer)
                )
            elif flight.number in piece.moved or (
                answer is not None and not answer.still_holds(flight.place, flight.location)
            ):
                self.outcomes[flight.number] = _changed(flight, None)
            else:
                self.outcomes[flight.number] = flight.result

    def abandon(self) -> None:
        """Wait for copies under way, then let go of the memory; nothing is believed."""
        settle([piece.completion for piece in self._pieces])
        self.pins.close()

    def _fail(self, flights: Sequence[_Flight], error: EgmError) -> None:
        for flight in flights:
            self.outcomes[flight.number] = error


def is_bound(outcome: object) -> bool:
    """Whether the same question can be asked again at once, in the same round."""
    return isinstance(outcome, Again) and outcome.bound


def choose(pins: Pins, location: Location) -> tuple[Place, Target]:
    """The first replica that can be reached. Raises `Again` when a later attempt may reach one, else `Unreachable`."""
    reasons = list(location.elsewhere)
    later: Again | None = None
    for place in location.places:
        try:
            return place, pins.resolve(place, location.asked_at)
        except Again as error:
            if later is None or (error.at_once and not later.bound):
                later = error
            reasons.append(str(error.error))
        except EgmError as error:
            reasons.append(str(error))
    if later is not None:
        raise later
    raise Unreachable(
        "no replica lies in memory that can be reached directly: " + ("; ".join(reasons) or "it has none in memory"),
        where=f"object {location.key!r}",
        hint="read it through a Mooncake client",
        facts={"reasons": reasons},
    )


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
