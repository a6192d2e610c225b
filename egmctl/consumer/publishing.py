"""The other end of a round of puts: the space that it holds at the Master, until that is published or given back.

Before PutEnd: the incarnation bound before reserving is still there, the Master connection is still the one that
granted the space, and the deadline has not passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from egmctl.consumer.engine import Engine
from egmctl.consumer.errors import InterruptedPut, ObjectNotFound, StaleAllocation
from egmctl.consumer.master_link import Answer
from egmctl.consumer.pins import Again
from egmctl.errors import EgmError

__all__ = ["NONE", "Flights", "Publishing"]

_TOGETHER = 256  # objects published by one request


class Flights(NamedTuple):
    """Objects on their way into space that was reserved together, as columns: a batch has hundreds. ``numbers`` are the
    requests', ``endpoints`` where the replicas of each lie, and ``epoch`` the connection that granted the space."""

    numbers: Sequence[int]
    keys: Sequence[str]
    sizes: Sequence[int]
    endpoints: Sequence[Collection[str]]
    epoch: int

    def only(self, chosen: Sequence[int]) -> Flights:
        """Those at these positions."""
        numbers, keys, sizes, endpoints = [[column[at] for at in chosen] for column in self[:4]]
        return Flights(numbers, keys, sizes, endpoints, self.epoch)  # type: ignore[arg-type]

    def joined(self, more: Flights) -> Flights:
        return Flights(
            [*self.numbers, *more.numbers],
            [*self.keys, *more.keys],
            [*self.sizes, *more.sizes],
            [*self.endpoints, *more.endpoints],
            self.epoch,
        )


NONE = Flights((), (), (), (), 0)


@dataclass(eq=False)
class _Ended:
    """What one request is to publish, until the answer to it was noted."""

    flights: Flights
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
        self._prepared: tuple[Flights, Callable[[], Answer[bool]]] | None = None

    def hold(self, keys: Iterable[str]) -> None:
        """From before they are asked for, until it is known that the Master holds nothing."""
        self._held.update(dict.fromkeys(keys))

    def refused(self, key: str) -> None:
        """The Master said no: there is nothing to give back."""
        self._held.pop(key, None)

    def was_revoked(self, key: str) -> bool:
        """Whether the Master has confirmed that it holds no space for it."""
        return key in self._revoked

    def end(self, granted: Iterable[tuple[Flights, float]], bad: set[str]) -> None:
        """Publish what was copied, as far as it may be: flights that were granted together, each with their deadline;
        ``bad`` are endpoints whose incarnation is not the one bound any more."""
        good: Flights | None = None
        for flights, deadline in granted:
            more = self._publishable(flights, deadline, bad)
            if good is not None and len(good.keys) + len(more.keys) > _TOGETHER:
                self._put_end(good)
                good = None
            good = more if good is None else good.joined(more)
        if good is not None:
            self._put_end(good)

    def prepare(self, flights: Flights) -> None:
        """Make the request that publishes just these, while they are being copied."""
        if flights.keys and (self._prepared is None or self._prepared[0] is not flights):
            self._prepared = flights, self._engine.master.publishing(flights.keys)

    def _publishable(self, flights: Flights, deadline: float, bad: set[str]) -> Flights:
        master = self._engine.master
        ours = master.connected() and master.epoch == flights.epoch
        late = time.monotonic() > deadline
        if ours and not late and not bad:
            return flights
        good = []
        for at, (number, key, endpoints) in enumerate(
            zip(flights.numbers, flights.keys, flights.endpoints, strict=True)
        ):
            gone = next((endpoint for endpoint in endpoints if endpoint in bad), None)
            if gone is not None:
                self._outcomes[number] = Again(StaleAllocation("the provider ended during the put", where=gone))
            elif late:
                self._outcomes[number] = self.expired(key)
            elif not ours:
                self._outcomes[number] = self.cut_off(key)
            else:
                good.append(at)
        return flights.only(good)

    def _put_end(self, flights: Flights) -> None:
        if not flights.keys:
            return
        ended = _Ended(flights)
        self._ended.append(ended)  # before it is sent: an interrupt may fall between
        try:
            prepared, send = self._prepared or (None, None)
            if prepared is not flights or send is None:
                send = self._engine.master.publishing(flights.keys)
            ended.answer = send()
        except EgmError as error:  # not handed over: it has no effect
            self._ended.remove(ended)
            for number, key in zip(flights.numbers, flights.keys, strict=True):
                self._outcomes[number] = self.cut_off(key, error)

    def record(self, *, but: int = 0) -> None:
        """Wait for the answers to what was published, the last ``but`` requests left out, and note them."""
        for ended in self._ended[: len(self._ended) - but]:
            if ended.answer is not None:
                self._note(ended.flights, ended.answer)
                # What was known of the objects is let go of now, while others are copied.
                ended.answer, ended.flights = None, NONE

    def _note(self, flights: Flights, answer: Answer[bool]) -> None:
        try:
            rows = answer()
        except EgmError as error:
            for number, key in zip(flights.numbers, flights.keys, strict=True):
                self._outcomes[number] = _unknown(key, error)
            self._let_go(flights.keys)  # it may be published: not ours to take back
            return
        if rows.count(True) == len(flights.keys):  # nearly always
            self._outcomes.update(zip(flights.numbers, flights.sizes, strict=True))
            self._let_go(flights.keys)
            return
        self._let_go(flights.keys)
        for number, key, nbytes, row in zip(flights.numbers, flights.keys, flights.sizes, rows, strict=True):
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

    def _let_go(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._held.pop(key, None)

    def give_back(self) -> None:
        """All space that is neither published nor on its way to be. Only when no copy into it runs any more."""
        for ended in self._ended:
            self._let_go(ended.flights.keys)
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
