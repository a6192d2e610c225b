"""A network that loses, delays and repeats: no memory goes while a mount may still take effect."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from egmctl.errors import CleanupPendingError, EgmError, FailedError
from egmctl.mooncake.admin import AdminClient
from egmctl.provider.agent import Agent
from egmctl.provider.pool import Timing
from egmctl.steps import watch
from tests.faults.proxy import Proxy, Verdict
from tests.provider.pools import (
    Trace,
    agent_here,
    listed,
    private_paths,
    provision_and_mount,
    run,
    small_plan,
    teardown_now,
    until,
)
from tests.support.master import Master

EXPIRY = 3.5
LIMIT = 0.5
"""Seconds for each request in these tests."""


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    with Master("0.3.13", lease_ttl=1.0, client_ttl=3) as master:
        yield master


class Guard(Trace):
    """Looks at the Master itself, and at what is on its way there, whenever memory is about to go."""

    def __init__(self, master: Master, proxy: Proxy) -> None:
        super().__init__()
        self._proxy = proxy
        self.wrong: list[str] = []
        self._admin = AdminClient(master.admin_address)

    def before(self, site: str, detail: dict[str, Any]) -> None:
        if site == "memory.shm.unmap":
            names = [row.name for row in self._admin.segments_detail()]
            if names:
                self.wrong.append(f"chunk {detail['chunk']} is released while the Master lists {names}")
            if any(one.coming for one in self._proxy.of("MountSegment")):
                self.wrong.append(f"chunk {detail['chunk']} is released while a mount is on its way")
        super().before(site, detail)


@contextmanager
def behind(
    master: Master, tmp_path: Path, judge: Callable[[str, int], Verdict], **changes: Any
) -> Iterator[tuple[Agent, Proxy, Guard]]:
    with Proxy(master.address, judge) as proxy, private_paths(tmp_path) as paths:
        guard = Guard(master, proxy)
        plan = small_plan(master, chunks=2, master_server_addr=proxy.address, client_expiry=EXPIRY, **changes)
        watch(guard)
        try:
            with agent_here(plan, paths) as agent:
                agent.pool.timing = Timing(ping_interval=0.5, check_interval=0.3, rpc_timeout=LIMIT)
                yield agent, proxy, guard
                watch(guard)
                proxy.judge = lambda call, nth: Verdict()
                if agent.pool.state != "gone":
                    teardown_now(agent)
                assert agent.pool.state == "gone"
                assert listed(master) == []
        finally:
            watch(None)
    assert guard.wrong == []


def only(call: str, verdict: Verdict, nth: int = 1) -> Callable[[str, int], Verdict]:
    return lambda name, number: verdict if (name, number) == (call, nth) else Verdict()


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("verdict", [Verdict(answer=False), Verdict(cut=True)], ids=["lost", "cut"])
def test_a_mount_that_took_effect_without_its_answer_is_found_and_taken_back(
    master: Master, tmp_path: Path, verdict: Verdict, nth: int
) -> None:
    with behind(master, tmp_path, only("MountSegment", verdict, nth)) as (agent, proxy, _):
        run(agent, "provision", agent.pool.provision)
        with pytest.raises(FailedError):
            run(agent, "mount", agent.pool.mount)
        assert agent.pool.state == "provisioned"
        assert listed(master) == []
        assert proxy.of("MountSegment")[nth - 1].answered is not None
        run(agent, "mount", agent.pool.mount)
        assert len(listed(master)) == 2


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("orphan", [True, False], ids=["on a new connection", "on the old connection"])
def test_a_mount_that_arrives_after_its_rollback_began_is_waited_for_before_memory_can_go(
    master: Master, tmp_path: Path, nth: int, orphan: bool
) -> None:
    verdict = Verdict(hold=2.0, orphan=orphan)
    with behind(master, tmp_path, only("MountSegment", verdict, nth)) as (agent, proxy, guard):
        run(agent, "provision", agent.pool.provision)
        with pytest.raises(EgmError):
            run(agent, "mount", agent.pool.mount)
        late = proxy.of("MountSegment")[nth - 1]
        if orphan:
            # The rollback has looked, found nothing, and would have believed it.
            assert any(
                one.answered < (late.delivered or 0) for one in proxy.of("QuerySegmentStatusById") if one.answered
            )
            assert agent.pool.state == "provisioned"
        else:
            assert agent.pool.state == "cleanup-pending"
        until(lambda: late.answered)
        until(lambda: _torn_down(agent), 20)
        assert sum(site == "memory.shm.unmap" and kind == "before" for kind, site, _ in guard.events) == 2
        assert listed(master) == []


def _torn_down(agent: Agent) -> bool:
    try:
        teardown_now(agent)
    except CleanupPendingError:
        return False
    return True


def test_a_mount_that_never_arrives_is_fenced_by_the_expiry_and_pings_stop_meanwhile(
    master: Master, tmp_path: Path
) -> None:
    with behind(master, tmp_path, only("MountSegment", Verdict(deliver=False), 2)) as (agent, proxy, _):
        run(agent, "provision", agent.pool.provision)
        with pytest.raises(EgmError):
            run(agent, "mount", agent.pool.mount)
        lost = proxy.of("MountSegment")[1].seen
        assert agent.pool.state == "provisioned"
        assert time.monotonic() >= lost + EXPIRY
        pings = [one.seen for one in proxy.of("Ping") if one.seen > lost]
        gaps = [later - earlier for earlier, later in pairwise([lost, *pings, time.monotonic()])]
        assert max(gaps) >= EXPIRY


@pytest.mark.parametrize("call", ["UnmountSegment", "QuerySegmentStatusById", "ServiceReady"])
@pytest.mark.parametrize(
    "verdict",
    [Verdict(answer=False), Verdict(deliver=False), Verdict(cut=True), Verdict(hold=1.5)],
    ids=["answer lost", "request lost", "cut", "late"],
)
def test_a_teardown_that_is_not_answered_keeps_the_memory_and_resumes(
    master: Master, tmp_path: Path, call: str, verdict: Verdict
) -> None:
    armed = False
    spoiled: list[int] = []

    def judge(name: str, nth: int) -> Verdict:
        if armed and name == call and not spoiled:
            spoiled.append(nth)
            return verdict
        return Verdict()

    with behind(master, tmp_path, judge) as (agent, _, guard):
        provision_and_mount(agent)
        armed = True
        try:
            teardown_now(agent)
        except CleanupPendingError:
            assert agent.pool.state == "cleanup-pending"
            assert agent.pool.parts.chunks
            assert all(site != "memory.shm.unmap" for _, site, _ in guard.events)
            until(lambda: _torn_down(agent), 20)
        assert spoiled or call == "QuerySegmentStatusById"
        assert agent.pool.state == "gone"


@pytest.mark.parametrize("call", ["MountSegment", "ReMountSegment", "UnmountSegment", "Ping", "PutStart"])
def test_an_answer_that_comes_twice_is_taken_once(master: Master, tmp_path: Path, call: str) -> None:
    def judge(name: str, nth: int) -> Verdict:
        return Verdict(copies=2) if name == call else Verdict()

    with behind(master, tmp_path, judge) as (agent, _, _guard):
        provision_and_mount(agent)
        assert agent.pool.state == "ready"
        assert len(listed(master)) == 2
        teardown_now(agent)


def test_pings_that_are_lost_degrade_the_pool_which_recovers_when_they_arrive(master: Master, tmp_path: Path) -> None:
    losing = False

    def judge(name: str, nth: int) -> Verdict:
        return Verdict(deliver=False) if losing and name == "Ping" else Verdict()

    with behind(master, tmp_path, judge) as (agent, _, _guard):
        provision_and_mount(agent)
        losing = True
        until(lambda: agent.pool.state == "degraded", 20)
        until(lambda: listed(master) == [], 20)  # the Master has given us up; we keep the memory
        assert len(agent.pool.parts.chunks) == 2
        losing = False
        until(lambda: agent.pool.state == "ready" and len(listed(master)) == 2, 20)


def test_changes_go_to_a_master_one_after_the_other_on_one_connection_at_a_time(master: Master, tmp_path: Path) -> None:
    with behind(master, tmp_path, lambda call, nth: Verdict()) as (agent, proxy, _):
        provision_and_mount(agent)
        teardown_now(agent)
        changes = [one for one in proxy.log if one.call in ("MountSegment", "ReMountSegment", "UnmountSegment")]
        assert len({one.connection for one in changes}) == 1
        for earlier, later in pairwise(changes):
            assert earlier.answered is not None
            assert earlier.answered <= later.seen
        assert {one.connection for one in proxy.of("Ping")}.isdisjoint({one.connection for one in changes})


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_network_does_the_pool_comes_back_to_clean(master: Master, tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    kinds = (
        Verdict(answer=False),
        Verdict(deliver=False),
        Verdict(cut=True),
        Verdict(hold=0.3),
        Verdict(hold=1.2),
        Verdict(copies=3),
    )

    def judge(name: str, nth: int) -> Verdict:
        return source.choice(kinds) if source.random() < 0.12 else Verdict()

    with behind(master, tmp_path, judge) as (agent, proxy, _):
        for command in (agent.pool.provision, agent.pool.mount, lambda task: agent.pool.teardown(task, 0.0)):
            try:
                run(agent, "command", command)
            except EgmError:
                continue
        for _ in range(20):
            if agent.pool.state == "gone":
                break
            try:
                teardown_now(agent)
            except EgmError:
                time.sleep(0.1)
        proxy.judge = lambda call, nth: Verdict()
