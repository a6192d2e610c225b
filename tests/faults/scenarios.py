"""The lives of a pool that are tried with faults. Each is a list of acts; between its marks are the steps to spoil."""

from __future__ import annotations

import grp
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from egmctl.ledger import PoolRecord, start_time
from egmctl.mooncake.codec import build
from egmctl.mooncake.master import MasterClient
from tests.faults.world import LEASE, POOL, TAG, Finished, Run
from tests.support.master import free_port

__all__ = ["SCENARIOS", "Scenario", "Unready"]

MIB = 1 << 20
CHUNK = 16 * MIB


class Unready(Exception):
    """Something that should have come about by itself has not, and nothing was injected to excuse it."""


class _Over(Exception):
    """The fault has shown: what is left to do is to clean up."""


@dataclass(frozen=True)
class Scenario:
    """``play`` does the acts; ``wants(label, site, what)`` says which of the steps seen in its window are spoiled here
    (others are spoiled in another scenario). ``seams`` and ``environment`` go to every process."""

    name: str
    play: Callable[[Run], None]
    wants: Callable[[str, str, str], bool] = lambda label, site, what: True
    seams: str = ""
    model: bool = False
    quick: bool = True
    """Whether the small selection of the normal suite takes faults from it."""
    spec: dict[str, Any] = field(default_factory=dict)


def spec_of(run: Run, **changes: Any) -> dict[str, dict[str, Any]]:
    master = run.world.master()
    spec: dict[str, dict[str, Any]] = {
        "pool": {
            "name": POOL,
            "memory": "shm",
            "enable_egm_store_pool": True,
            "egm_numa_nodes": "0",
            "global_segment_size": 2 * CHUNK,
            "max_chunk_size": CHUNK,
            "lease_ttl": LEASE,
            "client_expiry": run.world.expiry,
        },
        "mooncake": {
            "protocol": "tcp",
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_addr": master.address,
            "master_admin_addr": master.admin_address,
        },
    }
    for key, value in changes.items():
        table = "mooncake" if key in (*spec["mooncake"], "tenant_id") else "pool"
        spec[table][key] = value
    return spec


def act(run: Run, *argv: str, timeout: float = 60.0) -> Finished:
    """A command of the scenario. When it fails because of the fault, the scenario is over."""
    done = run.command(*argv, timeout=timeout)
    if done.code != 0:
        if run.fault is None:
            raise Unready(f"{' '.join(argv)}: exit {done.code}: {done.stderr.strip()[-600:]}")
        raise _Over
    return done


def become(run: Run, what: str, condition: Callable[[PoolRecord], bool], seconds: float = 20.0) -> None:
    """Wait for something the agent does by itself. A killed agent, or one with a fault, need not get there."""
    if run.until(condition, seconds):
        return
    if run.fault is None:
        raise Unready(f"{what}: not within {seconds} s; the ledger says {run.record()}")
    # A mount that was never answered, and did not arrive, could still do so: its chunk is not offered a second time,
    # and the pool says that it is degraded, until a teardown or the Master's own loss of the client settles it.
    record = run.record()
    open_question = (run.fault["site"], run.fault["mode"]) == ("mooncake.master.mount_segment", "fail")
    if open_question and record is not None and record.state == "degraded":
        raise _Over
    if run.fault["site"] == "mooncake.master.fetch_tasks":
        raise _Over  # a Master hands a task out once; one whose answer was lost ends by the Master's own time limit
    if run.fault["mode"] in ("fail", "lost", "hang"):
        run.extra["not recovered"] = what
    raise _Over


def agent_pid(run: Run) -> int:
    record = run.record()
    return 0 if record is None else record.agent_pid


def segment_ids(record: PoolRecord) -> set[tuple[int, int]]:
    return {row.id for row in record.live_segments if row.state == "mounted"}


def ready(record: PoolRecord) -> bool:
    return record.state == "ready"


# Lives


