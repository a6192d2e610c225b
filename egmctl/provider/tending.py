"""What an agent does between commands: notice what is wrong with a mounted pool, say so, and mend it.

what is seen                            what is done
pings fail                              degraded; the memory stays, pings go on
a ping says NEED_REMOUNT                degraded; after one lease time, all chunks are mounted anew
a single segment is not at the Master   degraded; after one lease time, that chunk is mounted anew
a mount was never answered              degraded; adopted once the Master shows it
a copy or move task is assigned         reported failed at once (`egmctl.provider.tasks`)
the Transfer Engine child died          degraded; replaced on its data port, else everything under a new endpoint
"""

from __future__ import annotations

import sys
import time

from egmctl.errors import EgmError
from egmctl.ledger import LedgerWriteError, SegmentId
from egmctl.mooncake.errors import MasterTimeout, MasterUnreachable
from egmctl.provider import segments
from egmctl.provider.heartbeat import Heartbeat
from egmctl.provider.local_stages import Endpoint
from egmctl.provider.mount_stages import Engine, Publication
from egmctl.provider.pool import Pool
from egmctl.provider.probe import probe
from egmctl.provider.task import Cancelled, Task

__all__ = ["Tender"]

MISSED_PINGS = 2
"""Failed pings in a row after which the Master counts as gone."""

RETRY = 2.0


