"""The health endpoint of a real agent: what it says in each state, and that no client can hold it or the pings up."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from egmctl.errors import EgmError, PreflightError
from egmctl.ledger import read_only
from egmctl.paths import Paths
from egmctl.provider import health
from egmctl.provider.agent import Agent
from egmctl.provider.commands import pool_status, provision
from egmctl.provider.health import HealthServer, trouble, worker_limit
from egmctl.provider.task import Task
from tests.provider.pools import (
    agent_here,
    clean_up,
    provision_and_mount,
    run,
    small_plan,
    teardown_now,
    traced,
    until,
)
from tests.support.master import Master

LOOPBACK = "127.0.0.1:0"


def ask(url: str, method: str = "GET") -> tuple[int, str, str]:
    """(status, content type, body)."""
    request = urllib.request.Request(url, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def figures(url: str) -> dict[str, float]:
    """Samples of /metrics by name and labels, as they are written, without the pool's label."""
    status, kind, page = ask(f"{url}/metrics")
    assert status == 200, page
    assert kind.startswith("text/plain")
    found = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.replace('pool="dev",', "").replace(',pool="dev"', "").replace('{pool="dev"}', "")] = float(value)
    return found


def url_of(agent: Agent) -> str:
    assert agent.health is not None
    return agent.health.url


@pytest.fixture
def bare() -> Iterator[HealthServer]:
    """A server without an agent behind it: its pool is ready, its worker lives."""
    pool: Any = SimpleNamespace(
        name="dev",
        state="ready",
        reason="",
        live=None,
        task=Task("test"),
        plan=SimpleNamespace(largest_object_bytes=1 << 24),
    )
    operator: Any = SimpleNamespace(last_turn=time.monotonic(), is_alive=lambda: True)
    server = HealthServer(LOOPBACK, client_timeout=1.0, max_clients=8)
    server.tell_of(pool, operator)
    yield server
    server.close()


def port_of(server: HealthServer) -> int:
    return int(server.url.rpartition(":")[2])


def test_without_an_address_nothing_listens_and_status_says_so(quick_master: Master, paths: Paths) -> None:
    with agent_here(small_plan(quick_master), paths) as agent:
        run(agent, "provision", agent.pool.provision)
        assert agent.health is None
        (entry,) = pool_status(paths)
        assert entry["health"] is None


def test_ready_is_said_only_while_the_pool_is_ready(quick_master: Master, paths: Paths) -> None:
    with agent_here(small_plan(quick_master, health_addr=LOOPBACK), paths) as agent:
        url = url_of(agent)
        assert url.startswith("http://127.0.0.1:")
        assert ask(f"{url}/readyz")[0] == 503
        run(agent, "provision", agent.pool.provision)
        status, kind, body = ask(f"{url}/readyz")
        assert (status, kind) == (503, "application/json")
        assert json.loads(body) == {"pool": "dev", "ready": False, "state": "provisioned", "reason": ""}
        run(agent, "mount", agent.pool.mount)
        status, _, body = ask(f"{url}/readyz")
        assert (status, json.loads(body)["state"]) == (200, "ready")
        (entry,) = pool_status(paths)
        assert entry["health"] == url

        quick_master.kill()
        until(lambda: agent.pool.state == "degraded")
        status, _, body = ask(f"{url}/readyz")
        assert status == 503
        assert "does not answer pings" in json.loads(body)["reason"]
        assert ask(f"{url}/healthz")[0] == 200  # ending the agent would mend nothing, and lose the memory


def test_the_endpoint_ends_with_the_agent(quick_master: Master, paths: Paths) -> None:
    with agent_here(small_plan(quick_master, health_addr=LOOPBACK), paths) as agent:
        url = url_of(agent)
        run(agent, "provision", agent.pool.provision)
        teardown_now(agent)
    with pytest.raises(urllib.error.URLError):
        ask(f"{url}/healthz")


