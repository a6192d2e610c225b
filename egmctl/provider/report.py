"""What is said of a pool: from its ledger alone, and by its agent, which also knows what lives."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from egmctl.errors import EgmError
from egmctl.ledger import PoolRecord
from egmctl.provider.task import Task

if TYPE_CHECKING:
    from egmctl.provider.pool import Pool

__all__ = ["check_report", "ledger_report", "live_report"]


def ledger_report(record: PoolRecord) -> dict[str, Any]:
    """The ``status`` entry of a pool, as far as its ledger tells."""
    plan = record.plan
    engine = next((r for r in record.resources if r.kind == "engine" and r.state == "present"), None)
    mounted = len({row.chunk for row in record.live_segments if row.state == "mounted"})
    return {
        "name": record.name,
        "state": record.state,
        "ready": record.state == "ready",
        "memory_kind": plan.get("memory_kind", ""),
        "bytes": sum(row.nbytes for row in record.live_chunks),
        "chunks": len(record.chunks),
        "mounted": mounted,
        "endpoint": record.endpoint,
        "master": record.master or None,
        "agent_pid": record.agent_pid or None,
        "cleanup_pending": record.state == "cleanup-pending",
        "reason": record.reason,
        "nodes": [{"numa_node": n.get("numa_node"), "bytes": n.get("bytes")} for n in plan.get("nodes", [])],
        "exclusive": record.exclusive,
        "socket": record.socket,
        "masters": list(record.masters),
        "te_child": None
        if engine is None
        else {"pid": engine.detail.get("pid"), "data_port": engine.detail.get("data_port")},
        "updated": record.updated,
        "warnings": [],
    }


def live_report(pool: Pool, task: Task | None) -> dict[str, Any]:
    """The same from the agent, with its pings and what it is at."""
    record = pool.record_now()
    report = ledger_report(record)
    report |= {
        "state": pool.state,
        "ready": pool.state == "ready",
        "reason": pool.reason,
        "cleanup_pending": pool.state == "cleanup-pending",
        "nonce": record.nonce,
        "warnings": list(pool.warnings),
        "doing": None if task is None else {"what": task.name, "who": task.who, "since": task.since},
    }
    live = pool.live
    if live is not None:
        report["health"] = live.health
        if live.engine is not None:
            report["te_child"] = {
                "pid": live.engine.pid,
                "data_port": live.engine.data_port,
                "alive": live.engine.alive(),
                "deaths": len(live.engine_deaths),
            }
        if live.heartbeat is not None:
            pulse = live.heartbeat.pulse()
            age = None if pulse.last_contact is None else round(time.monotonic() - pulse.last_contact, 3)
            report["pings"] = {
                "sent": pulse.sent,
                "missed": pulse.missed,
                "last_contact_s": age,
                "status": pulse.status,
                "error": pulse.error,
            }
    return report


def check_report(pool: Pool) -> dict[str, Any]:
    """What the ledger says compared with the Master, segment by segment, on a connection of its own."""
    record = pool.record_now()
    report = live_report(pool, None)
    report["segments"], report["compared"] = compare_with_master(record)
    live = pool.live
    if live is not None and live.engine is not None:
        report["te_child"]["responds"] = live.engine.responds()
    return report


def compare_with_master(record: PoolRecord, *, timeout: float = 2.0) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Each live segment with what its Master says of it (``listed`` None: not known), and the sums."""
    from egmctl.mooncake.master import MasterClient

    rows: list[dict[str, Any]] = []
    errors: list[str] = []
    for master in record.masters:
        client = MasterClient(master, timeout=timeout)
        error = ""
        try:
            for row in (row for row in record.live_segments if row.master == master):
                listed: bool | None = None
                if not error:
                    try:
                        listed = client.query_segment_status_by_id(row.id) is not None
                    except EgmError as failure:
                        error = failure.message
                rows.append(
                    {"chunk": row.chunk, "name": row.name, "master": master, "state": row.state, "listed": listed}
                )
        finally:
            client.close()
        if error:
            errors.append(f"{master}: {error}")
    sums = {
        "reachable": not errors,
        "listed": sum(row["listed"] is True for row in rows),
        "missing": sum(row["listed"] is False and row["state"] == "mounted" for row in rows),
        "error": "; ".join(errors),
    }
    return rows, sums
