"""What the command line asks of a pool, by name: provision, mount, tear down, tell, forget."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from egmctl.errors import BusyError, CleanupPendingError, EgmError, UsageError
from egmctl.ledger import LedgerUnreadable, PoolRecord, await_end, boot_id, holder_of, is_running, read_only
from egmctl.paths import Paths
from egmctl.planning import Plan, check_plan_fits
from egmctl.provider.control_client import SILENCE, AgentGone, ControlClient
from egmctl.provider.pool import ENDED
from egmctl.provider.progress import Progress, ProgressEvent, silent
from egmctl.provider.report import compare_with_master, ledger_report
from egmctl.provider.rescue import rescue_path
from egmctl.steps import step

if TYPE_CHECKING:
    from egmctl.topology import Topology

ANSWER_PATIENCE = 15.0
"""Seconds for which a living agent that does not answer on its control socket is asked again."""

__all__ = ["forget", "mount_pool", "pool_status", "provision", "teardown_pool"]


def provision(
    plan: Plan,
    paths: Paths,
    *,
    mount: bool = False,
    foreground: bool = False,
    progress: Progress = silent,
    started: Callable[[dict[str, Any]], None] | None = None,
    failed: Callable[[EgmError], None] | None = None,
) -> dict[str, Any]:
    """Make the pool exist, and with ``mount`` ready; its status. Done already with the same plan is success
    (``already`` is then true).

    In the ``foreground`` this process is the agent: ``started`` is called when the pool is there, ``failed`` with an
    error after which the agent goes on all the same (raised again at its end), and the return is after its end.

    Raises `BusyError` for a pool that exists with another plan or is being worked on, `CleanupPendingError` for what is
    left of one, `StalePlanError` and `PreflightError` when this machine cannot.
    """
    record = read_only(paths.ledger(plan.pool))
    taken_over = record is not None and record.nothing_begun and not agent_alive(record)
    if record is not None and record.state not in ENDED and not taken_over:
        return _existing(record, plan, paths, mount, progress)
    holder = holder_of(paths.lock(plan.pool))
    if holder is not None:
        raise BusyError(f"is owned by {holder}", where=f"pool {plan.pool}", hint="wait for it")
    from egmctl.topology import read_topology

    topology = read_topology()
    check_plan_fits(plan, topology)
    plan = _checked(plan, paths, topology, progress)
    if not foreground:
        from egmctl.provider.launch import start_agent

        return {**start_agent(plan, paths, mount=mount, progress=progress), "already": False}
    from egmctl.provider.agent import run_agent

    run_agent(plan, paths, mount=mount, progress=progress, started=started, failed=failed, interactive=True)
    return {"name": plan.pool, "state": "gone", "already": False}


def _checked(plan: Plan, paths: Paths, topology: Topology, progress: Progress) -> Plan:
    """The plan, with what the preflight warns of. Raises `PreflightError` with nothing touched."""
    from egmctl.checks.preflight import preflight

    if plan.memory_kind != "shm":  # which takes no time worth a word
        progress(ProgressEvent("preflight", f"seeing whether this machine can lend {plan.memory_kind} memory"))
    found = preflight(plan.memory_kind, [node.numa_node for node in plan.nodes], topology, paths=paths)
    told = [f"{each.observed}: {each.hint}" for each in found if each.status == "warn" and each.hint]
    return replace(plan, warnings=(*plan.warnings, *told))


def _existing(record: PoolRecord, plan: Plan, paths: Paths, mount: bool, progress: Progress) -> dict[str, Any]:
    name = plan.pool
    if not agent_alive(record):
        raise CleanupPendingError(
            f"an agent that is gone (pid {record.agent_pid}) left it {record.state}",
            where=f"pool {name}",
            hint=f"run `egmctl teardown {name}`, then provision again",
        )
    if _essence(record.plan) != _essence(plan.to_json()):
        raise BusyError(
            f"exists already with another plan, under agent {record.agent_pid} ({record.state})",
            where=f"pool {name}",
            hint=f"choose another name, or run `egmctl teardown {name}` first",
            facts={"agent_pid": record.agent_pid, "state": record.state},
        )
    if record.state in ("cleanup-pending", "tearing-down"):
        raise CleanupPendingError(
            f"is {record.state}: {record.reason or 'a teardown has begun'}",
            where=f"pool {name}",
            hint=f"run `egmctl teardown {name}` again",
        )
    if record.state == "provisioning":
        raise BusyError(f"is being provisioned by agent {record.agent_pid}", where=f"pool {name}", hint="wait for it")
    if mount:
        return mount_pool(name, paths, progress=progress)
    with ControlClient(paths.socket(name)) as client:
        return {**client.ask("status"), "already": True}


def _essence(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan without what only explains it."""
    return {key: value for key, value in plan.items() if key not in ("sources", "warnings")}


