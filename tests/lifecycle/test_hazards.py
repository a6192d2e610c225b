"""The hazards that no other test stands for, and the table of all of them."""

from __future__ import annotations

import ast
import re
import threading
from pathlib import Path
from typing import Any

import pytest

import tests.lifecycle
from egmctl.consumer.binding import Binding
from egmctl.ledger import read_events
from egmctl.mooncake.descriptor import EgmChunk, EgmFields, SegmentDescriptor, nvlink_descriptor
from egmctl.mooncake.handshake import fetch_descriptor
from egmctl.paths import Paths
from egmctl.provider import holders, provision, teardown_pool
from tests.lifecycle.support import Sites, mounted, put, quick_timing
from tests.provider.pools import agent_here, agents, listed, run, small_plan, teardown_now, until
from tests.support.master import Master

REPOSITORY = Path(__file__).resolve().parents[2]
HAZARDS = 19
LINE = re.compile(r"^ ?(\d+)  (\S+\.py)::(test_\w+)", re.MULTILINE)


def test_every_hazard_has_a_test_and_every_test_named_is_there() -> None:
    assert tests.lifecycle.__doc__ is not None
    rows = LINE.findall(tests.lifecycle.__doc__)
    assert {int(number) for number, _, _ in rows} == set(range(1, HAZARDS + 1))
    known: dict[str, set[str]] = {}
    for _, path, _ in rows:
        tree = ast.parse((REPOSITORY / "tests" / path).read_text())
        known[path] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    missing = [f"{number} {path}::{name}" for number, path, name in rows if name not in known[path]]
    assert missing == []


def test_the_complete_descriptor_is_published_before_the_first_segment_is_mounted(
    quick_master: Master, paths: Paths
) -> None:
    with agent_here(small_plan(quick_master, chunks=3), paths) as agent:
        run(agent, "provision", agent.pool.provision)
        seen: list[SegmentDescriptor] = []
        with Sites() as trace:
            original = trace.before

            def ask_at_the_first_mount(site: str, detail: dict[str, Any]) -> None:
                original(site, detail)
                if site == "mooncake.master.mount_segment" and not seen:
                    seen.append(fetch_descriptor(agent.pool.record_now().endpoint))

            trace.before = ask_at_the_first_mount  # type: ignore[method-assign]
            run(agent, "mount", agent.pool.mount)
        assert seen[0].egm is not None
        assert [chunk.index for chunk in seen[0].egm.chunks] == [0, 1, 2]
        assert len(seen[0].buffers) == 3
        teardown_now(agent)


def test_changes_to_a_master_come_from_one_thread_one_after_the_other(quick_master: Master, paths: Paths) -> None:
    changes = {
        f"mooncake.master.{name}"
        for name in ("mount_segment", "remount_segments", "unmount_segment", "graceful_unmount_segment")
    }

    class Overlaps(Sites):
        def __init__(self) -> None:
            super().__init__()
            self.running = 0
            self.most = 0
            self.gate = threading.Lock()

        def before(self, site: str, detail: dict[str, Any]) -> None:
            super().before(site, detail)
            if site in changes:
                with self.gate:
                    self.running += 1
                    self.most = max(self.most, self.running)

        def after(self, site: str, detail: dict[str, Any], error: BaseException | None) -> None:
            if site in changes:
                with self.gate:
                    self.running -= 1
            super().after(site, detail, error)

    trace = Overlaps()
    with trace, agent_here(small_plan(quick_master), paths) as agent:
        quick_timing(agent)
        run(agent, "provision", agent.pool.provision)
        run(agent, "mount", agent.pool.mount)
        put(quick_master, agent, "k", b"k")
        quick_master.restart()
        until(lambda: agent.pool.state == "degraded")
        # A teardown comes while the remount is due: whichever is first, they do not overlap.
        run(agent, "teardown", lambda task: agent.pool.teardown(task, 0.5))
        assert agent.pool.state == "gone"
    assert trace.most == 1
    assert set().union(*(trace.threads_of(site) for site in changes)) == {"operator"}


