"""One block put and got through our own chunk before anybody is told that the pool is ready."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from egmctl.errors import FailedError
from egmctl.ledger import SegmentRow
from egmctl.mooncake.errors import MasterRefused
from egmctl.steps import step

if TYPE_CHECKING:
    from egmctl.mooncake.master import MasterClient, Replica
    from egmctl.provider.pool import Pool

__all__ = ["probe"]

PROBE_BYTES = 4096
_TRIES = 5
_NO_SPACE = -200


def probe(pool: Pool) -> None:
    """Reserve a block in one of our chunks, write it, publish it, find it again at the same place, read it, remove it.

    Raises `FailedError` when any of that is not as it should be. A pool that others have filled already is left
    alone, with a warning: it plainly works.
    """
    from egmctl.mooncake.master import SEGMENT_OK, MasterClient

    record = pool.record_now()
    rows = [row for row in record.live_segments if row.state == "mounted" and row.master == record.master]
    key = f"egmctl-probe/{pool.name}/{os.urandom(8).hex()}"
    client = MasterClient(record.master, timeout=pool.timing.rpc_timeout, tenant_id=pool.plan.mooncake.tenant_id)
    try:
        for _ in range(_TRIES):
            found = _reserve(pool, client, key, rows)
            if found is None:
                return
            row, replica = found
            if row is not None:
                _round_trip(pool, client, key, row, replica)
                return
            with step("provider.probe.revoke"):
                client.put_revoke(record.client, key)
        if rows and client.query_segment_status_by_id(rows[0].id) == SEGMENT_OK:
            # It places where it was asked to as long as there is room there.
            pool.warn("the probe found no room in this pool's chunks: other clients have filled them already")
            return
        raise FailedError(
            f"{_TRIES} blocks that were asked for in this pool's chunks were all placed elsewhere",
            where=f"pool {pool.name}, Master {record.master}",
            hint="see what the Master lists under /get_segments_detail of its admin port",
        )
    finally:
        client.close()


def _reserve(
    pool: Pool, client: MasterClient, key: str, rows: list[SegmentRow]
) -> tuple[SegmentRow | None, Replica] | None:
    """A place for the block, and the chunk of ours that it is in, if it is; None when there is no room."""
    from egmctl.mooncake.master import ReplicateConfig

    config = ReplicateConfig(preferred_segments=tuple(row.name for row in rows[:1]))
    try:
        with step("provider.probe.put_start"):
            replicas = client.put_start(pool.record_now().client, key, PROBE_BYTES, config)
    except MasterRefused as error:
        if error.number != _NO_SPACE:
            raise
        pool.warn("the probe found no room: other clients have filled the pool already")
        return None
    replica = replicas[0]
    for row in rows:
        inside = row.base <= replica.address and replica.address + replica.size <= row.base + row.size
        if inside and replica.te_endpoint == row.endpoint:
            return row, replica
    return None, replica


def _round_trip(pool: Pool, client: MasterClient, key: str, row: SegmentRow, replica: Replica) -> None:
    chunk = pool.parts.chunks[row.chunk]
    offset = replica.address - chunk.address
    block = os.urandom(PROBE_BYTES)
    ours = pool.record_now().client
    ended = False
    try:
        with step("provider.probe.write", chunk=row.chunk), chunk.host_view() as view:
            view[offset : offset + PROBE_BYTES] = block
        with step("provider.probe.put_end"):
            client.put_end(ours, key)
        ended = True
        with step("provider.probe.locate"):
            located = client.get_replica_list(key).replicas
        if [(r.address, r.te_endpoint) for r in located] != [(replica.address, replica.te_endpoint)]:
            raise FailedError("the Master names another place for the block than it gave", where=f"pool {pool.name}")
        with step("provider.probe.read", chunk=row.chunk), chunk.host_view() as view:
            if bytes(view[offset : offset + PROBE_BYTES]) != block:
                raise FailedError("the block read back differs from the one put", where=f"pool {pool.name}, {row.name}")
    finally:
        with step("provider.probe.remove"):
            if ended:
                client.remove(key, force=True)
            else:
                client.put_revoke(ours, key)