def life(run: Run) -> None:
    """Everything by hand and in order, with all that a spec may ask for, and an object to be drained."""
    spec = spec_of(
        run,
        local_buffer_size=1 * MIB,
        health_addr="127.0.0.1:0",
        group=grp.getgrgid(os.getgid()).gr_name,
    )
    path = str(run.write_spec(spec))
    run.mark("begin")
    act(run, "provision", path)
    act(run, "mount", POOL)
    with suppress(Exception):
        run.put(["object"], MIB)
    act(run, "teardown", POOL, "--grace", "0.3")
    act(run, "status", POOL, "--forget")
    run.mark("end")


def remount(run: Run) -> None:
    """The Master restarts empty; the agent mounts anew."""
    act(run, "provision", str(run.write_spec(spec_of(run))), "--mount")
    record = run.record()
    before = segment_ids(record) if record else set()
    run.world.master().restart()
    run.mark("begin")
    become(run, "mounted anew", lambda r: ready(r) and len(segment_ids(r) - before) == 2)
    # The probe comes after the record; the pool counts as recovered only then.
    become(run, "probed", lambda r: _since(run, "provider.probe.remove", run.marks[-1][0]))
    run.mark("end")
    act(run, "teardown", POOL, "--now")


def _since(run: Run, site: str, moment: int) -> bool:
    return any(line["site"] == site and line["phase"] == "after" and line["t"] > moment for line in run.events())


def vanished(run: Run) -> None:
    """Somebody takes one segment away behind our back; the agent notices and mounts that chunk anew."""
    act(run, "provision", str(run.write_spec(spec_of(run))), "--mount")
    record = run.record()
    if record is None:
        raise _Over
    row = record.live_segments[0]
    with MasterClient(run.world.master().address) as client:
        client.unmount_segment(row.id, row.client)
    run.mark("begin")
    become(run, "mounted anew", lambda r: ready(r) and row.id not in segment_ids(r) and len(segment_ids(r)) == 2)
    become(run, "probed", lambda r: _since(run, "provider.probe.remove", run.marks[-1][0]))
    run.mark("end")
    act(run, "teardown", POOL, "--now")


def engine(run: Run) -> None:
    """The Transfer Engine child dies and is replaced on its data port."""
    act(run, "provision", str(run.write_spec(spec_of(run))), "--mount")
    old = _engine_pid(run)
    run.mark("begin")
    if old:
        with suppress(ProcessLookupError):
            os.kill(old, signal.SIGKILL)
    become(run, "replaced", lambda r: ready(r) and _engine_pid(run) not in (0, old))
    become(run, "probed", lambda r: _since(run, "provider.probe.remove", run.marks[-1][0]))
    run.mark("end")
    act(run, "teardown", POOL, "--now")


def _engine_pid(run: Run) -> int:
    record = run.record()
    for resource in record.resources if record else ():
        if resource.kind == "engine" and resource.state == "present":
            return int(resource.detail.get("pid") or 0)
    return 0


