"""What the lifecycle's tests share: a mounted agent in this process, objects in its pool, commands as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from egmctl.mooncake.master import MasterClient, ReplicateConfig
from egmctl.paths import Paths
from egmctl.planning import Plan
from egmctl.provider.agent import Agent
from egmctl.provider.pool import Timing
from egmctl.steps import watch
from tests.provider.pools import Trace, agent_here, provision_and_mount, small_plan
from tests.support.master import Master

__all__ = ["CLIENT", "Sites", "command", "mounted", "place_of", "put", "quick_timing", "start_command", "write_plan"]

CLIENT = (11, 22)


def quick_timing(agent: Agent) -> None:
    agent.pool.timing = Timing(check_interval=0.3, rpc_timeout=1.0, restart_patience=10)


@contextmanager
def mounted(master: Any, paths: Paths, name: str = "dev", **changes: Any) -> Iterator[Agent]:
    """A pool that is ready at ``master``, its agent in this process."""
    with agent_here(small_plan(master, name, **changes), paths) as agent:
        quick_timing(agent)
        provision_and_mount(agent)
        yield agent


def put(master: Master, agent: Agent, key: str, data: bytes, segment: str = "") -> None:
    """An object put directly into the pool, by a client of its own."""
    config = ReplicateConfig(preferred_segments=(segment,) if segment else ())
    with MasterClient(master.address) as client:
        (replica,) = client.put_start(CLIENT, key, len(data), config)
        for chunk in agent.pool.parts.chunks.values():
            if chunk.address <= replica.address < chunk.address + chunk.spec.nbytes:
                offset = replica.address - chunk.address
                with chunk.host_view() as view:
                    view[offset : offset + len(data)] = data
        client.put_end(CLIENT, key)


def place_of(master: Master, key: str) -> int:
    """The address at which an object lies. Raises what the Master answers."""
    with MasterClient(master.address) as client:
        return client.get_replica_list(key).replicas[0].address


class Sites(Trace):
    """A trace that also knows which thread did what."""

    def __init__(self) -> None:
        super().__init__()
        self.by: list[tuple[str, str]] = []

    def before(self, site: str, detail: dict[str, Any]) -> None:
        self.by.append((site, threading.current_thread().name))
        super().before(site, detail)

    def threads_of(self, site: str) -> set[str]:
        return {thread for name, thread in self.by if name == site}

    def __enter__(self) -> Sites:
        watch(self)
        return self

    def __exit__(self, *exc: object) -> None:
        watch(None)


# Commands, each a process of its own


def write_plan(plan: Plan, folder: Path) -> Path:
    path = folder / f"{plan.pool}.plan.json"
    path.write_text(json.dumps(plan.to_json()))
    return path


def _environment(paths: Paths, extra: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "EGMCTL_STATE_DIR": str(paths.state), "NO_COLOR": "1", **extra}


def start_command(paths: Paths, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    environment = _environment(paths, options.pop("environment", {}))
    return subprocess.Popen(
        [sys.executable, "-m", "egmctl", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def command(paths: Paths, *arguments: str, timeout: float = 90.0, **options: Any) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    process = start_command(paths, *arguments, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return process.returncode, out, err
