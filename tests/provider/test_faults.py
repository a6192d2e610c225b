"""Every step of the lifecycle failing once, before it is done and after: the pool always comes back to clean."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from egmctl.errors import EgmError
from egmctl.ledger import OwnerLock, read_only
from egmctl.mooncake import wheel
from egmctl.paths import Paths
from egmctl.provider.agent import Agent
from tests.provider.pools import (
    Fault,
    Trace,
    listed,
    mapped_here,
    nothing_left,
    private_paths,
    provision_and_mount,
    run,
    small_plan,
    teardown_now,
    traced,
)
from tests.support.master import Master


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    with Master("0.3.13", lease_ttl=1.0, client_ttl=3) as master:
        yield master


def life(master: Master, paths: Paths, fail: tuple[str, int, str] | None) -> Trace:
    """Provision, mount and tear down, with one fault; then teardown again until it is clean."""
    plan = small_plan(master, chunks=2, client_expiry=0.3, lease_ttl=0.3)
    problems: list[str] = []
    mounted = False
    if fail is None or fail[0] == "wheel.probe":
        wheel._known = None  # found out once in a process
    with traced(fail) as trace:
        try:
            agent = Agent(plan, paths, who="test").__enter__()
        except (EgmError, Fault):
            assert trace.failed
            agent = Agent(plan, paths, who="test").__enter__()
        try:
            try:
                provision_and_mount(agent)
                mounted = True
                teardown_now(agent)
            except (EgmError, Fault):
                assert trace.failed
                if agent.pool.state == "ready" and not mounted:
                    problems.append("it says ready although its mount failed")
            for _ in range(4):
                if agent.pool.state == "gone":
                    break
                try:
                    teardown_now(agent)
                except EgmError as error:
                    problems.append(f"a teardown after the fault fails: {error}")
            problems += [f"state {agent.pool.state}"] if agent.pool.state != "gone" else []
            child = next((d["pid"] for k, s, d in trace.events if s == "te.hello" and d.get("pid")), None)
            if child is not None and Path(f"/proc/{child}/status").exists():
                time.sleep(0.2)
                problems += [f"child {child} lives"] if Path(f"/proc/{child}/status").exists() else []
        finally:
            agent.__exit__()
    if fail is not None and fail[0] == "ledger.lock.release":
        OwnerLock.acquire(paths.lock("dev"), "dev", "next").release()  # a file that nobody holds is in nobody's way
    record = read_only(paths.ledger("dev"))
    assert record is not None
    if record.live_segments or record.live_chunks or record.state != "gone":
        problems.append(f"the ledger still holds {record}")
    problems += [f"left: {name}" for name in nothing_left(paths)]
    problems += [f"at the Master: {name}" for name in listed(master)]
    problems += [f"{mapped_here()} chunks still mapped"] if mapped_here() else []
    problems += trace.premature_releases()
    assert not problems, f"{fail}: {problems}"
    return trace


@pytest.mark.parametrize("when", ["before", "after"])
def test_after_any_step_has_failed_once_teardown_leaves_nothing_and_releases_nothing_early(
    master: Master, tmp_path: Path, when: str
) -> None:
    with private_paths(tmp_path / "clean") as paths:
        clean = life(master, paths, None)
    wrong: list[str] = []
    # Ledger writes differ by what they record, so each is a site; of others the first stands for all, unless asked.
    every = bool(os.environ.get("EGMCTL_ALL_FAULTS"))
    sites = [
        (site, nth)
        for site, count in clean.counts.items()
        for nth in range(1, (count if every or site == "ledger.commit" else 1) + 1)
    ]
    assert len(sites) > 60
    unreached = []
    for number, (site, nth) in enumerate(sites):
        with private_paths(tmp_path / f"{number}") as paths:
            try:
                trace = life(master, paths, (site, nth, when))
                if not trace.failed:
                    unreached.append((site, nth))
            except AssertionError as error:
                wrong.append(str(error).partition("\n")[0])
    assert not wrong, "\n".join(wrong)
    # Pings and their connections run beside the commands, so their number differs from run to run.
    assert all(site in ("mooncake.master.ping", "mooncake.rpc.connect") for site, _ in unreached), unreached


def test_the_ledger_says_so_before_anything_is_done_and_nothing_is_released_under_a_segment(
    master: Master, paths: Paths
) -> None:
    trace = life(master, paths, None)
    order = [
        ("ledger.commit", {"what": "allocation begins"}),
        ("memory.shm.file", {}),
        ("ledger.commit", {"what": "allocated"}),
        ("ledger.commit", {"what": "engine begins"}),
        ("te.spawn", {}),
        ("ledger.commit", {"what": "engine serves"}),
        ("provider.publish", {}),
        ("ledger.commit", {"what": "mount begins"}),
        ("mooncake.master.mount_segment", {}),
        ("ledger.commit", {"what": "mounted"}),
        ("provider.probe.put_start", {}),
        ("ledger.commit", {"what": "ready"}),
        ("ledger.commit", {"what": "tearing-down"}),
        ("ledger.commit", {"what": "unmount begins"}),
        ("mooncake.master.unmount_segment", {}),
        ("ledger.commit", {"what": "unmounted"}),
        ("provider.unpublish", {}),
        ("te.stop", {}),
        ("ledger.commit", {"what": "release begins"}),
        ("memory.shm.unmap", {}),
        ("ledger.commit", {"what": "released"}),
        ("handshake.close", {}),
        ("provider.socket.unlink", {}),
        ("ledger.commit", {"what": "gone"}),
    ]
    places = [trace.index("before", site, **detail) for site, detail in order]
    assert places == sorted(places), list(zip(order, places, strict=True))
    last_unmount = max(i for i, (k, s, _) in enumerate(trace.events) if k == "done" and s.endswith("unmount_segment"))
    first_release = trace.index("before", "memory.shm.unmap")
    assert last_unmount < first_release
    assert trace.index("done", "ledger.commit", what="mount begins") < trace.index(
        "before", "mooncake.master.mount_segment"
    )


def test_a_fault_in_a_second_mount_leaves_the_pool_provisioned(master: Master, paths: Paths) -> None:
    plan = small_plan(master, client_expiry=0.3, lease_ttl=0.3)
    with Agent(plan, paths, who="test") as agent:
        run(agent, "provision", agent.pool.provision)
        with traced(("mooncake.master.mount_segment", 2, "after")), pytest.raises(EgmError, match="injected"):
            run(agent, "mount", agent.pool.mount)
        assert agent.pool.state == "provisioned"
        assert listed(master) == []
        assert len(agent.pool.parts.chunks) == 2
        run(agent, "mount", agent.pool.mount)
        assert agent.pool.state == "ready"
        teardown_now(agent)
