"""Rounds of gets and puts, one after the other, until each object has an answer or its time is up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from egmctl.consumer.choose import Failures
from egmctl.consumer.engine import Backoff, Engine
from egmctl.consumer.errors import GetFailed, InterruptedPut, NoSpace, Unreachable
from egmctl.consumer.pins import Again
from egmctl.consumer.reader import ReadRound
from egmctl.consumer.requests import ReadRequests, WriteRequests
from egmctl.consumer.writer import WriteRound
from egmctl.errors import EgmError
from egmctl.mooncake.master import ReplicateConfig

__all__ = ["read_all", "write_all"]

_HURRIED = 3
"""Rounds that may follow each other without a pause, when each had a reason not to wait."""


def _all_sizes(found: Sequence[Any]) -> bool:
    """Whether nothing else is among them, told by their sum: looking at each takes three times as long."""
    try:
        return type(sum(found)) is int
    except TypeError:
        return False


def read_all(
    engine: Engine,
    requests: ReadRequests,
    *,
    stream: int | None = None,
    first: ReadRound | None = None,
) -> list[int | EgmError]:
    """Results in order, an error where one failed. ``first`` is a round of all of them that was started before."""
    failures: Failures = first.failures if first is not None else {}
    todo: Sequence[int] = range(len(requests))
    results: list[int | EgmError] = []
    backoff = Backoff(engine.timing.retry)
    hurried = 0
    while todo:
        current = first if first is not None else ReadRound(engine, requests, stream, todo, failures)
        try:
            try:
                if first is None:
                    current.start()
                first = None
                current.wait(None)
                current.settle()
            except EgmError as error:
                current.give_up(error)
        except BaseException:
            current.abandon(torn=True)
            raise
        if not results:
            found: list[Any] = list(map(current.outcomes.get, todo))
            if _all_sizes(found):  # nearly always
                return found
            not_told = GetFailed("was interrupted", hint="get it again")
            results = [not_told] * len(requests)
        again: list[int] = []
        at_once = True
        for index in todo:
            outcome = current.outcomes.get(index, not_told)
            if isinstance(outcome, Again):
                again.append(index)
                results[index] = outcome.error
                at_once = at_once and outcome.at_once
            else:
                results[index] = outcome
        todo = again
        if not todo:
            break
        hurried += at_once
        if at_once and hurried <= _HURRIED:
            continue
        if not backoff.sleep():
            break
    return results


def write_all(
    engine: Engine,
    requests: WriteRequests,
    config: ReplicateConfig,
    *,
    stream: int | None = None,
    first: WriteRound | None = None,
) -> list[int | EgmError]:
    """Sizes in order, an error where one failed. The caller holds the keys' locks. ``first`` is a round of all of them
    that was started before."""
    todo: Sequence[int] = range(len(requests))
    results: list[int | EgmError] = []
    retry, space = Backoff(engine.timing.retry), Backoff(engine.timing.no_space)
    hurried = 0
    while todo:
        current = first if first is not None else WriteRound(engine, requests, config, stream, todo)
        try:
            try:
                if first is None:
                    current.start()
                first = None
                current.wait(None)
                current.settle()
            except EgmError as error:
                current.give_up(error)
        except BaseException:
            current.abandon(torn=True)
            raise
        if not results:
            found: list[Any] = list(map(current.outcomes.get, todo))
            if _all_sizes(found):  # nearly always
                return found
            not_told = InterruptedPut(
                "was interrupted; whether it was published is not known", hint="ask exists()", facts={"revoked": None}
            )
            results = [not_told] * len(requests)
        again: list[int] = []
        elsewhere: list[int] = []
        at_once, full = True, True
        for index in todo:
            outcome = current.outcomes.get(index, not_told)
            if isinstance(outcome, Again):
                results[index] = outcome.error
                again.append(index)
                at_once = at_once and outcome.at_once
                full = full and isinstance(outcome.error, NoSpace)
            else:
                results[index] = outcome
                if isinstance(outcome, Unreachable):
                    elsewhere.append(index)
        if elsewhere and not config.preferred_segments:
            names = engine.bindings.segment_names()
            if names:
                config = replace(config, preferred_segments=names)
                again = sorted([*again, *elsewhere])
                at_once = True
        todo = again
        if not todo:
            break
        hurried += at_once
        if at_once and hurried <= _HURRIED:
            continue
        if not (space if full else retry).sleep():
            break
    return results
