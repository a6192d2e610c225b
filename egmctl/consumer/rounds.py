"""What one attempt at some gets or puts is, of whichever kind: its pieces are asked for in turn and then copied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from egmctl.consumer.engine import Asking, Engine, in_turn, split_batch
from egmctl.consumer.host_copy import Completion
from egmctl.consumer.pins import Again
from egmctl.errors import EgmError

__all__ = ["Round"]


class Copied(Protocol):
    """What is copied together."""

    completion: Completion


P = TypeVar("P", bound=Copied)
A = TypeVar("A", bound=Asking)


class Round(ABC, Generic[P, A]):
    """`start` asks and begins to copy, `wait` waits, `settle` ends it; ``outcomes`` then holds for each number its
    result, an error, or `Again`. `abandon` undoes it at any point."""

    def __init__(self, engine: Engine, todo: Sequence[int], stream: int | None) -> None:
        """``todo`` are the numbers of the requests."""
        self._engine = engine
        self.driver = engine.driver
        self._todo = todo
        self._stream = stream
        self._pieces: list[P] = []
        self.pins = engine.pins()
        self.outcomes: dict[int, int | EgmError | Again] = {}

    def begin(self) -> None:
        """`start`; where the Master cannot be asked, that is for a later round to do."""
        try:
            self.start()
        except EgmError as error:
            self.give_up(error)

    def start(self) -> None:
        self._start(self._todo)
        # What lies at endpoints that were bound only now is asked for once more, this time after binding (space that
        # was reserved there was given back).
        late = [number for number, outcome in self.outcomes.items() if isinstance(outcome, Again) and outcome.bound]
        if late:
            for number in late:
                del self.outcomes[number]
            self._start(sorted(late))

    def _start(self, todo: Sequence[int]) -> None:
        pieces = [todo[each] for each in split_batch(len(todo))]
        for asked in in_turn(pieces, self._question, self._expect, self._ran_dry):
            self._launch(asked)
        self.pins.expect_no_more()

    @abstractmethod
    def _question(self, numbers: Sequence[int]) -> A:
        """After the requests of these numbers, not sent yet."""

    @abstractmethod
    def _launch(self, asked: A) -> None:
        """Begin to copy what was answered."""

    def _expect(self) -> None:
        self.pins.expect(self._engine.usual)

    def _ran_dry(self) -> bool:
        return bool(self._pieces) and self._pieces[-1].completion.done()

    def done(self) -> bool:
        return all(piece.completion.done() for piece in self._pieces)

    @abstractmethod
    def wait(self, timeout: float | None) -> bool: ...

    @abstractmethod
    def settle(self) -> None:
        """Call once `wait` has returned True."""

    def _let_go(self) -> None:
        """At the end of `settle`."""
        self._engine.usual = self.pins.used()
        self.pins.close()

    @abstractmethod
    def abandon(self, *, torn: bool = False) -> None: ...

    @abstractmethod
    def give_up(self, error: EgmError) -> None:
        """`abandon`, to be tried again when the Master only could not be asked; any other error is raised."""