def agent_alive(record: PoolRecord) -> bool:
    """Whether the agent that the ledger names still runs."""
    same_boot = not record.boot_id or record.boot_id == boot_id()
    return same_boot and is_running(record.agent_pid, record.agent_started)


def _known(name: str, paths: Paths) -> PoolRecord:
    record = read_only(paths.ledger(name))
    if record is None:
        raise UsageError("there is no such pool", where=f"pool {name}", hint="see `egmctl status`")
    return record


def mount_pool(name: str, paths: Paths, master: str | None = None, progress: Progress = silent) -> dict[str, Any]:
    """Publish all chunks at the Master; the pool's status, ``already`` true when it was ready.

    Raises `UsageError` for an unknown pool, `FailedError` when the Master does not answer (the pool stays
    provisioned), `BusyError` for a second Master, `CleanupPendingError` for a pool whose agent is gone.
    """
    record = _known(name, paths)
    if record.state in ENDED:
        raise UsageError(f"is {record.state}", where=f"pool {name}", hint="provision it first")
    if record.state == "provisioning" and agent_alive(record):
        raise BusyError(f"is being provisioned by agent {record.agent_pid}", where=f"pool {name}", hint="wait for it")
    if not agent_alive(record):
        raise CleanupPendingError(
            f"its agent (pid {record.agent_pid}) is gone", where=f"pool {name}", hint=f"run `egmctl teardown {name}`"
        )
    try:
        with ControlClient(paths.socket(name)) as client:
            return client.ask("mount", progress=progress, timeout=SILENCE, **({"master": master} if master else {}))
    except AgentGone as error:
        if not await_end(record.agent_pid, record.agent_started, 1.0):
            raise
        raise CleanupPendingError(
            f"its agent (pid {record.agent_pid}) died: {error.message}",
            where=f"pool {name}",
            hint=f"see {paths.log(name)}, and run `egmctl teardown {name}`",
        ) from error


