"""Whatever a Master does, no memory goes while it may name it, the pool says what is wrong, and gets back to clean."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from egmctl.errors import CleanupPendingError, EgmError, FailedError
from egmctl.mooncake.codec import Message, write_message
from egmctl.mooncake.master import MasterRefused, MasterRpcError
from egmctl.paths import Paths
from egmctl.provider import mount_pool, pool_status, provision, teardown_pool
from egmctl.provider.agent import Agent
from egmctl.provider.master_link import certainly_not_done
from egmctl.provider.pool import Timing
from egmctl.steps import watch
from tests.lifecycle.fake_master import FakeMaster
from tests.lifecycle.support import mounted
from tests.provider.pools import agent_here, listed, mapped_here, run, small_plan, teardown_now, until
from tests.support.master import Master

MOUNTING = [
    "ServiceReady",
    "MountSegment",
    "ReMountSegment",
    "PutStart",
    "PutEnd",
    "GetReplicaList",
    "Remove",
]
LEAVING = ["ServiceReady", "UnmountSegment"]


def other_call(seq: int) -> bytes:
    body = write_message(Message(b"\x84\x04", [1, 2, 3]))
    return struct.pack("<BBBBIII", 21, 0, 0, 0, seq, len(body), 0) + body


def no_master(seq: int) -> bytes:
    return b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(32)


def endless(seq: int) -> bytes:
    return struct.pack("<BBBBIII", 21, 0, 0, 0, seq, 0xFFFFFFFF, 0)


def thrown(seq: int) -> bytes:
    """The call threw an exception, after whatever it had done."""
    body = write_message(Message(b"\x80\x0c", "bad_alloc"))
    return struct.pack("<BBBBIII", 21, 0, 7, 0, seq, len(body), 0) + body


def refusal(number: int) -> Callable[[FakeMaster, str], None]:
    return lambda master, call: master.refuse.update({call: number})


def garbage(data: bytes | Callable[[int], bytes]) -> Callable[[FakeMaster, str], None]:
    return lambda master, call: master.garbage.update({call: data})


TROUBLES: dict[str, Callable[[FakeMaster, str], None]] = {
    "never receives": lambda master, call: master.deaf.add(call),
    "never answers": lambda master, call: master.silent.add(call),
    "TENANT_QUOTA_EXCEEDED": refusal(-1700),
    "SEGMENT_ALREADY_EXISTS": refusal(-102),
    "INVALID_PARAMS": refusal(-600),
    "INTERNAL_ERROR": refusal(-1),
    "an error of a later version": refusal(-9999),
    "noise": garbage(os.urandom(64)),
    "nothing in the frame": garbage(b""),
    "the answer to another call": garbage(other_call),
    "is no Master": garbage(no_master),
    "4 GiB announced": garbage(endless),
    "threw": garbage(thrown),
}


def mend(master: FakeMaster) -> None:
    master.refuse.clear()
    master.silent.clear()
    master.deaf.clear()
    master.garbage.clear()


class NoRelease:
    """A watcher: what the Master itself still had when memory went."""

    def __init__(self, master: FakeMaster) -> None:
        self.master = master
        self.premature: list[str] = []

    def before(self, site: str, detail: dict[str, Any]) -> None:
        if site in ("memory.shm.unmap", "memory.shm.close") and self.master.segments:
            self.premature.append(f"{site} {detail}")

    def after(self, site: str, detail: dict[str, Any], error: BaseException | None) -> None:
        pass


@contextmanager
def provisioned(paths: Paths, master: FakeMaster) -> Iterator[Agent]:
    plan = small_plan(master, master_admin_addr=None, lease_ttl=0.2, client_expiry=0.5)  # type: ignore[arg-type]
    with agent_here(plan, paths) as agent:
        agent.pool.timing = Timing(ping_interval=0.2, check_interval=0.3, rpc_timeout=0.3)
        run(agent, "provision", agent.pool.provision)
        watcher = NoRelease(master)
        watch(watcher)
        yield agent
        assert watcher.premature == []


@pytest.mark.parametrize("trouble", TROUBLES)
def test_whatever_a_master_does_to_a_mount_it_is_undone_or_kept_and_can_be_repeated(paths: Paths, trouble: str) -> None:
    with FakeMaster() as master, provisioned(paths, master) as agent:
        for call in MOUNTING:
            TROUBLES[trouble](master, call)
            with pytest.raises(EgmError) as caught:
                run(agent, "mount", agent.pool.mount)
            assert caught.value.where, call
            assert "Traceback" not in str(caught.value)
            assert agent.pool.state in ("provisioned", "cleanup-pending"), call
            if agent.pool.state == "provisioned":
                assert master.segments == {}, call
            assert mapped_here() == 2
            mend(master)
        run(agent, "mount", agent.pool.mount)
        assert agent.pool.state == "ready"
        assert len(master.segments) == 2
        teardown_now(agent)
        assert (agent.pool.state, master.segments) == ("gone", {})


@pytest.mark.parametrize("trouble", TROUBLES)
def test_whatever_a_master_does_to_a_teardown_the_memory_stays_until_it_is_done(paths: Paths, trouble: str) -> None:
    with FakeMaster() as master, provisioned(paths, master) as agent:
        run(agent, "mount", agent.pool.mount)
        for call in LEAVING:
            TROUBLES[trouble](master, call)
            with pytest.raises(CleanupPendingError) as caught:
                teardown_now(agent)
            assert caught.value.hint, call
            assert agent.pool.state == "cleanup-pending"
            assert mapped_here() == 2
            mend(master)
        teardown_now(agent)
        assert (agent.pool.state, master.segments, mapped_here()) == ("gone", {}, 0)


@pytest.mark.parametrize("trouble", ["never answers", "INTERNAL_ERROR", "noise", "is no Master"])
def test_a_master_that_answers_pings_wrongly_degrades_the_pool_which_says_so_and_recovers(
    paths: Paths, trouble: str
) -> None:
    with FakeMaster(expiry=60) as master, provisioned(paths, master) as agent:
        run(agent, "mount", agent.pool.mount)
        if agent.pool.parts.heartbeat is not None:
            agent.pool.parts.heartbeat._connection.rpc.timeout = 0.3
        ids = set(master.segments)
        TROUBLES[trouble](master, "Ping")
        until(lambda: agent.pool.state == "degraded")
        assert f"the Master at {master.address} does not answer pings" in agent.pool.reason
        assert mapped_here() == 2
        mend(master)
        until(lambda: agent.pool.state == "ready")
        assert set(master.segments) == ids
        teardown_now(agent)


def test_a_master_of_a_later_version_is_understood_all_through_a_pools_life(paths: Paths) -> None:
    with FakeMaster() as master, provisioned(paths, master) as agent:
        master.newer = True
        run(agent, "mount", agent.pool.mount)
        assert agent.pool.state == "ready"
        master.tasks = [((7, 8), 1, "{}", 0, 3)]
        until(lambda: master.completed)
        assert [(tuple(task[0]), task[1]) for task in master.completed] == [((7, 8), 2)]
        master.forget()  # restarted, empty
        until(lambda: agent.pool.state == "degraded")
        until(lambda: agent.pool.state == "ready")
        assert len(master.segments) == 2
        run(agent, "teardown", lambda task: agent.pool.teardown(task, 0.5))
        assert (agent.pool.state, master.segments) == ("gone", {})
        assert {"Ping", "FetchTasks", "PutStart", "GetReplicaList"} <= {call for call, _ in master.log}


def test_a_master_that_never_runs_out_of_tasks_does_not_keep_the_pool_from_its_teardown(paths: Paths) -> None:
    class Endless(FakeMaster):
        def _do_FetchTasks(self, arguments: Any) -> list[Any]:
            return [((7, 8), 1, "{}", 0, 3)]

    with Endless() as master, provisioned(paths, master) as agent:
        run(agent, "mount", agent.pool.mount)
        until(lambda: len(master.completed) > 1)
        job = agent.command("teardown", lambda task: agent.pool.teardown(task, 0.0))
        until(lambda: job.done(0), 20)
        job.wait()
        assert (agent.pool.state, master.segments) == ("gone", {})


def test_a_refusal_counts_as_not_done_only_when_it_says_so() -> None:
    assert certainly_not_done(MasterRefused("MountSegment", -1700))
    assert certainly_not_done(MasterRefused("MountSegment", -600))
    assert certainly_not_done(MasterRpcError("MountSegment", 4, ""))
    # The id is used once: that it exists already means that this very request has arrived before.
    assert not certainly_not_done(MasterRefused("MountSegment", -102))
    assert not certainly_not_done(MasterRefused("MountSegment", -1))
    assert not certainly_not_done(MasterRpcError("MountSegment", 7, ""))
    assert not certainly_not_done(ValueError())


def test_a_mount_refused_as_a_duplicate_although_it_took_effect_is_taken_back_before_its_memory_goes(
    paths: Paths,
) -> None:
    """A request that was repeated on its way: the answer is that of the second copy."""
    with FakeMaster() as master, provisioned(paths, master) as agent:
        master.garbage["MountSegment"] = lambda seq: master.refused("MountSegment", -102, seq)
        with pytest.raises(EgmError, match="SEGMENT_ALREADY_EXISTS"):
            run(agent, "mount", agent.pool.mount)
        assert agent.pool.state == "provisioned"
        assert master.segments == {}
        teardown_now(agent)


def test_a_client_that_the_master_gave_up_while_it_lived_mounts_anew(any_quick_master: Master, paths: Paths) -> None:
    master = any_quick_master
    with mounted(master, paths) as agent:
        before = {row.id for row in agent.pool.record_now().live_segments}
        heartbeat = agent.pool.parts.heartbeat
        assert heartbeat is not None
        heartbeat.pause()
        until(lambda: not listed(master), 20)
        assert mapped_here() == 2
        heartbeat.resume()
        until(lambda: agent.pool.state == "ready" and len(listed(master)) == 2, 20)
        assert not before & {row.id for row in agent.pool.record_now().live_segments}
        teardown_now(agent)


def test_a_hung_master_keeps_a_teardown_pending_and_lets_it_finish_once_it_answers(
    any_quick_master: Master, paths: Paths
) -> None:
    master = any_quick_master
    with mounted(master, paths) as agent:
        master.pause()
        try:
            with pytest.raises(CleanupPendingError, match="memory is kept"):
                teardown_now(agent)
            assert mapped_here() == 2
        finally:
            master.resume()
        teardown_now(agent)
        assert agent.pool.state == "gone"
        assert listed(master) == []


def test_a_hung_master_fails_a_mount_and_the_pool_stays_provisioned(quick_master: Master, paths: Paths) -> None:
    with agent_here(small_plan(quick_master), paths) as agent:
        agent.pool.timing = Timing(rpc_timeout=0.5)
        run(agent, "provision", agent.pool.provision)
        quick_master.pause()
        try:
            with pytest.raises(FailedError, match="stays provisioned"):
                run(agent, "mount", agent.pool.mount)
        finally:
            quick_master.resume()
        assert agent.pool.state == "provisioned"
        run(agent, "mount", agent.pool.mount)
        teardown_now(agent)


def test_a_master_started_anew_on_another_port_is_taken_when_it_is_named(quick_master: Master, paths: Paths) -> None:
    provision(small_plan(quick_master), paths, mount=True)
    quick_master.kill()
    until(lambda: pool_status(paths, "dev")[0]["state"] == "degraded")
    with Master("0.3.13", lease_ttl=1.0, client_ttl=3) as elsewhere:
        began = time.monotonic()
        mounted_there = mount_pool("dev", paths, elsewhere.address)
        assert time.monotonic() - began >= 2.0  # the expiry: nothing that was sent to the first is on its way any more
        assert (mounted_there["ready"], mounted_there["master"]) == (True, elsewhere.address)
        assert len(listed(elsewhere)) == 2
        quick_master.start()
        time.sleep(1.5)
        assert listed(quick_master) == []
        assert teardown_pool("dev", paths, now=True)["state"] == "gone"
        assert listed(elsewhere) == []
