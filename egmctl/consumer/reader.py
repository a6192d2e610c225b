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

from egmctl.consumer.engine import Engine, Part, settle, split_batch
from egmctl.consumer.errors import GetFailed, StaleAllocation, StoreError, Unreachable
from egmctl.consumer.host_copy import Completion
from egmctl.consumer.master_link import Answer, Location, is_transient
from egmctl.consumer.pins import Again, Pins, Place, Target
from egmctl.errors import EgmError

__all__ = ["ReadRequest", "ReadRound", "as_store_error", "choose", "is_bound"]

Layout = Callable[[int], tuple[int, Sequence[Part]]]
"""From an object's size to (the result to return, which part of it goes where). Raises what is wrong with it."""


@dataclass
class ReadRequest:
    """One object to be read."""

    key: str
    layout: Layout


@dataclass
class _Flight:
    index: int
    location: Location
    place: Place
    target: Target
    result: int


@dataclass
class _Piece:
    flights: list[_Flight]
    completion: Completion
    lease_until: float = field(default=0.0)
    moved: set[int] = field(default_factory=set)
    question: Answer[Location] | None = None


class ReadRound:
    """One attempt at some requests. `start` locates and begins to copy, `wait` waits, `settle` decides; `outcomes` then
    holds for each index its result, an error, or `Again`. `abandon` undoes it at any point."""

    def __init__(self, engine: Engine, requests: Sequence[tuple[int, ReadRequest]], stream: int | None = None) -> None:
        self._engine = engine
        self._requests = requests
        self._stream = stream
        self._pieces: list[_Piece] = []
        self.pins = Pins(engine.bindings, engine.mappings)
        self.outcomes: dict[int, int | EgmError | Again] = {}

    def start(self) -> None:
        self._start(self._requests)
        # What lies at endpoints that were bound only now is located once more, this time after binding.
        late = [(index, request) for index, request in self._requests if is_bound(self.outcomes.get(index))]
        if late:
            for index, _ in late:
                del self.outcomes[index]
            self._start(late)

    def _start(self, requests: Sequence[tuple[int, ReadRequest]]) -> None:
        master = self._engine.master
        pieces = [requests[each] for each in split_batch(len(requests))]
        answers = [master.locate([request.key for _, request in piece]) for piece in pieces]
        for piece, answer in zip(pieces, answers, strict=True):
            self._launch(piece, answer)

    def _launch(self, requests: Sequence[tuple[int, ReadRequest]], answer: Answer[Location]) -> None:
        flights: list[_Flight] = []
        routes = self._engine.routes()
        for (index, request), located in zip(requests, answer(), strict=True):
            try:
                if isinstance(located, EgmError):
                    raise Again(as_store_error(located)) if is_transient(located) else located
                place, target = choose(self.pins, located)
                result, parts = request.layout(place.nbytes)
                for part in parts:
                    routes.add(target, part, write=False)
            except (EgmError, Again) as error:
                self.outcomes[index] = error
                continue
            flights.append(_Flight(index, located, place, target, result))
        if flights:
            try:
                completion = self._engine.copy(routes, self._stream)
            except EgmError as error:
                self._fail(flights, error)
                return
            self._pieces.append(_Piece(flights, completion, min(each.location.lease_until for each in flights)))

    def done(self) -> bool:
        return all(piece.completion.done() for piece in self._pieces)

    def wait(self, timeout: float | None) -> bool:
        """Until the copies are over; a lease that is half gone meanwhile is asked for again."""
        until = None if timeout is None else time.monotonic() + timeout
        for piece in self._pieces:
            while True:
                now = time.monotonic()
                left = None if until is None else max(0.0, until - now)
                patience = max(0.05, (piece.lease_until - now) / 2)
                try:
                    if piece.completion.wait(patience if left is None else min(left, patience)):
                        self._ask_again(piece)  # while the pieces behind it are still being copied
                        break
                except EgmError as error:
                    self._fail(piece.flights, error)
                    piece.flights = []
                    break
                if until is not None and time.monotonic() >= until:
                    return False
                self._renew(piece)
        return True

    def _renew(self, piece: _Piece) -> None:
        piece.lease_until = time.monotonic() + 60.0  # should the Master not answer: asked again after the copy
        staying = [each for each in piece.flights if each.index not in piece.moved]
        if not staying:
            return
        try:
            answers = self._engine.master.locate([self._key(each) for each in staying])()
        except EgmError:
            return
        until = [piece.lease_until]
        for flight, answer in zip(staying, answers, strict=True):
            if isinstance(answer, Location) and answer.still_holds(flight.place, flight.location):
                until.append(answer.lease_until)
            elif isinstance(answer, Location) or not is_transient(answer):
                piece.moved.add(flight.index)
        piece.lease_until = min(until)

    def _ask_again(self, piece: _Piece) -> None:
        if piece.flights and piece.question is None:
            with suppress(EgmError):  # `settle` tries it once more
                piece.question = self._engine.master.locate([self._key(each) for each in piece.flights])

    def settle(self) -> None:
        """Judge what was copied by what the Master says after the copy. Call once `wait` has returned True."""
        try:
            for piece in self._pieces:
                if piece.flights:
                    question = piece.question
                    if question is None:
                        question = self._engine.master.locate([self._key(each) for each in piece.flights])
                    self._judge(piece, question())
            bad = self.pins.confirm() if self._pieces else set()
            for piece in self._pieces:
                for flight in piece.flights:
                    if flight.place.endpoint in bad and isinstance(self.outcomes.get(flight.index), int):
                        self.outcomes[flight.index] = Again(
                            StaleAllocation("the provider ended during the copy", where=flight.place.endpoint)
                        )
        finally:
            self.pins.close()

    def _judge(self, piece: _Piece, answers: Sequence[Location | EgmError]) -> None:
        for flight, answer in zip(piece.flights, answers, strict=True):
            if isinstance(answer, EgmError):
                self.outcomes[flight.index] = (
                    Again(as_store_error(answer)) if is_transient(answer) else _changed(flight, answer)
                )
            elif flight.index in piece.moved or not answer.still_holds(flight.place, flight.location):
                self.outcomes[flight.index] = _changed(flight, None)
            else:
                self.outcomes[flight.index] = flight.result

    def abandon(self) -> None:
        """Wait for copies under way, then let go of the memory; nothing is believed."""
        settle([piece.completion for piece in self._pieces])
        self.pins.close()

    def _key(self, flight: _Flight) -> str:
        return flight.location.key

    def _fail(self, flights: Sequence[_Flight], error: EgmError) -> None:
        for flight in flights:
            self.outcomes[flight.index] = error


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