def teardown_pool(
    name: str,
    paths: Paths,
    grace: float = 10.0,
    now: bool = False,
    abandon: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Unmount, release, remove: {name, state, left, warnings, already}. A pool that is gone is success.

    ``grace`` seconds (none with ``now``) objects stay readable. Raises `CleanupPendingError` with everything kept that
    has to be; the same call later goes on. ``abandon`` gives up on what cannot be undone, and ``left`` says what.
    """
    record = _known(name, paths)
    if record.state in ENDED:
        rescue_path(paths.runtime, name).unlink(missing_ok=True)
        return {"name": name, "state": record.state, "left": [], "warnings": [], "already": True}
    deadline = time.monotonic() + ANSWER_PATIENCE
    while agent_alive(record):
        try:
            with ControlClient(paths.socket(name)) as client:
                result = client.ask(
                    "teardown", progress=progress, timeout=SILENCE, grace=0.0 if now else grace, abandon=abandon
                )
            await_end(record.agent_pid, record.agent_started)
            return {**result, "already": False}
        except AgentGone:  # it has not opened its socket yet, or closed it, or is dying
            if time.monotonic() >= deadline:
                raise BusyError(
                    f"its agent (pid {record.agent_pid}) runs but does not answer on its control socket",
                    where=f"pool {name}",
                    hint=f"see {paths.log(name)}; `kill -TERM {record.agent_pid}` asks it to tear down, and after "
                    f"`kill -KILL {record.agent_pid}` teardown works from the ledger",
                ) from None
            time.sleep(0.1)
    from egmctl.provider.recover import teardown_from_ledger

    result = teardown_from_ledger(name, paths, abandon=abandon, progress=progress, patience=2.0)
    return {"already": False, **result}


def pool_status(paths: Paths, name: str | None = None, *, compare: bool = True) -> list[dict[str, Any]]:
    """One entry for each pool (those that are gone only when named): what the ledger says, what its agent says if it
    lives, and with ``compare`` what the Master says. One pool's unreadable ledger does not hide the others.

    Raises `UsageError` for a name nobody knows.
    """
    if name is not None:
        return [_status(_known(name, paths), paths, compare)]
    if paths.state.exists() and not paths.state.is_dir():
        raise UsageError("is not a folder", where=str(paths.state), hint="give the state folder with --state-dir")
    entries = []
    for path in sorted(paths.state.glob("*.db")):
        try:
            record = read_only(path)
        except LedgerUnreadable as error:
            entries.append(_unreadable(path.stem, error))
            continue
        if record is not None and record.state != "gone":
            entries.append(_status(record, paths, compare))
    return entries


def _status(record: PoolRecord, paths: Paths, compare: bool) -> dict[str, Any]:
    entry = ledger_report(record)
    alive = record.state not in ENDED and agent_alive(record)
    entry |= {"agent_alive": alive, "log": str(paths.log(record.name)), "doing": None, "pings": None, "at_master": None}
    if alive:
        try:
            with ControlClient(paths.socket(record.name), timeout=2.0) as client:
                entry |= client.ask("status", timeout=3.0)
        except EgmError as error:
            entry["warnings"] = [f"its agent (pid {record.agent_pid}) runs but does not answer: {error.message}"]
    elif record.state not in ENDED:
        entry |= {"state": "cleanup-pending", "ready": False, "cleanup_pending": True}
        entry["reason"] = f"its agent (pid {record.agent_pid}) is gone; it was {record.state}"
        entry["warnings"] = [f"run `egmctl teardown {record.name}`: it works from the ledger alone"]
        entry["agent_pid"] = None
    if compare and record.live_segments:
        _, sums = compare_with_master(record)
        entry["at_master"] = sums
        if sums["missing"]:
            entry["warnings"] = [
                *entry["warnings"],
                f"{sums['missing']} segment(s) that the ledger calls mounted are not at the Master",
            ]
    return entry


def _unreadable(name: str, error: EgmError) -> dict[str, Any]:
    return {
        "name": name,
        "state": "unreadable",
        "ready": False,
        "memory_kind": "",
        "bytes": 0,
        "chunks": 0,
        "mounted": 0,
        "endpoint": "",
        "master": None,
        "agent_pid": None,
        "cleanup_pending": True,
        "reason": str(error),
        "warnings": [error.hint],
    }


def forget(name: str, paths: Paths) -> None:
    """Remove the record of a pool that is gone or abandoned. Raises `UsageError` for any other."""
    from egmctl.ledger import OwnerLock

    record = _known(name, paths)
    if record.state not in ENDED:
        raise UsageError(f"is {record.state}, not gone", where=f"pool {name}", hint="tear it down first")
    lock = OwnerLock.acquire(paths.lock(name), name, "forgetting it")
    try:
        for path in (paths.ledger(name), paths.log(name)):
            with step("provider.forget", path=str(path)):
                path.unlink(missing_ok=True)
    finally:
        lock.release()