def crowded(run: Run) -> None:
    """Our chunks are full when the probe comes, so that the Master places it with somebody else."""
    act(run, "provision", str(run.write_spec(spec_of(run))), "--mount")
    keys = [f"fill-{number}" for number in range(2 * CHUNK // MIB)]
    away = None
    try:
        for _ in range(3):
            run.put(keys, MIB)
            ping, away = run.mount_foreign(64 * MIB)
            old = _engine_pid(run)
            run.mark("begin")
            if old:
                with suppress(ProcessLookupError):
                    os.kill(old, signal.SIGKILL)
            if _placed_elsewhere(run, ping):
                break
            # On a busy machine the Master may take our agent for dead meanwhile, and the objects go with the chunks.
            run.remove(keys)
            away()
        else:
            raise Unready("the chunks do not stay full")
        run.mark("end")
    finally:
        with suppress(Exception):
            run.remove(keys)
        if away is not None:
            with suppress(Exception):
                away()
    act(run, "teardown", POOL, "--now")


def _placed_elsewhere(run: Run, ping: Callable[[], bool]) -> bool:
    """Whether the next probe was given space that is not ours; False when there was room for it."""
    moment = run.marks[-1][0]
    ends = ("provider.probe.revoke", "provider.probe.remove")
    become(run, "revoked", lambda r: ping() and any(_since(run, site, moment) for site in ends))
    return _since(run, ends[0], moment)


def orphan(run: Run) -> None:
    """The agent is killed; teardown works from its ledger, and ends a child that would not end by itself."""
    act(run, "provision", str(run.write_spec(spec_of(run, metadata_server=run.world.master().metadata_url))), "--mount")
    with suppress(ProcessLookupError):
        os.kill(agent_pid(run), signal.SIGKILL)
    run.until(lambda r: False, 5)
    run.mark("begin")
    act(run, "teardown", POOL)
    run.mark("end")


def stray(run: Run) -> None:
    """As `orphan`, with a process in the place of the child that outlived its agent all the same."""
    act(run, "provision", str(run.write_spec(spec_of(run))), "--mount")
    with suppress(ProcessLookupError):
        os.kill(agent_pid(run), signal.SIGKILL)
    run.until(lambda r: False, 5)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], env={**os.environ, TAG: run.tag})
    run.children.append(process)
    _rewrite_engine(run, process.pid)
    run.mark("begin")
    try:
        act(run, "teardown", POOL)
    finally:
        run.mark("end")


def _rewrite_engine(run: Run, pid: int) -> None:
    """Let the ledger name this process as the child, as it would had the kernel's parent-death signal failed."""
    db = sqlite3.connect(run.paths.ledger(POOL))
    try:
        detail = {"pid": pid, "started": start_time(pid), "data_port": 1}
        db.execute("UPDATE resource SET detail = ? WHERE kind = 'engine'", (json.dumps(detail),))
        db.commit()
    finally:
        db.close()


def second(run: Run) -> None:
    """The Master's process goes for good; after the fence the pool is mounted at another."""
    act(run, "provision", str(run.write_spec(spec_of(run, master_admin_addr=None))), "--mount")
    other = run.world.master("second")
    run.world.master().kill()
    become(run, "degraded", lambda r: r.state == "degraded")
    run.mark("begin")
    act(run, "mount", POOL, "--master", other.address)
    act(run, "teardown", POOL, "--now")
    run.mark("end")


def http(run: Run) -> None:
    """Publication at an HTTP metadata server."""
    path = str(run.write_spec(spec_of(run, metadata_server=run.world.master().metadata_url)))
    run.mark("begin")
    act(run, "provision", path, "--mount")
    act(run, "teardown", POOL, "--now")
    run.mark("end")


def moved(run: Run) -> None:
    """The data port of a dead child is somebody else's: all chunks move to a new endpoint."""
    run.environment["EGMCTL_FAULT_PATIENCE"] = "0.5"
    act(run, "provision", str(run.write_spec(spec_of(run))), "--mount")
    record = run.record()
    old = _engine_pid(run)
    port = next((r.detail.get("data_port") for r in record.resources if r.kind == "engine"), 0) if record else 0
    endpoint = record.endpoint if record else ""
    with socket.socket(socket.AF_INET6) as thief:
        thief.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if old and port:
            os.kill(old, signal.SIGKILL)
            for _ in range(500):
                try:
                    thief.bind(("::", port))
                    thief.listen()
                    break
                except OSError:
                    time.sleep(0.002)
        run.mark("begin")
        become(
            run,
            "moved",
            lambda r: ready(r) and r.endpoint != endpoint and len(segment_ids(r)) == 2 and r.exclusive,
            40,
        )
        become(run, "probed", lambda r: _since(run, "provider.probe.remove", run.marks[-1][0]))
        run.mark("end")
    act(run, "teardown", POOL, "--now")


def stuck(run: Run) -> None:
    """The Transfer Engine child does not end when asked."""
    act(run, "provision", str(run.write_spec(spec_of(run))), "--mount")
    child = _engine_pid(run)
    if child:
        os.kill(child, signal.SIGSTOP)
    run.mark("begin")
    act(run, "teardown", POOL, "--now")
    run.mark("end")