def test_the_list_of_a_remount_is_empty_from_the_first_ping_on(any_quick_master: Master, paths: Paths) -> None:
    master = any_quick_master
    with Sites() as trace, mounted(master, paths, chunks=3) as agent:
        heartbeat = agent.pool.parts.heartbeat
        assert heartbeat is not None
        until(lambda: heartbeat.pulse().status == 1)
        master.restart()
        until(lambda: agent.pool.state == "degraded")
        until(lambda: agent.pool.state == "ready", 20)
        lists = [detail["segments"] for kind, site, detail in trace.events if site.endswith("remount_segments")]
        assert lists
        assert not any(lists)
        assert len(listed(master)) == 3
        teardown_now(agent)


def test_no_two_attempts_to_mount_share_an_id(quick_master: Master, paths: Paths) -> None:
    with Sites() as trace, mounted(quick_master, paths) as agent:
        for _ in range(2):
            quick_master.restart()
            until(lambda: agent.pool.state == "degraded")
            until(lambda: agent.pool.state == "ready", 20)
        teardown_now(agent)
    asked = [d["segment"] for kind, site, d in trace.events if kind == "before" and site.endswith(".mount_segment")]
    assert len(asked) == len(set(asked)) == 6


def test_the_owner_of_the_memory_runs_no_transfer_engine(quick_master: Master, paths: Paths) -> None:
    provision(small_plan(quick_master), paths, mount=True)
    (agent,) = agents(paths)
    (child,) = agent.children(recursive=True)

    def libraries(pid: int) -> set[str]:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[-1] for line in lines if "mooncake" in line.split()[-1]}

    assert libraries(child.pid), "the child is where the Transfer Engine is"
    assert libraries(agent.pid) == set()
    teardown_pool("dev", paths, now=True)


def test_memory_that_does_not_come_back_is_told_in_bytes(
    quick_master: Master, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1 << 34]
    monkeypatch.setattr(holders, "node_free", lambda nodes: dict.fromkeys(nodes, free[0]))
    plan = small_plan(quick_master, chunks=8)  # more than what is taken for noise
    with agent_here(plan, paths) as agent:
        run(agent, "provision", agent.pool.provision)
        agent.pool.parts.accountable = {0}  # as where the node's free memory showed the allocation
        teardown_now(agent)  # and its release does not show
        (warning,) = [text for text in agent.pool.warnings if "did not come back" in text]
        assert f"({plan.effective_bytes} bytes)" in warning
        assert "node 0" in warning


def test_a_handle_that_comes_back_with_another_nonce_is_another_allocation() -> None:
    """As after a reload of the driver: the handle's bytes are the same, what they lead to is not."""

    def bound(nonce: str) -> Binding:
        chunks = (EgmChunk(0, 0, 1 << 44, 16 << 20),)
        fields = EgmFields("tray", nonce, "cuda-fabric", "", "host", True, chunks)
        handle = bytes(range(64))
        descriptor = nvlink_descriptor("h:1", [(0, 1 << 44, 16 << 20, handle)], egm=fields)
        return Binding("h:1", descriptor, None, 0.0)

    first, second = bound("a" * 32), bound("b" * 32)
    before, after = (binding.chunk((1 << 44) + 4096, 4096) for binding in (first, second))
    assert (before.base, before.nbytes) == (after.base, after.nbytes)
    assert before.identity != after.identity
    assert not first.same_as(second.descriptor, [before])
    assert first.same_as(bound("a" * 32).descriptor, [before])


def test_what_is_in_use_is_read_before_the_grace_begins(quick_master: Master, paths: Paths) -> None:
    with mounted(quick_master, paths) as agent:
        put(quick_master, agent, "k", b"k" * 5000)
        with Sites() as trace:
            run(agent, "teardown", lambda task: agent.pool.teardown(task, 1.0))
        asked = trace.index("done", "mooncake.admin.segments_detail")
        assert asked < trace.index("before", "mooncake.master.graceful_unmount_segment")
    (drain,) = [event for event in read_events(paths.ledger("dev")) if event.what == "drain begins"]
    assert drain.detail["bytes_in_use"] >= 5000
