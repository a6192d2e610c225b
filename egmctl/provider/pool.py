"""The life of one pool as a state machine over its ledger: provision, mount, teardown, and back out of each.

    command     from                        through       to, when done    to, when it fails and is undone
    provision   (nothing), gone             provisioning  provisioned      gone
    mount       provisioned                 mounting      ready            provisioned
    teardown    any                         tearing-down  gone             (cleanup-pending)

What cannot be undone leaves the pool cleanup-pending, with everything that stage protects kept; the same command, or
teardown, run again goes on from there. `egmctl.provider.tending` moves a pool between ready and degraded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from egmctl.errors import BusyError, CleanupPendingError, EgmError, FailedError
from egmctl.ledger import Ledger, LedgerWriteError, PoolRecord, Resource, boot_id
from egmctl.paths import Paths
from egmctl.planning import Plan
from egmctl.planning.addresses import parse_local_hostname
from egmctl.provider import masters
from egmctl.provider.master_link import MasterLink
from egmctl.provider.meters import Meters
from egmctl.provider.parts import Live
from egmctl.provider.probe import probe
from egmctl.provider.rescue import rescue, rescue_path
from egmctl.provider.stages import ALL, MOUNT, PROVISION, Stage
from egmctl.provider.task import Task
from egmctl.provider.tasks import Tasks

__all__ = ["ENDED", "Pool", "Timing"]

ENDED = frozenset({"gone", "abandoned"})
"""States in which a pool owns nothing."""


@dataclass(frozen=True)
class Timing:
    """Seconds. ``check_interval`` is how often single segments are looked for at the Master."""

    ping_interval: float = 1.0
    check_interval: float = 10.0
    rpc_timeout: float = 5.0
    restart_patience: float = 60.0


class Pool:
    """One pool. ``live`` holds its living parts in the agent; None works from the ledger alone (the agent is dead).

    All commands run on one thread, one after the other. ``task`` is the command at work.
    """

    def __init__(
        self, ledger: Ledger, plan: Plan, paths: Paths, live: Live | None, *, timing: Timing | None = None
    ) -> None:
        self.ledger = ledger
        self.plan = plan
        self.paths = paths
        self.live = live
        self.timing = timing or Timing(check_interval=min(10.0, max(0.5, plan.lease_ttl)))
        self.task = Task("start")
        self.meters = Meters()
        self.tasks = Tasks(self)
        self.grace = 0.0
        self.warnings: list[str] = list(plan.warnings)
        self._links: dict[str, MasterLink] = {}
        self._rescued = False
        record = ledger.pool()
        self.name = record.name
        self.state = record.state
        self.reason = record.reason
        self.other_boot = bool(record.boot_id) and record.boot_id != boot_id()

    # What stages ask for

    @property
    def parts(self) -> Live:
        if self.live is None:
            raise FailedError("the agent that owned this pool is gone", where=f"pool {self.name}", hint="tear it down")
        return self.live

    @property
    def protocol(self) -> str:
        return self.plan.mooncake.protocol

    @property
    def host(self) -> str:
        return parse_local_hostname(self.plan.mooncake.local_hostname)[0]

    @property
    def fixed_port(self) -> int | None:
        return parse_local_hostname(self.plan.mooncake.local_hostname)[1]

    @property
    def metadata_url(self) -> str | None:
        server = self.plan.mooncake.metadata_server
        return None if server == "P2PHANDSHAKE" else server

    @property
    def remembered(self) -> bool:
        """Whether stock consumers may know an earlier agent under our very endpoint, and keep its memory mapped."""
        return self.protocol == "nvlink" and self.fixed_port is not None and self.metadata_url is None

    def record_now(self) -> PoolRecord:
        return self.ledger.pool()

    def resources(self, kind: str) -> list[Resource]:
        """Those of a kind that may exist."""
        return [r for r in self.record_now().resources if r.kind == kind and r.state in ("intended", "present")]

    def link(self, master: str) -> MasterLink:
        if master not in self._links:
            self._links[master] = MasterLink(master, host_id=self.host, timeout=self.timing.rpc_timeout)
        return self._links[master]

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
        self.task.tell("warning", text)

    @contextmanager
    def record(self, what: str, **detail: Any) -> Iterator[Ledger]:
        """A durable record; when it cannot be made, what is owned is shouted and written elsewhere first."""
        try:
            with self.ledger.record(what, **detail) as ledger:
                yield ledger
        except LedgerWriteError as error:
            self._shout(error)
            raise
        if self._rescued:  # what was not recorded was not begun, so the ledger is whole again
            self._rescued = False
            rescue_path(self.paths.runtime, self.name).unlink(missing_ok=True)

    def _shout(self, error: LedgerWriteError) -> None:
        if self._rescued:
            return
        self._rescued = True
        try:
            known = self.ledger.pool()
        except EgmError:
            known = None
        owned = (
            [] if self.live is None else [[c.spec.index, c.address, c.spec.nbytes] for c in self.live.chunks.values()]
        )
        path = rescue(self.paths.runtime, known, {"pool": self.name, "error": str(error), "memory": owned})
        self.warn(f"{error}; what is owned is written to {path or 'the terminal only'}")

    def set_state(self, state: str, reason: str = "", **columns: Any) -> None:
        """Record where the pool is; ``columns`` of the ledger's pool row go with it."""
        with self.record(state, **({"reason": reason} if reason else {})) as ledger:
            ledger.set_pool(state=state, reason=reason, **columns)
        self.state, self.reason = state, reason

    # Commands

    def provision(self, task: Task) -> None:
        """From a ledger just created to provisioned. On failure the pool is gone again, or cleanup-pending."""
        self.task = task
        try:
            self._forwards(PROVISION)
            self.set_state("provisioned")
        except BaseException as error:
            self._undo_all(error)
            raise _undone(error) from error.__cause__

    def mount(self, task: Task, master: str | None = None) -> None:
        """To ready at ``master`` (the spec's by default). On failure the pool is provisioned again, or
        cleanup-pending; a check that fails before anything is begun leaves it as it is."""
        self.task = task
        target = master or self.plan.mooncake.master_server_addr
        record = self.record_now()
        if record.goal == "gone":
            raise CleanupPendingError(
                "a teardown has begun, and is not undone",
                where=f"pool {self.name}",
                hint=f"run `egmctl teardown {self.name}` again, then provision anew",
            )
        if record.state == "ready" and record.master == target:
            return
        if record.state == "degraded" and record.master == target:
            raise FailedError(
                f"is mounted at {target} already, but degraded: {record.reason}",
                where=f"pool {self.name}",
                hint="it recovers by itself as soon as it can; see `egmctl status`",
            )
        masters.check(self, target)
        masters.leave_others(self, target)
        if record.state == "cleanup-pending":
            self._back(MOUNT)
        try:
            self.set_state("mounting", goal="ready", master=target)
            self._forwards(MOUNT)
            task.tell("probe", "putting and getting one block")
            with self.meters.stage("probe", "do"):
                probe(self)
            self.set_state("ready")
        except BaseException as error:
            self._back(MOUNT, error)
            self._say_undone("provisioned", error, goal="provisioned", master="", exclusive=0)
            raise _undone(error) from error.__cause__

    def teardown(self, task: Task, grace: float = 0.0, *, abandon: bool = False) -> list[str]:
        """To gone, or with ``abandon`` at the worst to abandoned: then what was left where. Raises
        `CleanupPendingError` with everything kept that has to be."""
        self.task = task
        if self.state in ENDED:
            return []
        self.set_state("tearing-down", goal="gone")
        left: list[str] = []
        while True:
            self.grace = grace
            try:
                self._back(ALL, shielded=False)
                break
            except CleanupPendingError:
                again = self._abandon() if abandon else []
                if not again:
                    raise
                left += again
            finally:
                self.grace = 0.0
        for line in left:
            self.warn(line)
        self.set_state("abandoned" if left else "gone", "; ".join(left), agent_pid=0, master="")
        rescue_path(self.paths.runtime, self.name).unlink(missing_ok=True)
        return left

    def close(self) -> None:
        """Let go of connections and the ledger; owns nothing else."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self.ledger.close()

    # The walk

    def _forwards(self, stages: Sequence[Stage]) -> None:
        for stage in stages:
            self.task.checkpoint()
            try:
                with self.meters.stage(stage.name, "do"):
                    stage.do(self)
            except EgmError as error:
                if not error.where:
                    error.where = f"pool {self.name}, {stage.name}"
                raise
            except Exception as error:
                raise FailedError(
                    f"{stage.name}: {type(error).__name__}: {error}",
                    where=f"pool {self.name}",
                    hint=f"see the agent's log, {self.paths.log(self.name)}",
                ) from error

    def _back(self, stages: Sequence[Stage], cause: BaseException | None = None, *, shielded: bool = True) -> None:
        """Undo from the last stage to the first; stop at the first that has to stay, and say so in the ledger."""
        self.task.shielded = shielded
        self.meters.count("cleanups" if cause is None else "rollbacks")
        try:
            for stage in reversed(stages):
                self.task.checkpoint()
                with self.meters.stage(stage.name, "undo"):
                    stage.undo(self)
        except Exception as error:
            raise self._pending(stage, error, cause) from (cause or error)
        finally:
            self.task.shielded = False

    def _pending(self, stage: Stage, error: Exception, cause: BaseException | None) -> CleanupPendingError:
        what = error.message if isinstance(error, EgmError) else f"{type(error).__name__}: {error}"
        reason = f"{stage.name}: {what}"
        if cause is not None:
            reason = f"{cause}; then, undoing it, {reason}"
        try:
            self.set_state("cleanup-pending", reason)
        except LedgerWriteError:
            self.state, self.reason = "cleanup-pending", reason
        return CleanupPendingError(
            reason,
            where=getattr(error, "where", "") or f"pool {self.name}",
            hint=getattr(error, "hint", "") or f"run `egmctl teardown {self.name}` again",
            facts=getattr(error, "facts", None),
        )

    def _undo_all(self, error: BaseException) -> None:
        self._back(ALL, error)
        self._say_undone("gone", error, goal="gone", agent_pid=0)

    def _say_undone(self, state: str, error: BaseException, **columns: Any) -> None:
        try:
            self.set_state(state, f"failed and undone: {error}", **columns)
        except LedgerWriteError as failure:
            self.state, self.reason = "cleanup-pending", str(failure)
            raise failure from error

    def _abandon(self) -> list[str]:
        """Give up on what could not be undone, no more of it than needed: say what is left where, and mark it so that
        the walk goes on past it. Empty when there is nothing to give up."""
        record = self.record_now()
        left = [
            f"segment {row.name} (id {row.id[0]}-{row.id[1]}) may still be listed at Master {row.master}"
            for row in record.live_segments
        ]
        resources = []
        if not left:
            kinds = {"metadata": "url", "engine": "pid"}
            present = [r for r in record.resources if r.state in ("intended", "present") and r.kind in kinds]
            resources = present[-1:]
            left = [f"{r.kind} {r.name} ({kinds[r.kind]} {r.detail.get(kinds[r.kind])})" for r in resources]
        if left:
            with self.record("abandoned", left=left) as ledger:
                ledger.set_segments("abandoned", (row.id for row in record.live_segments))
                for resource in resources:
                    ledger.put_resource(resource.kind, resource.name, "abandoned")
        return left

    def refuse_busy(self, what: str, since: float) -> BusyError:
        when = time.strftime("%H:%M:%S", time.localtime(since))
        return BusyError(
            f"{what} is under way, since {when}", where=f"pool {self.name}", hint="wait for it, or see `egmctl status`"
        )


def _undone(error: BaseException) -> BaseException:
    """What has been undone after all is not pending any more, whatever it was that failed."""
    if not isinstance(error, CleanupPendingError):
        return error
    return FailedError(
        f"{error.message}; what had been done is undone",
        where=error.where,
        hint="mend that, then run it again",
        facts=error.facts,
    )
