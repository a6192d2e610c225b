"""An interrupt at any line of a put or get: no space is given back and nothing unmapped while a copy runs, and nothing
stays held."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

import pytest

from egmctl.consumer import EgmStore, Timing
from egmctl.consumer.host_copy import Fragment
from egmctl.consumer.mappings import Lease, MappingCache
from egmctl.consumer.master_link import MasterLink
from tests.consumer.mini_provider import MiniProvider
from tests.consumer.support import Memory
from tests.support.master import Master

KIB = 1 << 10
COUNT = 40
STEP = 3
"""Lines between one interrupt and the next."""
WHERE = ("attempts", "engine", "flow", "gets", "pins", "publishing", "puts", "reader", "rounds", "writer")
"""Not where a lock is held by a `with`: a tracer can interrupt between its end and the release, a signal cannot."""


class Copy:
    """Over a few milliseconds after it was begun, whether anybody waits or not."""

    def __init__(self) -> None:
        self.ends = time.monotonic() + 0.003

    def done(self) -> bool:
        return time.monotonic() >= self.ends

    def wait(self, timeout: float | None = None) -> bool:
        left = max(0.0, self.ends - time.monotonic())
        time.sleep(left if timeout is None else min(left, timeout))
        return self.done()


class Slow:
    """Moves nothing: what is looked at is the order of things."""

    def __init__(self) -> None:
        self.begun: list[Copy] = []

    def copy(self, fragments: Sequence[Fragment], *, device: int | None = None, stream: int | None = None) -> Copy:
        self.begun.append(Copy())
        return self.begun[-1]

    def quiesce(self) -> None:
        for each in self.begun:
            each.wait()

    def runs(self) -> bool:
        return not all(each.done() for each in self.begun)


def interrupted(call: Callable[[], Any], line: int) -> str:
    """Where the ``line``-th line of the consumer that ``call`` comes to is, at which it was interrupted; "" when there
    are not so many."""
    seen = 0
    where = ""

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        name = os.path.basename(frame.f_code.co_filename)
        if "consumer" not in frame.f_code.co_filename or name.removesuffix(".py") not in WHERE:
            return None

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal seen, where
            if event == "line" and not where:
                seen += 1
                if seen == line:
                    where = f"{name}:{frame.f_lineno}"
                    raise KeyboardInterrupt
            return step

        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return where


@pytest.fixture
def copier() -> Slow:
    return Slow()


@pytest.fixture
def store(master: Master, copier: Slow) -> Iterator[EgmStore]:
    timing = Timing(retry=0.2, no_space=0.1)
    with (
        MiniProvider(master.address, chunks=[16 << 20]),
        EgmStore.connect(master.address, copier=copier, timing=timing) as store,
    ):
        yield store


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in one call", "begun, then waited for"])
@pytest.mark.parametrize("put", [True, False], ids=["put", "get"])
def test_an_interrupt_anywhere_gives_nothing_back_under_a_copy(
    store: EgmStore, copier: Slow, monkeypatch: pytest.MonkeyPatch, put: bool, asynchronous: bool
) -> None:
    memory = Memory(COUNT * KIB)
    store.register_buffer(memory.address, memory.nbytes)
    addresses, sizes = [memory.address + KIB * at for at in range(COUNT)], [KIB] * COUNT
    kept = [f"kept-{at}" for at in range(COUNT)]
    assert store.batch_put_from(kept, addresses, sizes) == sizes
    early: list[str] = []
    revoke, release = MasterLink.put_revoke, MappingCache.release

    def looked_at_revoke(link: MasterLink, keys: Sequence[str]) -> set[str]:
        if copier.runs():
            early.append("space was given back")
        return revoke(link, keys)

    def looked_at_release(cache: MappingCache, leases: Sequence[Lease]) -> None:
        if copier.runs():
            early.append("a mapping was let go of")
        release(cache, leases)

    monkeypatch.setattr(MasterLink, "put_revoke", looked_at_revoke)
    monkeypatch.setattr(MappingCache, "release", looked_at_release)
    line, met = 1, 0
    transfers: list[Any] = []

    def call(keys: list[str]) -> None:
        if not asynchronous:
            (store.batch_put_from if put else store.batch_get_into)(keys, addresses, sizes)
            return
        transfers.append((store.batch_put_from_async if put else store.batch_get_into_async)(keys, addresses, sizes))
        transfers[-1].result()

    while True:
        copier.begun.clear()
        keys = [f"{line}-{at}" for at in range(COUNT)] if put else kept
        where = interrupted(partial(call, keys), line)
        while transfers:
            transfers.pop().abandon()
        assert early == [], where
        assert len(store._locks) == 0, where
        assert not store._outstanding, where
        assert [entry.users for entry in store._engine.mappings._entries.values()] == [0], where
        if not where:
            break
        met += 1
        line += STEP
    assert met > 10
