"""``egmctl verify``: whether what a pool holds and says is true, as checks that each ask one question."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from egmctl.bench.target import Target
from egmctl.checks.base import Check, CheckResult, Status, ok, run_checks
from egmctl.checks.verify_bytes import Placement, StockClientAgrees
from egmctl.errors import UsageError
from egmctl.mooncake.master import MasterClient
from egmctl.provider.progress import Progress, ProgressEvent, silent
from egmctl.units import KIB, MIB

if TYPE_CHECKING:
    from egmctl.consumer import EgmStore
    from egmctl.consumer.audit import Audit
    from egmctl.ledger import SegmentRow
    from egmctl.paths import Paths

__all__ = ["LEVELS", "PoolFacts", "run_verify"]

LEVELS = ("quick", "full", "soak")
SOAK_SECONDS = 60.0


class PoolFacts:
    """A pool under examination: its record, its agent's word, and a direct consumer of it."""

    def __init__(self, target: Target, paths: Paths, level: str, stack: ExitStack) -> None:
        self.target = target
        self.paths = paths
        self.level = level
        self.bytes_checked = 0
        self.staging_bytes = 0
        self._stack = stack
        self._audits: list[Audit] = []

    @property
    def name(self) -> str:
        return self.target.record.name

    @cached_property
    def report(self) -> dict[str, Any]:
        """What the agent says, its ledger compared with the Master. Raises when it does not answer."""
        from egmctl.provider.control_client import ControlClient

        with ControlClient(self.paths.socket(self.name)) as client:
            return client.ask("check")

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The GPUs that the pool's memory is reached from; none for shared memory."""
        if self.target.plan.memory_kind == "shm":
            return ()
        from egmctl.memory.driver import get_driver

        return tuple(range(get_driver().device_count()))

    @cached_property
    def store(self) -> EgmStore:
        return self._connect()

    @cached_property
    def second_store(self) -> EgmStore:
        """Another consumer, which shares nothing with the first: no mapping, no connection."""
        return self._connect()

    def _connect(self) -> EgmStore:
        store = self._stack.enter_context(self.target.connect(self.devices))
        self._audits.append(store.audit())
        return store

    def copied(self) -> tuple[int, int]:
        """Bytes that the consumers have copied so far: between buffer and chunk in one step, and otherwise."""
        return sum(audit.direct for audit in self._audits), sum(audit.other for audit in self._audits)

    @cached_property
    def master(self) -> MasterClient:
        return self._stack.enter_context(
            MasterClient(self.target.master, tenant_id=self.target.plan.mooncake.tenant_id)
        )

    def mounted(self) -> list[SegmentRow]:
        """The segments that the Master should list, one a chunk."""
        return [row for row in self.target.record.live_segments if row.state == "mounted"]

    def sizes(self, chunk_bytes: int) -> Sequence[int]:
        """Of the objects that each chunk is tried with; together at most half of it, so that nobody is evicted."""
        if self.level == "quick":
            return (min(MIB, chunk_bytes // 4),)
        odd = [1, 4095, 4 * KIB + 1, 64 * KIB, MIB + 7]
        large = [chunk_bytes // 4]
        return [size for size in odd + large if size <= chunk_bytes // 4]


class AgentAnswers:
    """The agent lives, answers, and says that the pool is ready."""

    id: ClassVar[str] = "agent"

    def run(self, facts: PoolFacts) -> Iterator[CheckResult]:
        report = facts.report
        state = f"agent {report['agent_pid']}: {report['state']}"
        if report["ready"]:
            yield CheckResult(self.id, "pass", state)
        else:
            yield CheckResult(
                self.id, "fail", f"{state} ({report['reason']})", "ready", f"see {facts.paths.log(facts.name)}"
            )


class Pings:
    """The Master hears from the pool."""

    id: ClassVar[str] = "pings"

    def run(self, facts: PoolFacts) -> Iterator[CheckResult]:
        pings = facts.report.get("pings")
        if not pings or pings["last_contact_s"] is None:
            yield CheckResult(self.id, "fail", "no ping has been answered", "an answer every second")
            return
        age = pings["last_contact_s"]
        observed = f"last answer {age:.1f} s ago, {pings['missed']} of {pings['sent']} missed"
        if age > 3:
            yield CheckResult(self.id, "fail", observed, "an answer every second", "is the Master up and reachable?")
        else:
            yield CheckResult(self.id, "pass", observed)


class SegmentsListed:
    """Every chunk's segment is known to the Master, and the ledger has no more and no fewer."""

    id: ClassVar[str] = "segments"

    def run(self, facts: PoolFacts) -> Iterator[CheckResult]:
        rows = facts.report["segments"]
        chunks = len(facts.target.plan.chunks)
        missing = [row["name"] for row in rows if row["state"] == "mounted" and row["listed"] is False]
        unknown = [row["name"] for row in rows if row["listed"] is None]
        mounted = {row["chunk"] for row in rows if row["state"] == "mounted"}
        observed = f"{len(mounted)} of {chunks} chunks mounted at {facts.target.master}"
        if missing:
            yield CheckResult(
                self.id,
                "fail",
                f"not at the Master: {', '.join(missing[:4])}",
                "all of them",
                "the agent remounts them",
            )
        elif unknown:
            yield CheckResult(self.id, "unknown", facts.report["compared"]["error"], "an answer from the Master")
        elif len(mounted) != chunks:
            yield CheckResult(self.id, "fail", observed, f"{chunks}", f"run `egmctl mount {facts.name}`")
        else:
            yield CheckResult(self.id, "pass", observed)


class DescriptorAgrees:
    """The endpoint answers with this incarnation's descriptor, complete, and so does the metadata server."""

    id: ClassVar[str] = "descriptor"

    def run(self, facts: PoolFacts) -> Iterator[CheckResult]:
        from egmctl.consumer.store import make_fetch

        record = facts.target.record
        endpoint = record.endpoint
        descriptor = make_fetch(facts.target.metadata_server, 5.0)(endpoint)
        egm = descriptor.egm
        if egm is None or egm.nonce != record.nonce:
            seen = "no egmctl agent" if egm is None else "another incarnation's"
            yield CheckResult(
                self.id, "fail", f"{endpoint} answers with a descriptor of {seen}", "this agent's own", "mount anew"
            )
            return
        published = {(buffer.addr, buffer.length) for buffer in descriptor.buffers}
        meant = {(row.address, row.nbytes) for row in record.live_chunks}
        if published != meant:
            yield CheckResult(
                self.id, "fail", f"{len(published & meant)} of {len(meant)} chunks published", "all, and no other"
            )
        elif not egm.exclusive:
            yield CheckResult(
                self.id,
                "warn",
                "not yet known to be alone under its endpoint at the Master",
                "exclusive",
                "consumers wait; it settles within the spec's client_expiry",
            )
        else:
            yield CheckResult(self.id, "pass", f"{len(meant)} chunks published at {endpoint}")


_RECORDS: tuple[Check[PoolFacts], ...] = (AgentAnswers(), Pings(), SegmentsListed(), DescriptorAgrees())
_BYTES: tuple[Check[PoolFacts], ...] = (Placement(), StockClientAgrees())


def run_verify(
    pool: str, paths: Paths, *, level: str = "quick", progress: Progress = silent, soak_seconds: float = SOAK_SECONDS
) -> dict[str, Any]:
    """The document ``egmctl/verify/1``: ``ok`` (nothing failed, and some bytes were checked), ``bytes_checked`` (moved
    both ways and compared), ``staging_bytes`` (of those, counted copy by copy, what did not go between the caller's
    buffer and the chunk in one step: the consumer refuses rather than stage, so anything but 0 is a defect) and
    ``checks``.

    ``quick`` tries one object in each chunk, ``full`` objects of odd and large sizes, ``soak`` repeats ``full`` for
    ``soak_seconds``. Objects of others are left alone: at most half of a chunk is asked for. Raises `UsageError` for an
    unknown pool or level, `FailedError` for a pool that is not mounted.
    """
    if level not in LEVELS:
        raise UsageError(f"there is no level {level!r}", hint=f"one of {', '.join(LEVELS)}")
    target = Target.find(pool, paths)
    with ExitStack() as stack:
        facts = PoolFacts(target, paths, level, stack)

        def tell(result: CheckResult) -> None:
            progress(ProgressEvent("verify", f"{result.id}: {result.status}"))

        results = run_checks(_RECORDS, facts, tell)
        if ok(results):
            results += _bytes(facts, tell, soak_seconds)
        else:
            results += [CheckResult(check.id, "skip", "the pool's records are wrong already") for check in _BYTES]
        return {
            "schema": "egmctl/verify/1",
            "pool": pool,
            "level": level,
            "ok": ok(results) and facts.bytes_checked > 0,
            "bytes_checked": facts.bytes_checked,
            "staging_bytes": facts.staging_bytes,
            "checks": [result.document() for result in results],
        }


def _bytes(facts: PoolFacts, tell: Any, soak_seconds: float) -> list[CheckResult]:
    deadline = time.monotonic() + soak_seconds
    rounds = 0
    while True:
        results = run_checks(_BYTES, facts, tell)
        rounds += 1
        if facts.level != "soak" or not ok(results) or time.monotonic() >= deadline:
            break
    if facts.level == "soak":
        status: Status = "fail" if not ok(results) else "pass" if facts.bytes_checked else "skip"
        results.append(CheckResult("soak", status, f"{rounds} round(s)"))
    return results