class Tender:
    """``task`` makes the task under which mending runs (it is cancelled when a command comes)."""

    def __init__(self, pool: Pool, task: Task) -> None:
        self._pool = pool
        self._task = task
        self._next_check = 0.0
        self._not_before = 0.0
        self._vanished: dict[SegmentId, float] = {}
        self._probe_due = False
        self._engine_since: float | None = None
        self._moving = False
        self._said_of_master = ""
        self._unrecorded = False
        self._record_after = 0.0

    def tick(self) -> None:
        """One look, and what it asks for. Mends nothing unless the pool is mounted."""
        pool = self._pool
        pool.tasks.refuse()
        if pool.state not in ("ready", "degraded"):
            self._vanished.clear()
            self._probe_due = self._moving = False
            self._said_of_master = ""
            return
        pool.task = self._task
        self._moving = self._moving and pool.state == "degraded"  # else a command has mounted it meanwhile
        if self._moving:
            # Nothing is mounted before the move has come to its end: not under an endpoint that is closed already, nor
            # under one whose descriptor is not out yet.
            self._say(self._new_endpoint())
            return
        engine = self._engine()
        self._said_of_master = self._master()
        probe = "" if self._said_of_master else self._probe()
        reasons = [reason for reason in (engine, self._said_of_master, probe) if reason]
        self._exclusive()
        self._say("; ".join(reasons))

    def _say(self, reason: str) -> None:
        pool = self._pool
        state = "degraded" if reason else "ready"
        owing = self._unrecorded and time.monotonic() >= self._record_after
        if state == pool.state and (reason == pool.reason or state == "ready") and not owing:
            return
        if (state, reason) != (pool.state, pool.reason):
            print(f"{time.strftime('%H:%M:%S')} {state}{': ' + reason if reason else ''}", file=sys.stderr, flush=True)
        if state == pool.state and not owing:  # degraded still, for another reason: not worth a record of its own
            pool.reason = reason
            return
        try:
            pool.set_state(state, reason)
            self._unrecorded = False
        except LedgerWriteError:
            pool.state, pool.reason = state, reason
            self._unrecorded, self._record_after = True, time.monotonic() + RETRY

    # The Master

    def _master(self) -> str:
        pool = self._pool
        parts = pool.parts
        record = pool.record_now()
        if parts.heartbeat is None:
            parts.heartbeat = Heartbeat(record.master, record.client, interval=pool.timing.ping_interval)
            parts.heartbeat.start()
        pulse = parts.heartbeat.pulse()
        now = time.monotonic()
        if pulse.last_contact is None and pulse.failures < MISSED_PINGS:
            return self._said_of_master  # a heartbeat that has just begun knows nothing yet
        if pulse.failures >= MISSED_PINGS:
            return f"the Master at {record.master} does not answer pings: {pulse.error}"
        if pulse.need_remount_since is not None:
            # A reader may hold a lease from a moment before the Master forgot us: its space is not given out anew
            # before that has ended. When it forgot is not known; that it had is known since this ping.
            due = max(pulse.need_remount_since + pool.plan.lease_ttl, self._not_before)
            if now < due:
                return f"the Master at {record.master} has lost the segments; they are mounted anew after the leases"
            return self._mend("all", [chunk.index for chunk in record.chunks])
        if now >= self._next_check:
            self._next_check = now + pool.timing.check_interval
            self._look_for_each()
        ripe = [i for i, seen in self._vanished.items() if now >= max(seen + pool.plan.lease_ttl, self._not_before)]
        if ripe:
            return self._mend("vanished", [row.chunk for row in record.live_segments if row.id in ripe])
        open_rows = [row for row in record.live_segments if row.state == "mounting"]
        missing = len(self._vanished) + len(open_rows)
        # A segment that was being replaced when that failed is not there, and its chunk is offered again.
        mounted = {row.chunk for row in record.live_segments if row.state != "unmounting"}
        never = [chunk.index for chunk in record.chunks if chunk.index not in mounted]
        if never and now >= self._not_before:
            return self._mend("unmounted", never)
        missing += len(never)
        return f"{missing} of {len(record.chunks)} chunks are not at the Master" if missing else ""

    def _look_for_each(self) -> None:
        """Compare each segment with the Master: pings do not tell of single ones."""
        pool = self._pool
        record = pool.record_now()
        link = pool.link(record.master)
        rows = [row for row in record.live_segments if row.master == record.master]
        try:
            absent = {row.id for row in link.missing(row for row in rows if row.state in ("mounted", "mounting"))}
        except (MasterUnreachable, MasterTimeout):
            return  # the pings say so
        adopted = [row.id for row in rows if row.state == "mounting" and row.id not in absent]
        if adopted:
            with pool.record("late mounts took effect", segments=len(adopted)) as ledger:
                ledger.set_segments("mounted", adopted)
            self._probe_due = True
        now = time.monotonic()
        lost = {row.id for row in rows if row.state == "mounted" and row.id in absent}
        self._vanished = {i: self._vanished.get(i, now) for i in lost}

    def _mend(self, which: str, indices: list[int]) -> str:
        """Mount chunks anew, each under a new id."""
        pool = self._pool
        record = pool.record_now()
        link = pool.link(record.master)
        wanted = set(indices)
        try:
            if which == "all":
                unanswered = [row for row in record.live_segments if row.state == "mounting"]
                segments.settle_unanswered(pool, link, unanswered)
            rows = [row for row in pool.record_now().live_segments if row.chunk in wanted and row.state != "mounting"]
            with pool.meters.stage("remount", "do"):
                segments.offer(pool, sorted(wanted), instead_of=rows)
            pool.meters.count("remounts", len(wanted))
        except Cancelled:
            self._not_before = time.monotonic() + pool.plan.lease_ttl  # as below
            raise
        except LedgerWriteError as error:
            self._not_before = time.monotonic() + RETRY
            self._probe_due = True
            return str(error)
        except EgmError as error:
            # Some may be mounted, and read, by now: they are not offered again under their readers.
            self._not_before = time.monotonic() + max(RETRY, pool.plan.lease_ttl)
            self._probe_due = True
            return f"mounting anew failed, and is tried again: {error.message}"
        self._vanished.clear()
        self._probe_due = True
        self._next_check = time.monotonic() + pool.timing.check_interval
        return "mounted anew, to be probed"

    def _probe(self) -> str:
        if not self._probe_due or self._pool.task.cancelled():
            return ""
        try:
            probe(self._pool)
        except EgmError as error:
            return f"the probe failed: {error.message}"
        self._probe_due = False
        return ""

    def _exclusive(self) -> None:
        """Once nobody else's segment can be listed under our endpoint any more, say so in the descriptor."""
        pool = self._pool
        if not pool.parts.published or time.monotonic() < pool.parts.bound_at + pool.plan.client_expiry:
            return
        if pool.record_now().exclusive:
            return
        with pool.record("endpoint is ours alone") as ledger:
            ledger.set_pool(exclusive=1)
        Publication.publish(pool)

    # The Transfer Engine child

    def _engine(self) -> str:
        pool = self._pool
        engine = pool.parts.engine
        if engine is None:
            return ""
        if engine.alive():
            return self._engine_is_back() if self._engine_since is not None else ""
        now = time.monotonic()
        if self._engine_since is None:
            self._engine_since = now
            why = pool.parts.engine_deaths[-1] if pool.parts.engine_deaths else "the Transfer Engine child died"
            self._say(f"{why}; direct access goes on, stock clients wait for its replacement")
        patience = pool.timing.restart_patience - (now - self._engine_since)
        if patience > 0:
            try:
                # Short tries, so that a command does not have to wait for the whole minute.
                engine.restart(timeout=min(10.0, max(1.0, patience)))
            except EgmError as error:
                return f"the Transfer Engine child died and could not be replaced yet: {error.message}"
            return self._engine_is_back()
        self._moving = True
        self._not_before = 0.0
        loud = (
            f"the data port of {pool.record_now().endpoint} is lost: mounting all chunks under a new endpoint, their "
            "objects are lost"
        )
        print(f"egmctl: WARNING: pool {pool.name}: {loud}", file=sys.stderr, flush=True)
        pool.warn(loud)
        return loud

    def _engine_is_back(self) -> str:
        """Record the child that serves now; a record that cannot be made is tried again at the next look."""
        Engine.note(self._pool)
        self._pool.meters.count("engine_restarts")
        self._engine_since = None
        self._probe_due = True
        return ""

    def _new_endpoint(self) -> str:
        """The data port cannot be had again, and running stock clients keep it for good: a new endpoint, and all
        objects are given up. Whatever interrupts the move, the next look goes on with it."""
        pool = self._pool
        if time.monotonic() < self._not_before:
            return pool.reason
        old = pool.record_now()
        try:
            if old.live_segments:
                with pool.record("moving to a new endpoint", old=old.endpoint) as ledger:
                    ledger.set_pool(exclusive=0)
                segments.take_back(pool, old.master)
            pool.task.wait(
                max(0.0, pool.parts.quiet_until - time.monotonic()), stage="leases", text="waiting for leases to end"
            )
            Publication().undo(pool)
            Engine().undo(pool)
            Endpoint().undo(pool)
            if pool.metadata_url is not None:
                Endpoint.rename(pool)
            else:
                Endpoint.bind(pool, 0)
            Engine().do(pool)
            Publication().do(pool)
        except Cancelled:
            raise
        except EgmError as error:
            self._not_before = time.monotonic() + RETRY
            return f"moving to a new endpoint failed so far, and is tried again: {error.message}"
        self._moving = False
        self._engine_since = None
        self._not_before = 0.0
        return "mounting under a new endpoint"