def test_a_port_that_is_taken_is_refused_before_anything_exists_and_its_holder_named(
    quick_master: Master, paths: Paths
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with traced() as trace, pytest.raises(PreflightError, match=r"taken by .*\(pid \d+\)") as caught:
            provision(small_plan(quick_master, health_addr=address), paths, foreground=True)
        assert caught.value.exit_code == 3
        assert caught.value.where == f"health_addr {address}"
        assert "health_addr" in caught.value.hint
        assert not [site for site in trace.sites() if site.startswith("memory.")]
        assert read_only(paths.ledger("dev")) is None
        with pytest.raises(PreflightError, match=r"taken by .*\(pid \d+\)"):
            provision(small_plan(quick_master, health_addr=address), paths)
    provision(small_plan(quick_master, health_addr=address), paths)
    assert ask(f"http://{address}/healthz")[0] == 200
    clean_up("dev", paths)


def test_the_figures_follow_a_pool_through_its_life(quick_master: Master, paths: Paths) -> None:
    plan = small_plan(quick_master, chunks=3, health_addr=LOOPBACK)
    node = plan.nodes[0].numa_node
    with agent_here(plan, paths) as agent:
        url = url_of(agent)
        before = figures(url)
        assert before[f'egmctl_capacity_bytes{{numa_node="{node}"}}'] == plan.nodes[0].bytes
        assert before[f'egmctl_allocated_bytes{{numa_node="{node}"}}'] == 0
        assert before['egmctl_chunks{state="planned"}'] == 3
        assert "egmctl_pings_sent_total" not in before
        provision_and_mount(agent)
        until(lambda: figures(url)["egmctl_pings_sent_total"] > 0)
        now = figures(url)
        assert now[f'egmctl_allocated_bytes{{numa_node="{node}"}}'] == plan.effective_bytes
        assert now['egmctl_chunks{state="mounted"}'] == 3
        assert now['egmctl_pool_info{memory_kind="shm",protocol="tcp"}'] == 1
        states = {name: value for name, value in now.items() if name.startswith("egmctl_pool_state")}
        assert [name for name, value in states.items() if value] == ['egmctl_pool_state{state="ready"}']
        assert len(states) == 9
        assert now["egmctl_pool_ready"] == 1
        assert now["egmctl_pings_missed_total"] == 0
        assert 0 <= now["egmctl_master_last_contact_seconds"] < 10
        assert now['egmctl_stage_seconds_count{direction="do",stage="memory"}'] == 1
        assert now['egmctl_stage_seconds_sum{direction="do",stage="memory"}'] > 0
        assert now['egmctl_stage_failures_total{direction="do",stage="segments"}'] == 0
        assert now["egmctl_rollbacks_total"] == now["egmctl_cleanups_total"] == 0
        assert now["egmctl_remounts_total"] == now["egmctl_transfer_engine_restarts_total"] == 0
        assert now["egmctl_cleanup_pending_bytes"] == 0
        secret = agent.pool.record_now().nonce
        assert secret not in ask(f"{url}/metrics")[2]
        teardown_now(agent)
        after = figures(url)
        assert after['egmctl_pool_state{state="gone"}'] == 1
        assert after['egmctl_chunks{state="released"}'] == 3
        assert after["egmctl_cleanups_total"] == 1


def test_a_failed_mount_counts_as_a_failure_of_its_stage_and_a_rollback(quick_master: Master, paths: Paths) -> None:
    with agent_here(small_plan(quick_master, health_addr=LOOPBACK), paths) as agent:
        run(agent, "provision", agent.pool.provision)
        with traced(("mooncake.master.mount_segment", 2, "before")), pytest.raises(EgmError, match="injected"):
            run(agent, "mount", agent.pool.mount)
        now = figures(url_of(agent))
        assert now['egmctl_stage_failures_total{direction="do",stage="segments"}'] == 1
        assert now['egmctl_stage_failures_total{direction="undo",stage="segments"}'] == 0
        assert now['egmctl_stage_seconds_count{direction="undo",stage="publication"}'] == 1
        assert now["egmctl_rollbacks_total"] == 1
        assert now["egmctl_cleanups_total"] == 0


def test_a_master_that_is_gone_shows_in_missed_pings_and_as_pending_bytes(quick_master: Master, paths: Paths) -> None:
    plan = small_plan(quick_master, health_addr=LOOPBACK)
    with agent_here(plan, paths) as agent:
        url = url_of(agent)
        provision_and_mount(agent)
        quick_master.kill()
        until(lambda: figures(url)["egmctl_pings_missed_total"] > 0)
        with pytest.raises(EgmError):
            teardown_now(agent)
        now = figures(url)
        assert now['egmctl_pool_state{state="cleanup-pending"}'] == 1
        assert now["egmctl_cleanup_pending_bytes"] == plan.effective_bytes
        assert now['egmctl_stage_failures_total{direction="undo",stage="segments"}'] == 1


def test_chunks_that_were_mounted_anew_are_counted(quick_master: Master, paths: Paths) -> None:
    with agent_here(small_plan(quick_master, health_addr=LOOPBACK), paths) as agent:
        provision_and_mount(agent)
        quick_master.restart()
        until(lambda: figures(url_of(agent))["egmctl_remounts_total"] == 2, 30)
        until(lambda: ask(f"{url_of(agent)}/readyz")[0] == 200, 30)


def test_a_transfer_engine_child_that_was_replaced_is_counted(quick_master: Master, paths: Paths) -> None:
    with agent_here(small_plan(quick_master, health_addr=LOOPBACK), paths) as agent:
        provision_and_mount(agent)
        engine = agent.pool.parts.engine
        assert engine is not None
        assert engine.pid
        subprocess.run(["kill", "-KILL", str(engine.pid)], check=True)
        until(lambda: figures(url_of(agent))["egmctl_transfer_engine_restarts_total"] == 1, 60)


def test_without_the_metrics_extra_the_other_pages_work_and_this_one_names_it(
    bare: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "egmctl.provider.metrics", raising=False)
    status, kind, body = ask(f"{bare.url}/metrics")
    assert (status, kind) == (501, "application/json")
    assert "pip install 'egmctl[metrics]'" in json.loads(body)["error"]
    assert ask(f"{bare.url}/healthz")[0] == 200


def test_the_endpoint_does_not_load_the_metrics_library_until_it_is_asked(tmp_path: Path) -> None:
    code = (
        "import sys; from egmctl.provider.health import HealthServer; s = HealthServer('127.0.0.1:0'); s.close();"
        "assert 'prometheus_client' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# What a client may do


def test_before_there_is_a_pool_to_tell_of_it_says_that_the_agent_is_starting() -> None:
    server = HealthServer(LOOPBACK)
    try:
        assert ask(f"{server.url}/healthz") == (503, "application/json", '{"error": "the agent is starting"}\n')
    finally:
        server.close()
        server.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/healthz", 200),
        ("GET", "/healthz?verbose=1", 200),
        ("HEAD", "/healthz", 200),
        ("POST", "/healthz", 405),
        ("DELETE", "/readyz", 405),
        ("GET", "/", 404),
        ("GET", "/../etc/passwd", 404),
    ],
)
def test_only_reading_what_there_is_is_answered(bare: HealthServer, method: str, path: str, status: int) -> None:
    got, kind, body = ask(f"{bare.url}{path}", method)
    assert (got, kind) == (status, "application/json")
    assert bool(body) == (method != "HEAD")


