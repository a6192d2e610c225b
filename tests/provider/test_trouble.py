"""A mounted pool in trouble: the Master restarts, hangs, loses a segment, answers late; the child dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from egmctl.errors import BusyError, CleanupPendingError, EgmError, FailedError
from egmctl.mooncake.handshake import fetch_descriptor
from egmctl.mooncake.master import MasterClient, MasterRefused, ReplicateConfig
from egmctl.paths import Paths
from egmctl.provider.agent import Agent
from egmctl.provider.pool import Timing
from egmctl.provider.task import Cancelled, Task
from tests.provider.pools import (
    agent_here,
    listed,
    mapped_here,
    private_paths,
    provision_and_mount,
    run,
    small_plan,
    teardown_now,
    traced,
    until,
)
from tests.support.master import Master

CLIENT = (11, 22)


@contextmanager
def mounted(master: Master, paths: Paths, **changes: object) -> Iterator[Agent]:
    with agent_here(small_plan(master, **changes), paths) as agent:
        agent.pool.timing = Timing(check_interval=0.3, rpc_timeout=1.0, restart_patience=10)
        provision_and_mount(agent)
        yield agent


def put(master: Master, agent: Agent, key: str, data: bytes) -> None:
    """An object put directly into the pool, by a client of its own."""
    with MasterClient(master.address) as client:
        (replica,) = client.put_start(CLIENT, key, len(data), ReplicateConfig())
        for chunk in agent.pool.parts.chunks.values():
            if chunk.address <= replica.address < chunk.address + chunk.spec.nbytes:
                offset = replica.address - chunk.address
                with chunk.host_view() as view:
                    view[offset : offset + len(data)] = data
        client.put_end(CLIENT, key)


def get_address(master: Master, key: str) -> int:
    with MasterClient(master.address) as client:
        return client.get_replica_list(key).replicas[0].address


def ready(agent: Agent) -> bool:
    return agent.pool.state == "ready"


def test_after_a_master_restart_all_chunks_are_mounted_anew_but_not_before_the_lease_time(
    any_quick_master: Master, paths: Paths
) -> None:
    master = any_quick_master
    with mounted(master, paths, lease_ttl=2) as agent:
        before = {row.id for row in agent.pool.record_now().live_segments}
        pings = agent.pool.parts.heartbeat
        assert pings is not None
        master.kill()
        until(lambda: agent.pool.state == "degraded")
        assert mapped_here() == 2
        with traced() as trace:
            master.start()
            restarted = time.monotonic()
            until(lambda: pings.pulse().need_remount_since is not None)
            assert listed(master) == []
            until(lambda: ready(agent), 20)
        assert time.monotonic() - restarted >= 2.0
        first = trace.index("before", "mooncake.master.mount_segment")
        assert any(site == "mooncake.master.ping" for _, site, _ in trace.events[:first])
        after = {row.id for row in agent.pool.record_now().live_segments}
        assert not before & after  # a new id for each attempt
        assert len(listed(master)) == 2
        until(lambda: pings.pulse().status == 1)
        remount = trace.events[trace.index("before", "mooncake.master.remount_segments")]
        assert remount[2]["segments"] == []  # settled, nothing mounted behind our back
        put(master, agent, "after", b"x" * 100)
        teardown_now(agent)


def test_a_master_that_hangs_degrades_the_pool_and_is_forgiven(any_quick_master: Master, paths: Paths) -> None:
    master = any_quick_master
    with mounted(master, paths) as agent:
        ids = {row.id for row in agent.pool.record_now().live_segments}
        put(master, agent, "kept", b"k" * 100)
        master.pause()
        try:
            until(lambda: agent.pool.state == "degraded", 20)
            assert "pings" in agent.pool.reason
        finally:
            master.resume()
        until(lambda: ready(agent), 20)
        assert len(listed(master)) == 2
        if {row.id for row in agent.pool.record_now().live_segments} == ids:
            assert get_address(master, "kept")  # nothing was mounted anew, so nothing was lost
        teardown_now(agent)


def test_a_single_segment_that_vanishes_is_mounted_anew_after_the_lease_and_the_others_stay(
    any_quick_master: Master, paths: Paths
) -> None:
    master = any_quick_master
    with mounted(master, paths, lease_ttl=1.5) as agent:
        kept, lost = agent.pool.record_now().live_segments
        with MasterClient(master.address) as stranger:
            stranger.unmount_segment(lost.id, CLIENT)
        gone = time.monotonic()
        until(lambda: agent.pool.state == "degraded")
        assert "1 of 2 chunks" in agent.pool.reason
        until(lambda: ready(agent), 20)
        assert time.monotonic() - gone >= 1.5
        rows = {row.chunk: row for row in agent.pool.record_now().live_segments}
        assert rows[kept.chunk].id == kept.id
        assert rows[lost.chunk].id != lost.id
        assert len(listed(master)) == 2
        teardown_now(agent)


def test_tending_never_mounts_while_a_teardown_has_begun(quick_master: Master, paths: Paths) -> None:
    with mounted(quick_master, paths) as agent:
        quick_master.kill()
        with pytest.raises(CleanupPendingError):
            teardown_now(agent)
        with traced() as trace:
            quick_master.start()
            heartbeat = agent.pool.parts.heartbeat
            assert heartbeat is not None
            until(lambda: heartbeat.pulse().need_remount_since is not None)
            time.sleep(2.0)
        assert "mooncake.master.mount_segment" not in trace.sites()
        assert listed(quick_master) == []
        teardown_now(agent)
        assert agent.pool.state == "gone"


def test_a_mount_that_is_answered_late_keeps_its_memory_until_it_is_unmounted(
    any_quick_master: Master, paths: Paths
) -> None:
    master = any_quick_master
    with agent_here(small_plan(master, client_expiry=8), paths) as agent:
        agent.pool.timing = Timing(rpc_timeout=0.7)
        run(agent, "provision", agent.pool.provision)
        with traced() as trace:
            original = trace.before

            def pause_at_second_mount(site: str, detail: dict[str, object]) -> None:
                original(site, detail)
                if site == "mooncake.master.mount_segment" and trace.counts[site] == 2:
                    master.pause()

            trace.before = pause_at_second_mount  # type: ignore[method-assign]
            with pytest.raises(CleanupPendingError, match="memory is kept"):
                run(agent, "mount", agent.pool.mount)
            assert agent.pool.state == "cleanup-pending"
            states = sorted(row.state for row in agent.pool.record_now().live_segments)
            assert "mounting" in states  # not answered: not known
            with pytest.raises(CleanupPendingError):
                teardown_now(agent)
            assert mapped_here() == 2
            master.resume()
            teardown_now(agent)  # by now the second mount has taken effect
            assert trace.premature_releases() == []
        assert agent.pool.state == "gone"
        assert listed(master) == []


def test_a_mount_that_never_arrived_is_fenced_by_silence_before_its_memory_goes(
    quick_master: Master, paths: Paths
) -> None:
    with agent_here(small_plan(quick_master, client_expiry=3), paths) as agent:
        run(agent, "provision", agent.pool.provision)
        with traced(("mooncake.master.mount_segment", 2, "before")) as trace:
            started = time.monotonic()
            with pytest.raises(FailedError, match="injected"):
                run(agent, "mount", agent.pool.mount)
            assert time.monotonic() - started >= 3.0
        assert agent.pool.state == "provisioned"
        unmounted = [i for i, (k, s, _) in enumerate(trace.events) if k == "done" and s.endswith("unmount_segment")]
        pinged = [i for i, (k, s, _) in enumerate(trace.events) if k == "before" and s == "mooncake.master.ping"]
        last_look = [i for i, (_, s, _) in enumerate(trace.events) if s.endswith("query_segment_status_by_id")][-1]
        fence = [i for i in pinged if unmounted[0] < i < last_look]
        assert len(fence) <= 1  # at most one that was due before the silence began
        assert "fenced" in {row.state for row in agent.pool.record_now().segments}
        teardown_now(agent)


def test_a_mount_that_failed_half_way_can_be_repeated_after_its_leases(quick_master: Master, paths: Paths) -> None:
    with agent_here(small_plan(quick_master, lease_ttl=1.5), paths) as agent:
        run(agent, "provision", agent.pool.provision)
        with traced(("provider.probe.read", 1, "before")), pytest.raises(EgmError, match="injected"):
            run(agent, "mount", agent.pool.mount)
        assert listed(quick_master) == []
        failed = time.monotonic()
        run(agent, "mount", agent.pool.mount)
        assert time.monotonic() - failed >= 1.3
        teardown_now(agent)


def test_objects_stay_readable_through_the_grace_and_the_memory_through_the_leases(
    any_quick_master: Master, paths: Paths
) -> None:
    master = any_quick_master
    with mounted(master, paths, lease_ttl=1.5) as agent:
        put(master, agent, "read-me", b"r" * 5000)
        with traced() as trace:
            started = time.monotonic()
            job = agent.command("teardown", lambda task: agent.pool.teardown(task, 3.0))
            until(lambda: "mooncake.master.graceful_unmount_segment" in trace.sites())
            time.sleep(1.0)
            assert get_address(master, "read-me")
            with MasterClient(master.address) as client, pytest.raises(MasterRefused):
                client.put_start(CLIENT, "new", 100)
            job.wait()
        assert time.monotonic() - started >= 4.5
        drain = trace.index("done", "mooncake.master.graceful_unmount_segment")
        release = trace.index("before", "memory.shm.unmap")
        pings = [s for _, s, _ in trace.events[drain:release] if s == "mooncake.master.ping"]
        assert len(pings) >= 4
        assert listed(master) == []


def test_an_empty_pool_waits_for_nobody(quick_master: Master, paths: Paths) -> None:
    with mounted(quick_master, paths) as agent:
        started = time.monotonic()
        run(agent, "teardown", lambda task: agent.pool.teardown(task, 30.0))
        assert time.monotonic() - started < 10
        assert agent.pool.state == "gone"


def test_without_a_listing_the_grace_is_waited_for(quick_master: Master, paths: Paths) -> None:
    with mounted(quick_master, paths, master_admin_addr=None) as agent:
        started = time.monotonic()
        run(agent, "teardown", lambda task: agent.pool.teardown(task, 1.0))
        assert time.monotonic() - started >= 2.0


def test_a_drain_that_is_stopped_is_resumed_where_it_was(quick_master: Master, paths: Paths) -> None:
    with mounted(quick_master, paths, lease_ttl=2) as agent:
        put(quick_master, agent, "object", b"o" * 100)
        stop = threading.Event()
        started = time.monotonic()
        job = agent.command("teardown", lambda task: agent.pool.teardown(task, 2.0), cancelled=stop.is_set)
        until(lambda: agent.pool.parts.drain_until is not None)
        time.sleep(1.0)
        stop.set()
        with pytest.raises(CleanupPendingError, match="stopped on request"):
            job.wait()
        assert agent.pool.state == "cleanup-pending"
        with traced() as trace:
            run(agent, "teardown", lambda task: agent.pool.teardown(task, 2.0))
        assert "mooncake.master.graceful_unmount_segment" not in trace.sites()
        assert 4.0 <= time.monotonic() - started < 9
        assert agent.pool.state == "gone"


def test_a_dead_child_is_replaced_on_its_data_port_and_the_objects_stay(quick_master: Master, paths: Paths) -> None:
    with mounted(quick_master, paths) as agent:
        put(quick_master, agent, "object", b"o" * 100)
        engine = agent.pool.parts.engine
        assert engine is not None
        pid, port = engine.pid, engine.data_port
        assert pid is not None
        endpoint = agent.pool.record_now().endpoint
        os.kill(pid, signal.SIGKILL)
        until(lambda: agent.pool.state == "degraded" or engine.pid not in (None, pid))
        until(lambda: ready(agent) and engine.alive(), 30)
        assert engine.pid != pid
        assert engine.data_port == port
        assert agent.pool.record_now().endpoint == endpoint
        assert get_address(quick_master, "object")
        child = next(r for r in agent.pool.record_now().resources if r.kind == "engine")
        assert child.detail["pid"] == engine.pid
        assert agent.pool.parts.engine_deaths
        teardown_now(agent)


def test_a_full_pool_whose_child_was_replaced_is_ready_although_its_probe_lands_in_another_pool(
    quick_master: Master, paths: Paths, tmp_path: Path
) -> None:
    with mounted(quick_master, paths) as agent, MasterClient(quick_master.address) as client:
        config = ReplicateConfig(with_hard_pin=True)
        with suppress(MasterRefused):  # until it is full
            for number in range(64):
                client.put_start(CLIENT, f"filler-{number}", 1 << 20, config)
                client.put_end(CLIENT, f"filler-{number}")
        with private_paths(tmp_path / "other") as others, mounted(quick_master, others, name="other") as other:
            engine = agent.pool.parts.engine
            assert engine is not None
            assert engine.pid is not None
            with traced() as trace:
                os.kill(engine.pid, signal.SIGKILL)
                until(lambda: "provider.probe.revoke" in trace.sites(), 30)
                until(lambda: ready(agent), 5)
            assert any("no room in this pool's chunks" in text for text in agent.pool.warnings)
            teardown_now(other)
        teardown_now(agent)


def test_a_mending_that_a_command_interrupted_goes_on_only_after_the_leases(quick_master: Master, paths: Paths) -> None:
    with mounted(quick_master, paths, lease_ttl=3) as agent:
        times: list[float] = []
        with traced() as trace:
            original = trace.before

            def interrupt(site: str, detail: dict[str, object]) -> None:
                original(site, detail)
                if site == "mooncake.master.mount_segment":
                    times.append(time.monotonic())
                    if len(times) == 1:
                        agent.command("another command", lambda task: None)

            trace.before = interrupt  # type: ignore[method-assign]
            quick_master.kill()
            quick_master.start()
            until(lambda: len(times) >= 3 and ready(agent), 30)
        # The first was mounted, and may have been read, when the command came.
        assert times[1] - times[0] >= 3
        teardown_now(agent)


def test_a_lost_data_port_moves_the_pool_to_a_new_endpoint_and_says_so(quick_master: Master, paths: Paths) -> None:
    with mounted(quick_master, paths) as agent:
        agent.pool.timing = Timing(check_interval=0.3, rpc_timeout=1.0, restart_patience=0.0)
        old = agent.pool.record_now().endpoint
        engine = agent.pool.parts.engine
        assert engine is not None
        assert engine.pid is not None
        with traced() as trace:
            os.kill(engine.pid, signal.SIGKILL)
            until(lambda: ready(agent) and agent.pool.record_now().endpoint != old, 30)
        new = agent.pool.record_now().endpoint
        assert all(name.startswith(new) for name in listed(quick_master))
        assert len(listed(quick_master)) == 2
        assert any("objects are lost" in text for text in agent.pool.warnings)
        descriptor = fetch_descriptor(new)
        assert agent.pool.parts.engine is not None
        assert descriptor.data_port == agent.pool.parts.engine.data_port
        assert trace.index("before", "provider.publish") < trace.index("before", "mooncake.master.mount_segment")
        assert trace.index("done", "mooncake.master.unmount_segment") < trace.index("before", "provider.publish")
        teardown_now(agent)


@pytest.mark.parametrize("site", ["handshake.bind", "provider.publish"])
def test_a_move_to_a_new_endpoint_that_was_interrupted_is_finished_before_anything_is_mounted(
    quick_master: Master, paths: Paths, site: str
) -> None:
    with mounted(quick_master, paths) as agent:
        agent.pool.timing = Timing(check_interval=0.3, rpc_timeout=1.0, restart_patience=0.0)
        old = agent.pool.record_now().endpoint
        engine = agent.pool.parts.engine
        assert engine is not None
        assert engine.pid is not None
        with traced(fail=(site, 1, "before")) as trace:
            os.kill(engine.pid, signal.SIGKILL)
            until(lambda: ready(agent) and "provider.probe.remove" in trace.sites(), 30)
        assert trace.failed
        assert agent.pool.record_now().endpoint != old
        assert trace.index("done", "provider.publish") < trace.index("before", "mooncake.master.mount_segment")
        assert fetch_descriptor(agent.pool.record_now().endpoint).egm is not None
        teardown_now(agent)


def test_a_move_that_has_to_wait_for_the_master_is_recorded_and_said_once(quick_master: Master, paths: Paths) -> None:
    with mounted(quick_master, paths) as agent:
        agent.pool.timing = Timing(check_interval=0.3, rpc_timeout=1.0, restart_patience=0.0)
        engine = agent.pool.parts.engine
        assert engine is not None
        assert engine.pid is not None
        quick_master.kill()
        with traced() as trace:
            os.kill(engine.pid, signal.SIGKILL)
            until(lambda: "moving to a new endpoint failed so far" in agent.pool.reason)
            commits = trace.sites().count("ledger.commit")
            time.sleep(1.5)
            assert trace.sites().count("ledger.commit") <= commits + 2
        quick_master.start()
        until(lambda: ready(agent), 30)
        teardown_now(agent)


def test_pings_go_on_time_while_the_worker_is_busy(quick_master: Master, paths: Paths) -> None:
    with mounted(quick_master, paths) as agent, traced() as trace:
        marks: list[float] = []
        original = trace.before

        def mark(site: str, detail: dict[str, object]) -> None:
            original(site, detail)
            if site == "mooncake.master.ping":
                marks.append(time.monotonic())

        trace.before = mark  # type: ignore[method-assign]
        run(agent, "a long command", lambda task: time.sleep(4.5))
        assert len(marks) >= 4
        gaps = [later - earlier for earlier, later in pairwise(marks)]
        assert max(gaps) < 1.8
        teardown_now(agent)


def test_whoever_was_told_the_end_of_a_command_finds_the_worker_free(quick_master: Master, paths: Paths) -> None:
    with agent_here(small_plan(quick_master), paths) as agent:
        gate = threading.Event()
        job = agent.command("first", lambda task: gate.wait(20))
        told: list[bool] = []

        class Telling(threading.Event):
            def set(self) -> None:
                told.append(agent.operator.busy())
                super().set()

        job._done = Telling()
        gate.set()
        job.wait()
        assert told == [False]


def test_a_second_command_is_told_what_the_first_is(quick_master: Master, paths: Paths) -> None:
    with agent_here(small_plan(quick_master), paths) as agent:
        gate = threading.Event()
        job = agent.command("provision", lambda task: gate.wait(20))
        with pytest.raises(BusyError, match=r"provision \(asked by test\) is under way, since"):
            run(agent, "mount", agent.pool.mount)
        gate.set()
        job.wait()
        run(agent, "provision", agent.pool.provision)
        teardown_now(agent)


def test_a_mount_that_is_cancelled_is_undone(quick_master: Master, paths: Paths) -> None:
    with agent_here(small_plan(quick_master, chunks=4), paths) as agent:
        run(agent, "provision", agent.pool.provision)
        stop = threading.Event()

        def stop_at_second(event: object) -> None:
            if getattr(event, "stage", "") == "mount" and getattr(event, "done", 0) == 2:
                stop.set()

        with pytest.raises(Cancelled):
            run(agent, "mount", agent.pool.mount, progress=stop_at_second, cancelled=stop.is_set)
        assert agent.pool.state == "provisioned"
        assert listed(quick_master) == []
        teardown_now(agent)


def test_a_ledger_that_cannot_be_written_is_shouted_and_what_is_owned_is_kept_and_noted(
    quick_master: Master, paths: Paths, capfd: pytest.CaptureFixture[str]
) -> None:
    import json

    from egmctl.provider.rescue import rescue_path

    with mounted(quick_master, paths) as agent:
        with traced() as trace:
            original = trace.before

            def full(site: str, detail: dict[str, object]) -> None:
                original(site, detail)
                if site == "ledger.commit" and detail["what"] != "tearing-down":
                    raise OSError(28, "No space left on device")

            trace.before = full  # type: ignore[method-assign]
            with pytest.raises(CleanupPendingError, match="No space left"):
                teardown_now(agent)
        assert agent.pool.state == "cleanup-pending"
        assert mapped_here() == 2
        note = json.loads(rescue_path(paths.runtime, "dev").read_text())
        assert len(note["segments"]) == 2
        assert len(note["memory"]) == 2
        assert rescue_path(paths.runtime, "dev").stat().st_mode & 0o777 == 0o600
        assert "CANNOT BE WRITTEN" in capfd.readouterr().err
        teardown_now(agent)
        assert agent.pool.state == "gone"
        assert not rescue_path(paths.runtime, "dev").exists()


def test_a_descriptor_that_cannot_be_removed_keeps_the_memory_and_what_was_done_is_not_repeated(paths: Paths) -> None:
    with (
        Master("0.3.13", lease_ttl=1.0, client_ttl=3) as master,
        Master("0.3.13", http_metadata=True) as metadata,
        mounted(master, paths, metadata_server=metadata.metadata_url) as agent,
    ):
        metadata.kill()
        with pytest.raises(CleanupPendingError, match="publication"):
            teardown_now(agent)
        assert mapped_here() == 2
        assert listed(master) == []
        metadata.start()
        with traced() as trace:
            teardown_now(agent)
        assert agent.pool.state == "gone"
        assert "mooncake.master.unmount_segment" not in trace.sites()
        assert trace.index("done", "metadata.get") < trace.index("before", "memory.shm.unmap")


def test_after_the_agent_has_ended_its_threads_and_child_are_gone(quick_master: Master, paths: Paths) -> None:
    own = psutil.Process()
    before = {thread.name for thread in threading.enumerate()}
    children = {child.pid for child in own.children()}
    with mounted(quick_master, paths) as agent:
        teardown_now(agent)
    until(lambda: {thread.name for thread in threading.enumerate()} <= before)
    assert {child.pid for child in own.children()} <= children


def test_a_task_that_is_shielded_is_not_stopped() -> None:
    task = Task("undo", cancelled=lambda: True)
    with pytest.raises(Cancelled):
        task.checkpoint()
    task.shielded = True
    task.checkpoint()
    assert not task.wait(0.01, stage="x", text="y")
