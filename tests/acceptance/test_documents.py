"""One session of every command with --json: what other tools rely on is there, and of the type they rely on."""

from __future__ import annotations

from typing import Any

from tests.acceptance.hosts import MIB, Host
from tests.support.master import Master

STATUSES = {"pass", "warn", "fail", "skip", "unknown"}


def _has(document: dict[str, Any], **kinds: type | tuple[type, ...]) -> None:
    for key, kind in kinds.items():
        assert key in document, f"{key} is not in {sorted(document)}"
        value = document[key]
        assert isinstance(value, kind), f"{key} is {value!r}"
        wanted = kind if isinstance(kind, tuple) else (kind,)
        assert not (isinstance(value, bool) and bool not in wanted), f"{key} is {value!r}"


def _checks(document: dict[str, Any]) -> None:
    _has(document, ok=bool, checks=list)
    for check in document["checks"]:
        _has(check, id=str, status=str, observed=str, expected=str, hint=str)
        assert check["status"] in STATUSES
    assert document["ok"] == all(check["status"] != "fail" for check in document["checks"])


def _run(host: Host, command: str, *arguments: str) -> dict[str, Any]:
    result = host.run(command, *arguments, "--json")
    assert result.code == 0, result.stderr
    assert result.document["schema"] == f"egmctl/{command}/1"
    return result.document


def test_the_documents_of_a_session(host: Host, quick_master: Master) -> None:
    spec = host.spec(quick_master, chunks=3)
    plan = _run(host, "plan", spec)
    plan = plan.get("plan", plan)
    _has(plan, pool=str, memory_kind=str, requested_bytes=int, effective_bytes=int, alignment_bytes=int)
    _has(plan, max_chunk_bytes=int, nodes=list, chunks=list)
    for node in plan["nodes"]:
        _has(node, numa_node=int, bytes=int, gpus=list)
    for chunk in plan["chunks"]:
        _has(chunk, index=int, numa_node=int, bytes=int)
    assert sum(chunk["bytes"] for chunk in plan["chunks"]) == plan["effective_bytes"] == 48 * MIB

    assert _run(host, "status")["pools"] == []
    _has(_run(host, "provision", spec), pool=dict)
    (pool,) = _run(host, "status")["pools"]
    _pool(pool, "provisioned", mounted=0)
    _has(_run(host, "mount", "dev"), pool=dict)
    (pool,) = _run(host, "status", "dev")["pools"]
    _pool(pool, "ready", mounted=3)

    verified = _run(host, "verify", "dev")
    _checks(verified)
    _has(verified, bytes_checked=int, staging_bytes=int)
    assert verified["staging_bytes"] == 0
    assert verified["bytes_checked"] > 0
    _checks(_run(host, "doctor", "--for", "shm"))

    bench = _run(host, "bench", "dev", "--block", "64KiB", "--count", "8")
    _has(bench, environment=dict, results=list)
    assert {(row["operation"], row["path"]) for row in bench["results"]} == {
        (operation, path) for operation in ("put", "get") for path in ("direct", "stock")
    }
    for row in bench["results"]:
        _has(row, operation=str, path=str, block_bytes=int, blocks=int, gbps=dict, latency_us=dict, bytes=int)
        _has(row, first_use_us=(int, float), errors=int)
        _has(row["gbps"], p50=(int, float))
        _has(row["latency_us"], **dict.fromkeys(("p50", "p90", "p99", "max"), (int, float)))
        assert (row["block_bytes"], row["blocks"], row["errors"]) == (65536, 8, 0)
        assert row["latency_us"]["p50"] > 0

    (pool,) = _run(host, "teardown", "dev", "--now")["pools"]
    assert (pool["name"], pool["state"]) == ("dev", "gone")
    assert _run(host, "status")["pools"] == []
    _has(_run(host, "topology"), nodes=list)


def _pool(pool: dict[str, Any], state: str, *, mounted: int) -> None:
    _has(pool, name=str, state=str, ready=bool, memory_kind=str, bytes=int, chunks=int, mounted=int, endpoint=str)
    _has(pool, master=(str, type(None)), agent_pid=int, cleanup_pending=bool)
    assert (pool["name"], pool["state"], pool["ready"]) == ("dev", state, state == "ready")
    assert (pool["bytes"], pool["chunks"], pool["mounted"], pool["cleanup_pending"]) == (48 * MIB, 3, mounted, False)
