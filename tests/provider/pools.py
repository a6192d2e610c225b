"""Small pools for tests: plans of a few 16 MiB chunks, an agent in this process, and what to look at afterwards."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from egmctl.mooncake.admin import AdminClient
from egmctl.paths import Paths
from egmctl.planning import Plan, make_plan, parse_spec
from egmctl.provider.agent import Agent
from egmctl.provider.commands import teardown_pool
from egmctl.provider.task import Task
from egmctl.steps import watch
from egmctl.topology import read_topology
from tests.support.master import Master

MOONCAKE_KEYS = ("local_hostname", "metadata_server", "master_server_addr", "master_admin_addr")


def small_plan(master: Master, name: str = "dev", chunks: int = 2, **changes: Any) -> Plan:
    """``chunks`` of 16 MiB; lease 1 s. ``changes`` go to the spec's tables by key (None removes)."""
    pool: dict[str, Any] = {
        "name": name,
        "memory": "shm",
        "enable_egm_store_pool": True,
        "global_segment_size": chunks * (16 << 20),
        "max_chunk_size": "16MiB",
        "lease_ttl": 1,
        "client_expiry": 2,
    }
    mooncake: dict[str, Any] = {
        "local_hostname": "127.0.0.1",
        "master_server_addr": master.address,
        "master_admin_addr": master.admin_address,
    }
    for key, value in changes.items():
        table = mooncake if key in MOONCAKE_KEYS else pool
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value
    spec = parse_spec({"pool": pool, "mooncake": mooncake})
    return make_plan(spec, read_topology(), granularity=lambda node: 4096)


@contextmanager
def private_paths(tmp_path: Path) -> Iterator[Paths]:
    """Paths of one test; every pool that is left is torn down by force, and every agent ended."""
    with tempfile.TemporaryDirectory(prefix="egm", dir="/tmp") as runtime:
        paths = Paths(tmp_path / "state", Path(runtime) / "run")
        try:
            yield paths
        finally:
            end_agents(paths)


def agents(paths: Paths) -> list[psutil.Process]:
    """Agent processes of these paths, found by their command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "egmctl.provider.agent" in line and str(paths.state) in line:
            found.append(process)
    return found


def end_agents(paths: Paths) -> None:
    for process in agents(paths):
        with _gone():
            process.kill()
            process.wait(5)


@contextmanager
def _gone() -> Iterator[None]:
    try:
        yield
    except psutil.Error:
        pass


def children_of(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def listed(master: Master, prefix: str = "") -> list[str]:
    """Names of the segments that the Master lists."""
    rows = AdminClient(master.admin_address).segments_detail()
    return sorted(row.name for row in rows if row.name.startswith(prefix))


def until(condition: Callable[[], Any], seconds: float = 15.0, every: float = 0.05) -> Any:
    """What ``condition`` gives once it is true. Fails the test when that takes longer."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(every)


class Fault(OSError):
    """What an injected failure raises."""


class Trace:
    """A watcher of steps: records their order, and fails one of them, before or after it was done."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        self.threads: list[str] = []
        self.counts: dict[str, int] = {}
        self.fail: tuple[str, int, str] | None = None
        self.failed = False
        self._mutex = threading.Lock()

    def before(self, site: str, detail: dict[str, Any]) -> None:
        with self._mutex:
            self.counts[site] = self.counts.get(site, 0) + 1
            nth = self.counts[site]
            wanted = self.fail == (site, nth, "before")
            self.events.append(("failed" if wanted else "before", site, dict(detail)))
        if wanted:
            self.failed = True
            raise Fault(5, f"injected before {site} #{nth}")

    def after(self, site: str, detail: dict[str, Any], error: BaseException | None) -> None:
        with self._mutex:
            nth = self.counts[site]
            self.events.append(("done" if error is None else "error", site, dict(detail)))
            wanted = error is None and not self.failed and self.fail == (site, nth, "after")
        if wanted:
            self.failed = True
            raise Fault(5, f"injected after {site} #{nth}")

    def sites(self) -> list[str]:
        return [site for kind, site, _ in self.events if kind == "before"]

    def index(self, kind: str, site: str, **detail: Any) -> int:
        """Where an event first is. Fails the test when it is not there."""
        for position, (k, s, d) in enumerate(self.events):
            if k == kind and s == site and all(d.get(key) == value for key, value in detail.items()):
                return position
        raise AssertionError(f"no {kind} {site} {detail} in the trace")

    def premature_releases(self) -> list[str]:
        """Chunks unmapped while a segment may have been at the Master: asked for and not yet unmounted or disproved."""
        alive: set[Any] = set()
        wrong = []
        for kind, site, detail in self.events:
            if site == "mooncake.master.mount_segment" and kind == "before":
                alive.add(detail["segment"])
            elif site == "mooncake.master.unmount_segment" and kind == "done":
                alive.discard(detail["segment"])
            elif site in ("memory.shm.unmap", "memory.shm.close") and kind == "before" and alive:
                wrong.append(f"{site} {detail} while {alive}")
        return wrong


@contextmanager
def traced(fail: tuple[str, int, str] | None = None) -> Iterator[Trace]:
    trace = Trace()
    trace.fail = fail
    watch(trace)
    try:
        yield trace
    finally:
        watch(None)


@contextmanager
def agent_here(plan: Plan, paths: Paths) -> Iterator[Agent]:
    """An agent in this process, torn down (by abandoning, at the worst) when left."""
    with Agent(plan, paths, who="test") as agent:
        try:
            yield agent
        finally:
            watch(None)
            if not agent.over:
                until(lambda: not agent.operator.busy(), 30)
                run(agent, "teardown", lambda task: agent.pool.teardown(task, 0.0, abandon=True))


def run(agent: Agent, name: str, command: Callable[[Task], Any], **options: Any) -> dict[str, Any]:
    """Carry out a command on the agent's own worker thread."""
    return agent.command(name, command, **options).wait()


def provision_and_mount(agent: Agent) -> None:
    run(agent, "provision", agent.pool.provision)
    run(agent, "mount", agent.pool.mount)


def teardown_now(agent: Agent) -> None:
    run(agent, "teardown", lambda task: agent.pool.teardown(task, 0.0))


def clean_up(name: str, paths: Paths) -> None:
    teardown_pool(name, paths, now=True)


def nothing_left(paths: Paths, name: str = "dev") -> list[str]:
    """What of a pool that is gone still lies about on this host."""
    left = [str(path) for path in (paths.lock(name), paths.socket(name)) if path.exists()]
    left += [f"agent {process.pid}" for process in agents(paths)]
    return left


def mapped_here() -> int:
    """Chunk files that this process maps."""
    with open(f"/proc/{os.getpid()}/maps") as maps:
        return sum("/memfd:egm-chunk" in line for line in maps)