def task(run: Run) -> None:
    """The Master wants one of our objects copied."""
    act(run, "provision", str(run.write_spec(spec_of(run))), "--mount")
    run.put(["object"], 100)
    record = run.record()
    names = sorted(row.name for row in record.live_segments) if record else []
    run.mark("begin")
    with MasterClient(run.world.master().address) as client:
        for name in names:  # to where it is already, it is refused
            client.rpc.call("CreateCopyTask", build(bytes.fromhex("fd800c800c84800cff"), ("object", "default", [name])))
    become(run, "refused", lambda r: _since(run, "mooncake.master.complete_task", run.marks[-1][0]))
    run.mark("end")
    act(run, "teardown", POOL, "--now")


def again(run: Run) -> None:
    """A second incarnation on a fixed port keeps away from the addresses that the first has published there."""
    run.extra.setdefault("port", free_port())
    spec = spec_of(run, memory="cuda-fabric", protocol="nvlink", local_hostname=f"127.0.0.1:{run.extra['port']}")
    path = str(run.write_spec(spec))
    act(run, "provision", path, "--mount")
    act(run, "teardown", POOL, "--now")
    run.mark("begin")
    act(run, "provision", path, "--mount")
    act(run, "teardown", POOL, "--now")
    run.mark("end")


def fabric(run: Run) -> None:
    _cuda(run, "cuda-fabric", "nvlink", "P2PHANDSHAKE")


def fabric_http(run: Run) -> None:
    _cuda(run, "cuda-fabric", "nvlink", run.world.master().metadata_url)


def posix(run: Run) -> None:
    _cuda(run, "cuda-posix", "tcp", "P2PHANDSHAKE")


def _cuda(run: Run, kind: str, protocol: str, server: str) -> None:
    spec = spec_of(run, memory=kind, protocol=protocol, metadata_server=server)
    path = str(run.write_spec(spec))
    run.mark("begin")
    act(run, "provision", path)
    act(run, "mount", POOL)
    act(run, "teardown", POOL, "--now")
    run.mark("end")


def _only(*prefixes: str) -> Callable[[str, str, str], bool]:
    return lambda label, site, what: f"{site}:{what}".startswith(prefixes)


_PUBLICATION = ("metadata.", "ledger.commit:publi", "ledger.commit:endpoint")
_MASTER = ("mooncake.master.mount", "mooncake.master.unmount", "mooncake.master.remount")
_CHANGES = ("ledger.commit:", "provider.publish", "provider.unpublish", *_MASTER)

SCENARIOS: tuple[Scenario, ...] = (
    Scenario("life", life),
    Scenario("remount", remount),
    Scenario("vanished", vanished, _only(*_CHANGES), quick=False),
    Scenario("engine", engine),
    Scenario("crowded", crowded, _only("provider.probe.revoke")),
    Scenario("orphan", orphan),
    Scenario("stuck", stuck, _only("te.")),
    Scenario("task", task, _only("mooncake.master.complete_task", "mooncake.master.fetch_tasks")),
    Scenario("stray", stray, _only("provider.engine.")),
    Scenario("second", second, _only("provider.master.knock", "ledger.commit:fenced", "ledger.commit:mount", *_MASTER)),
    Scenario("http", http, _only(*_PUBLICATION)),
    Scenario("moved", moved, _only("te.restart", "handshake.", *_CHANGES), quick=False),
    Scenario("cuda-fabric", fabric, _only("memory.", "handshake.", *_CHANGES), model=True),
    Scenario(
        "cuda-fabric over http",
        fabric_http,
        _only("memory.cuda.unmap", "memory.cuda.release", *_PUBLICATION),
        model=True,
    ),
    Scenario("cuda-posix", posix, _only("memory.cuda.", "te."), model=True),
    Scenario(
        "again",
        again,
        _only("memory.cuda.reserve_elsewhere", "memory.cuda.unreserve_offer", "provider.remember"),
        seams="tests.faults.stubborn:install",
        model=True,
    ),
)
