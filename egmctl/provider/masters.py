"""Which Master a pool may be mounted at: one at a time, reachable, and never a second before the first is done with."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from egmctl.errors import BusyError, FailedError
from egmctl.mooncake.rpc import parse_address
from egmctl.planning.addresses import check_pairing
from egmctl.steps import step

if TYPE_CHECKING:
    from egmctl.provider.pool import Pool

__all__ = ["check", "leave_others"]


def check(pool: Pool, target: str) -> None:
    """Everything that can be known before a mount is begun. Raises, with nothing touched.

    `UsageError` for an address that cannot be used, `PreflightError` without a Mooncake wheel for stock TCP clients,
    `FailedError` for a Master that does not answer.
    """
    parse_address(target)
    check_pairing(pool.plan.mooncake.local_hostname, target)
    if pool.protocol == "tcp":
        from egmctl.mooncake.wheel import require_transfer_engine

        require_transfer_engine()
    pool.task.tell("master", f"asking {target}")
    link = pool.link(target)
    try:
        link.ready()
    except FailedError as error:
        link.renew()
        raise FailedError(
            f"the Master does not answer, the pool stays {pool.state}: {error.message}",
            where=f"pool {pool.name}, Master {target}",
            hint=f"start mooncake_master there, or name another: egmctl mount {pool.name} --master HOST:PORT",
            facts=error.facts,
        ) from error


def leave_others(pool: Pool, target: str) -> None:
    """Refuse a second Master while another may still name our memory.

    One exception: a Master whose process is gone (its port refuses connections) has lost what it knew; once no ping
    has gone there for as long as a Master keeps a silent client, it is fenced. One that is only silent is not.
    """
    for other in [master for master in pool.record_now().masters if master != target]:
        if pool.state == "ready" or not _refuses(other):
            raise BusyError(
                f"its chunks were offered to the Master at {other}, which may still name them",
                where=f"pool {pool.name}, Master {target}",
                hint=f"run `egmctl teardown {pool.name}` first; chunks are never offered to two Masters",
                facts={"master": other},
            )
        if pool.live is not None and pool.live.heartbeat is not None:
            pool.live.heartbeat.stop()
            pool.live.heartbeat = None
        expiry = max(pool.plan.client_expiry, pool.plan.lease_ttl)
        pool.task.wait(
            expiry, stage="fence", text=f"the Master at {other} is gone: waiting until its leases are over", slice_s=0.2
        )
        if not _refuses(other):
            raise BusyError(
                f"the Master at {other} is back, and may still name this pool's chunks",
                where=f"pool {pool.name}",
                hint="it is mounted there again by itself; or tear the pool down first",
            )
        rows = [row for row in pool.record_now().live_segments if row.master == other]
        with pool.record("fenced", master=other, segments=len(rows)) as ledger:
            ledger.set_segments("fenced", (row.id for row in rows))
            ledger.set_pool(exclusive=0)


def _refuses(master: str) -> bool:
    """Whether nothing listens there any more (a host that does not answer at all says nothing)."""
    host, port = parse_address(master)
    try:
        with step("provider.master.knock", master=master):
            socket.create_connection((host, port), timeout=2.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
