"""The other end of a round of puts: the space that it holds at the Master, until that is published or given back.

Before PutEnd: the incarnation bound before reserving is still there, the Master connection is still the one that
granted the space, and the deadline has not passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from egmctl.consumer.engine import Engine
from egmctl.consumer.errors import InterruptedPut, ObjectNotFound, StaleAllocation
from egmctl.consumer.master_link import Answer, Reserved
from egmctl.consumer.pins import Again
from egmctl.errors import EgmError

__all__ = ["Flight", "Publishing"]

_TOGETHER = 256  # objects published by one request


class Flight(NamedTuple):
    """An object on its way into the space reserved for it; ``number`` is the request's."""

    number: int
    key: str
    nbytes: int
    reserved: Reserved


@dataclass(eq=False)
class _Ended:
    """What one request is to publish, until the answer to it was noted."""

    flights: Sequence[Flight]
    answer: Answer[bool] | None = None


class Publishing:
    """Of one round, whose ``outcomes`` it adds to: by number the size, an error, or `Again`."""

    def __init__(self, engine: Engine, outcomes: dict[int, int | EgmError | Again]) -> None:
        self._engine = engine
        self._outcomes = outcomes
        self._held: dict[str, None] = {}
        self._revoked: set[str] = set()
        self._told: dict[str, InterruptedPut] = {}  # by key: what says whether its space was given back
        self._ended: list[_Ended] = []
        self._prepared: tuple[Sequence[Flight], Callable[[], Answer[bool]]] | None = None

    def hold(self, keys: Iterable[str]) -> None:
        """From before they are asked for, until it is known that the Master holds nothing."""
        self._held.update(dict.fromkeys(keys))

    def refused(self, key: str) -> None:
        """The Master said no: there is nothing to give back."""
        self._held.pop(key, None)

    def was_revoked(self, key: str) -> bool:
        """Whether the Master has confirmed that it holds no space for it."""
        return key in self._revoked

    def end(self, granted: Iterable[tuple[Sequence[Flight], float]], bad: set[str]) -> None:
        """Publish what was copied, as far as it may be: flights that were granted together, each with their deadline;
        ``bad`` are endpoints whose incarnation is not the one bound any more."""
        good: Sequence[Flight] = ()
        for flights, deadline in granted:
            more = self._publishable(flights, deadline, bad)
            if len(good) + len(more) > _TOGETHER:
                self._put_end(good)
                good = ()
            good = [*good, *more] if good else more
        self._put_end(good)

    def prepare(self, flights: Sequence[Flight]) -> None:
        """Make the request that publishes just these, while they are being copied."""
        if flights:
            self._prepared = flights, self._engine.master.publishing([flight.key for flight in flights])

    def _publishable(self, flights: Sequence[Flight], deadline: float, bad: set[str]) -> Sequence[Flight]:
        master = self._engine.master
        connected, late = master.connected(), time.monotonic() > deadline
        if connected and not late and not bad and flights and master.epoch == flights[0].reserved.epoch:
            return flights  # they were granted together
        good = []
        for flight in flights:
            number, key, _, reserved = flight
            gone = None if not bad else next((each.endpoint for each in reserved.places if each.endpoint in bad), None)
            if gone is not None:
                self._outcomes[number] = Again(StaleAllocation("the provider ended during the put", where=gone))
            elif late:
                self._outcomes[number] = self.expired(key)
            elif not connected or master.epoch != reserved.epoch:
                self._outcomes[number] = self.cut_off(key)
            else:
                good.append(flight)
        return good

    def _put_end(self, flights: Sequence[Flight]) -> None:
        if not flights:
            return
        ended = _Ended(flights)
        self._ended.append(ended)  # before it is sent: an interrupt may fall between
        try:
            prepared, send = self._prepared or ((), None)
            if prepared is not flights or send is None:
                send = self._engine.master.publishing([flight.key for flight in flights])
            ended.answer = send()
        except EgmError as error:  # not handed over: it has no effect
            self._ended.remove(ended)
            for number, key, _, _ in flights:
                self._outcomes[number] = self.cut_off(key, error)

    def record(self, *, but: int = 0) -> None:
        """Wait for the answers to what was published, the last ``but`` requests left out, and note them."""
        for ended in self._ended[: len(self._ended) - but]:
            if ended.answer is not None:
                self._note(ended.flights, ended.answer)
                # What was known of the objects is let go of now, while others are copied.
                ended.answer, ended.flights = None, ()

    def _note(self, flights: Sequence[Flight], answer: Answer[bool]) -> None:
        try:
            rows = answer()
        except EgmError as error:
            for number, key, _, _ in flights:
                self._held.pop(key, None)  # it may be published: not ours to take back
                self._outcomes[number] = _unknown(key, error)
            return
        if rows.count(True) == len(flights):  # nearly always
            self._outcomes.update([(flight[0], flight[2]) for flight in flights])
            for flight in flights:
                self._held.pop(flight[1], None)
            return
        for (number, key, nbytes, _), row in zip(flights, rows, strict=True):
            self._held.pop(key, None)
            if not isinstance(row, EgmError):
                self._outcomes[number] = nbytes
            else:
                refused = InterruptedPut(
                    f"not published: {row.message}",
                    where=f"object {key!r}",
                    hint="the Master gave the space up meanwhile (discarded, unmounted or restarted): put it again",
                    facts={"revoked": True if isinstance(row, ObjectNotFound) else None},
                )
                # It knows no such object, so there is nothing that trying again could harm.
                self._outcomes[number] = Again(refused) if isinstance(row, ObjectNotFound) else refused

    def give_back(self) -> None:
        """All space that is neither published nor on its way to be. Only when no copy into it runs any more."""
        for ended in self._ended:
            for flight in ended.flights:
                self._held.pop(flight.key, None)
        self.revoke(list(self._held))

    def revoke(self, keys: Sequence[str]) -> None:
        """Give space back. What is said of a put that failed says so where the Master has confirmed it."""
        if not keys:
            return
        confirmed = self._engine.master.put_revoke(keys)
        self._revoked |= confirmed
        for key in keys:
            self._held.pop(key, None)
            told = self._told.pop(key, None)
            if told is not None and key in confirmed:
                told.facts["revoked"] = True

    # what became of a put that was not published

    def expired(self, key: str) -> InterruptedPut:
        return self._interrupted(
            key,
            f"took longer than the {self._engine.timing.put_deadline:g} s within which a put may be published",
            "put smaller objects, or raise put_deadline, staying below the Master's lease and discard times",
        )

    def less(self, key: str, nbytes: int) -> InterruptedPut:
        return self._interrupted(
            key,
            f"the Master gave less space than the {nbytes} bytes it was asked for",
            "see whether this version of the Master is supported",
        )

    def cut_off(self, key: str, error: EgmError | None = None) -> Again:
        return Again(
            self._interrupted(
                key,
                "the connection to the Master that granted the space broke" + (f": {error.message}" if error else ""),
                "see whether the Master runs; put the object again",
            )
        )

    def _interrupted(self, key: str, message: str, hint: str) -> InterruptedPut:
        error = InterruptedPut(message, where=f"object {key!r}", hint=hint, facts={"revoked": None})
        self._told[key] = error
        return error


def _unknown(key: str, error: EgmError) -> InterruptedPut:
    interrupted = InterruptedPut(
        f"whether it was published is not known: {error.message}",
        where=f"object {key!r}",
        hint="ask exists(); put it again if it is not there",
        facts={"revoked": None},
    )
    interrupted.__cause__ = error
    return interrupted
