"""Offering chunks to a Master and taking them back, so that at every moment the ledger knows what a Master may name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from egmctl.errors import CleanupPendingError, EgmError
from egmctl.ledger import LedgerWriteError, SegmentRow
from egmctl.mooncake.errors import MasterLost, MasterTimeout, MasterUnreachable
from egmctl.provider.listing import bytes_in_use
from egmctl.provider.master_link import MasterLink, certainly_not_done

if TYPE_CHECKING:
    from egmctl.provider.pool import Pool

__all__ = ["offer", "settle_unanswered", "take_back"]


def new_rows(pool: Pool, indices: Sequence[int]) -> list[SegmentRow]:
    """One new attempt for each chunk."""
    from egmctl.mooncake.master import new_uuid

    record = pool.record_now()
    wanted = set(indices)
    return [
        SegmentRow(
            id=new_uuid(),
            chunk=chunk.index,
            master=record.master,
            client=record.client,
            name=f"{record.endpoint}/numa{chunk.numa_node}/{chunk.index}",
            endpoint=record.endpoint,
            base=chunk.address or 0,
            size=chunk.nbytes,
            protocol=pool.protocol,
        )
        for chunk in record.chunks
        if chunk.index in wanted
    ]


def offer(pool: Pool, indices: Sequence[int], *, instead_of: Sequence[SegmentRow] = ()) -> None:
    """Mount these chunks at the pool's Master, each under a new id, after unmounting what they were mounted as.

    Whatever happens, the ledger then says of each what is known: mounted, refused (which includes never asked), or
    still mounting when an answer is missing.
    """
    rows = new_rows(pool, indices)
    master = pool.record_now().master
    link = pool.link(master)
    try:
        with pool.record("mount begins", master=master, chunks=list(indices)) as ledger:
            ledger.set_segments("unmounting", (row.id for row in instead_of))
            ledger.add_segments(rows)
    except LedgerWriteError:
        # A record that is said to have failed may have been made all the same; nobody was asked for these.
        with suppress(LedgerWriteError), pool.record("mount did not begin", master=master) as ledger:
            ledger.set_segments("refused", (row.id for row in rows))
        raise
    taken: list[SegmentRow] = []
    mounted: list[SegmentRow] = []
    asked: SegmentRow | None = None
    try:
        for row in instead_of:
            pool.task.checkpoint()
            link.unmount(row)
            taken.append(row)
        for row in rows:
            pool.task.checkpoint()
            asked = row
            link.mount(row)
            asked = None
            mounted.append(row)
            pool.task.tell("mount", f"mounted {row.name}", len(mounted), len(rows), "chunks")
        link.settle(pool.record_now().client)
    except BaseException as error:
        open_question = asked is not None and not certainly_not_done(error)
        with pool.record("mount failed", master=master, error=str(error), mounted=len(mounted)) as ledger:
            ledger.set_segments("unmounted", (row.id for row in taken))
            ledger.set_segments("mounted", (row.id for row in mounted))
            known = {row.id for row in mounted} | ({asked.id} if asked is not None and open_question else set())
            ledger.set_segments("refused", (row.id for row in rows if row.id not in known))
        raise
    if pool.live is not None and pool.live.heartbeat is not None:
        pool.live.heartbeat.settled()
    with pool.record("mounted", master=master, chunks=len(rows)) as ledger:
        ledger.set_segments("unmounted", (row.id for row in taken))
        ledger.set_segments("mounted", (row.id for row in mounted))


def take_back(pool: Pool, master: str) -> None:
    """Unmount all that ``master`` may have of this pool: gracefully where the task allows, each segment once."""
    link = pool.link(master)
    rows = [row for row in pool.record_now().live_segments if row.master == master]
    try:
        link.ready()
        if pool.grace > 0 and pool.live is not None:
            _drain(pool, link, [row for row in rows if row.state in ("mounted", "draining")])
        _unmount(pool, link, [row for row in rows if row.state != "mounting"])
        # A drain job ends only with an answer to each of its tasks, also after the segment has gone.
        pool.tasks.refuse(now=True)
        settle_unanswered(pool, link, [row for row in rows if row.state == "mounting"])
    except (MasterUnreachable, MasterTimeout, MasterLost) as error:
        left = len([row for row in pool.record_now().live_segments if row.master == master])
        raise CleanupPendingError(
            f"{left} segment(s) could not be unmounted, so their memory is kept: {error.message}",
            where=f"pool {pool.name}, Master {master}",
            hint="run teardown again when the Master answers; --abandon gives up on it",
            facts={"master": master, "segments": left},
        ) from error


def _drain(pool: Pool, link: MasterLink, rows: list[SegmentRow]) -> None:
    """Let readers finish: no new objects, the old ones readable for the grace, the memory kept for the leases too.

    What is in use is read before: once the grace has begun the Master says 0.
    """
    parts = pool.parts
    if not rows:
        return
    if parts.drain_until is None:
        used = bytes_in_use(pool)
        if used == 0:
            pool.task.tell("drain", "no object lies in the pool: nothing to wait for")
            return
        with pool.record("drain begins", grace=pool.grace, bytes_in_use=used) as ledger:
            ledger.set_segments("draining", (row.id for row in rows))
        for row in rows:
            link.drain(row, int(pool.grace * 1000))
        # A lease granted in the last moment of the grace outlives it.
        parts.drain_until = time.monotonic() + pool.grace + pool.plan.lease_ttl
    pool.task.wait(
        max(0.0, parts.drain_until - time.monotonic()),
        stage="drain",
        text="objects stay readable; waiting for readers and their leases",
        until=lambda: pool.tasks.refuse() or pool.task.hurried(),
    )


def _unmount(pool: Pool, link: MasterLink, rows: list[SegmentRow]) -> None:
    if not rows:
        return
    with pool.record("unmount begins", master=link.address, segments=len(rows)) as ledger:
        ledger.set_segments("unmounting", (row.id for row in rows))
    done: list[SegmentRow] = []
    failure: EgmError | None = None
    try:
        for row in rows:
            try:
                link.unmount(row)
            except (MasterUnreachable, MasterTimeout):
                raise  # the next would fare no better
            except EgmError as error:
                failure = failure or error
                continue
            done.append(row)
            pool.task.tell("unmount", f"unmounted {row.name}", len(done), len(rows), "chunks")
    finally:
        if pool.live is not None and done:
            # Readers may hold leases on these places; they are offered again only after those.
            pool.live.quiet_until = time.monotonic() + pool.plan.lease_ttl
        with pool.record("unmounted", master=link.address, segments=len(done), of=len(rows)) as ledger:
            ledger.set_segments("unmounted", (row.id for row in done))
    if failure is not None:
        raise failure


def settle_unanswered(pool: Pool, link: MasterLink, rows: list[SegmentRow]) -> None:
    """Mounts that were never answered: unmount those the Master has; wait out the rest, which may still arrive.

    A Master keeps a silent client's segments for ``client_expiry``: a mount that takes effect later than that after
    the last ping has nobody behind it and goes by itself, and by then nothing that we sent is on its way any more.
    """
    if not rows:
        return
    link.renew()
    absent = link.missing(rows)
    gone = {row.id for row in absent}
    _unmount(pool, link, [row for row in rows if row.id not in gone])
    if not absent:
        return
    heartbeat = None if pool.live is None else pool.live.heartbeat
    if heartbeat is not None:
        heartbeat.pause()
    try:
        pool.task.wait(
            pool.plan.client_expiry,
            stage="fence",
            text=f"{len(absent)} mount(s) were never answered: waiting until none can still take effect",
        )
        late = [row for row in absent if link.lists(row)]
        _unmount(pool, link, late)
        arrived = {row.id for row in late}
        with pool.record("fenced", master=link.address, segments=len(absent) - len(late)) as ledger:
            ledger.set_segments("fenced", (row.id for row in absent if row.id not in arrived))
    finally:
        if heartbeat is not None:
            heartbeat.resume()