def test_a_head_request_tells_the_length_of_the_page_and_sends_none(bare: HealthServer) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", port_of(bare), timeout=5)) as connection:
        connection.request("HEAD", "/readyz")
        answer = connection.getresponse()
        assert int(answer.headers["Content-Length"]) == len(ask(f"{bare.url}/readyz")[2])
        assert answer.read() == b""


def talk(port: int, data: bytes) -> bytes:
    """Everything that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(data)
        received = b""
        while piece := sock.recv(65536):
            received += piece
        return received


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\r\n\r\n", 400),
        (b"hello\r\n\r\n", 400),
        (b"GET /healthz\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\n\n", 400),
        (b"GET /healthz HTTP/2.0\r\n\r\n", 505),
        (b"GET /healthz HTTP/1.0\n\n", 200),
        (b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 9000, 431),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", 400),
        (b"POST /healthz HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + b"y" * 100000, 405),
        (b"GET /healthz HTTP/1.1\r\n\r\nGET /readyz HTTP/1.1\r\n\r\n", 200),
    ],
)
def test_whatever_a_client_sends_gets_one_answer(bare: HealthServer, data: bytes, status: int) -> None:
    received = talk(port_of(bare), data)
    assert re.findall(rb"HTTP/1.1 (\d+) ", received) == [str(status).encode()]
    assert ask(f"{bare.url}/healthz")[0] == 200


def test_clients_that_say_nothing_are_dropped_in_time_and_hold_nobody_up(bare: HealthServer) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port_of(bare)), 5)) for _ in range(8)]
        began = time.monotonic()
        assert ask(f"{bare.url}/healthz")[0] == 200  # the ninth: the oldest gave way
        assert time.monotonic() - began < 0.8
        for sock in idle:
            sock.settimeout(3)
            assert sock.recv(1) == b""
        assert time.monotonic() - began < 3


def test_a_client_that_drips_its_request_has_no_more_time_than_others(bare: HealthServer) -> None:
    with socket.create_connection(("127.0.0.1", port_of(bare)), 5) as sock:
        began = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT011, PT012 - reset or broken pipe, at whichever byte
            while time.monotonic() - began < 4:
                sock.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() - began < 3


def test_slow_clients_do_not_delay_the_pings(quick_master: Master, paths: Paths) -> None:
    with agent_here(small_plan(quick_master, health_addr=LOOPBACK), paths) as agent, ExitStack() as stack:
        provision_and_mount(agent)
        port = int(url_of(agent).rpartition(":")[2])
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 5)).sendall(b"GET /")
        heartbeat = agent.pool.parts.heartbeat
        assert heartbeat is not None
        before = heartbeat.pulse().sent
        time.sleep(2.5)
        pulse = heartbeat.pulse()
        assert pulse.sent - before >= 2
        assert pulse.missed == 0


# What stuck means


def test_a_worker_that_hangs_makes_the_agent_unhealthy_and_working_on_makes_it_well_again(
    quick_master: Master, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "WORKER_QUIET", 0.6)
    with agent_here(small_plan(quick_master, health_addr=LOOPBACK), paths) as agent:
        url = url_of(agent)
        assert ask(f"{url}/healthz")[0] == 200
        hang = agent.command("long", lambda task: setattr(agent.pool, "task", task) or time.sleep(2))
        until(lambda: ask(f"{url}/healthz")[0] == 503, 5)
        body = json.loads(ask(f"{url}/healthz")[2])
        assert not body["ok"]
        assert "the worker (long) has given no sign" in body["reason"]
        hang.wait()
        until(lambda: ask(f"{url}/healthz")[0] == 200, 5)

        def slow(task: Task) -> None:
            agent.pool.task = task
            for _ in range(15):
                time.sleep(0.1)
                task.tell("long", "goes on")

        job = agent.command("slow", slow)
        while not job.done(0.05):
            assert ask(f"{url}/healthz")[0] == 200


def test_a_heartbeat_that_hangs_makes_the_agent_unhealthy(
    quick_master: Master, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "HEARTBEAT_QUIET", 2.0)
    with agent_here(small_plan(quick_master, health_addr=LOOPBACK), paths) as agent:
        provision_and_mount(agent)
        heartbeat = agent.pool.parts.heartbeat
        assert heartbeat is not None
        assert trouble(agent.pool, agent.operator) == ""
        with heartbeat._gate:  # as long as a ping that never ends
            until(lambda: ask(f"{url_of(agent)}/healthz")[0] == 503, 5)
            assert "the heartbeat" in trouble(agent.pool, agent.operator)
        until(lambda: ask(f"{url_of(agent)}/healthz")[0] == 200, 5)


def test_a_huge_chunk_may_take_its_time() -> None:
    def pool(largest: int) -> Any:
        return SimpleNamespace(plan=SimpleNamespace(largest_object_bytes=largest))

    assert worker_limit(pool(16 << 20)) == 120
    assert worker_limit(pool(1 << 40)) == 2048  # a TiB at the 4 GiB/s that was measured takes 256 s
