"""Copy and move tasks: reported failed at once, so that the jobs that wait for them end."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from egmctl.mooncake import calls
from egmctl.mooncake.codec import build, decode
from egmctl.mooncake.master import MasterClient
from egmctl.paths import Paths
from egmctl.provider.agent import Agent
from egmctl.provider.tasks import REFUSAL
from tests.lifecycle.support import Sites, mounted, put
from tests.provider.pools import listed, private_paths, run, teardown_now, until
from tests.support.master import Master
from tests.support.stock import StockClient


def drain(master: Master, *names: str) -> str:
    """Start a drain job; its id."""
    body = json.dumps({"segments": list(names)}).encode()
    request = urllib.request.Request(f"http://{master.admin_address}/api/v1/drain_jobs", data=body, method="POST")
    with urllib.request.urlopen(request, timeout=5) as answer:
        return str(json.load(answer)["job_id"])


def job(master: Master, number: str) -> dict[str, Any]:
    url = f"http://{master.admin_address}/api/v1/drain_jobs/query?job_id={number}"
    with urllib.request.urlopen(url, timeout=5) as answer:
        found = json.load(answer)
        assert isinstance(found, dict)
        return found


def ended(master: Master, number: str) -> dict[str, Any] | None:
    found = job(master, number)
    return None if found["status_name"] in ("CREATED", "RUNNING") else found


def names(master: Master, agent: Agent) -> list[str]:
    return listed(master, agent.pool.record_now().endpoint)


def test_a_drain_job_ends_and_the_objects_stay_where_they_are(new_master: Master, paths: Paths, tmp_path: Path) -> None:
    master = new_master
    with mounted(master, paths) as agent, StockClient(master.address) as stock:
        values = {f"k{index}": bytes([index]) * 50_000 for index in range(6)}
        for key, value in values.items():
            assert stock.put(key, value) == 0
        with private_paths(tmp_path / "elsewhere") as others, mounted(master, others, "target") as target:
            number = drain(master, *names(master, agent))
            found = until(lambda: ended(master, number), 20)
            assert (found["status_name"], found["active_units"]) == ("FAILED", 0)
            assert found["failed_units"] >= len(values)
            assert {key: stock.get(key) for key in values} == values
            assert agent.pool.state == target.pool.state == "ready"
            assert agent.pool.meters.events("tasks_refused") == found["failed_units"]
            teardown_now(target)
        put(master, agent, "still-allocated-here", b"x" * 100)
        teardown_now(agent)


def test_a_copy_task_is_reported_failed_with_the_reason(any_quick_master: Master, paths: Paths) -> None:
    master = any_quick_master
    with mounted(master, paths) as agent:
        first, second = names(master, agent)
        put(master, agent, "k", b"k" * 100, first)
        with MasterClient(master.address) as client:
            body = build(bytes.fromhex("fd800c800c84800cff"), ("k", "default", [second]))
            number = decode(client.rpc.call("CreateCopyTask", body)).value

            def state() -> tuple[int, str]:
                task = decode(client.rpc.call("QueryTask", build(calls.UUID, number))).value
                return task[2], task[6]

            until(lambda: state() == (2, REFUSAL), 10)
        teardown_now(agent)


def test_tasks_are_asked_for_by_the_worker_and_never_by_the_heartbeat(quick_master: Master, paths: Paths) -> None:
    with mounted(quick_master, paths) as agent, Sites() as trace:
        until(lambda: trace.counts.get("mooncake.master.fetch_tasks", 0) >= 2)
        assert trace.threads_of("mooncake.master.fetch_tasks") == {"operator"}
        assert trace.threads_of("mooncake.master.ping") == {"heartbeat"}
        teardown_now(agent)


def test_no_tasks_are_asked_for_while_the_master_does_not_answer(quick_master: Master, paths: Paths) -> None:
    with mounted(quick_master, paths) as agent:
        quick_master.kill()
        until(lambda: agent.pool.state == "degraded")
        with Sites() as trace:
            until(lambda: trace.counts.get("mooncake.master.ping", 0) >= 3)
            assert "mooncake.master.fetch_tasks" not in trace.counts
        quick_master.start()
        until(lambda: agent.pool.state == "ready", 20)
        teardown_now(agent)


@pytest.mark.parametrize("grace", [0.0, 4.0])
def test_a_drain_job_that_meets_a_teardown_ends_as_well(
    new_master: Master, paths: Paths, tmp_path: Path, grace: float
) -> None:
    master = new_master
    with mounted(master, paths) as agent:
        for name in names(master, agent):
            put(master, agent, f"in {name}", b"x" * 1000, name)
        with private_paths(tmp_path / "elsewhere") as others, mounted(master, others, "target") as target:
            agent.pool.tasks._next = time.monotonic() + 60  # what is assigned now waits for the teardown
            number = drain(master, *names(master, agent))
            until(lambda: job(master, number)["active_units"])
            if grace:
                agent.pool.tasks._next = 0.0
            teardown = agent.command("teardown", lambda task: agent.pool.teardown(task, grace))
            if grace:  # the tasks are answered during it; the job looks again when the segments have gone
                until(lambda: agent.pool.parts.drain_until is not None)
                until(lambda: agent.pool.meters.events("tasks_refused"), 3)
                assert agent.pool.state == "tearing-down"
            teardown.wait()
            assert agent.pool.state == "gone"
            assert until(lambda: ended(master, number), 10)["active_units"] == 0
            teardown_now(target)


def test_chunks_that_a_drain_job_has_emptied_are_torn_down_gracefully_too(new_master: Master, paths: Paths) -> None:
    master = new_master
    with mounted(master, paths, master_admin_addr=None) as agent:
        number = drain(master, *names(master, agent))
        assert until(lambda: ended(master, number), 10)["status_name"] == "SUCCEEDED"
        run(agent, "teardown", lambda task: agent.pool.teardown(task, 1.0))
        assert agent.pool.state == "gone"
        assert listed(master) == []
