"""The stages of `mount`: the Transfer Engine child, the publication of the descriptor, the segments at the Master."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

from egmctl.errors import CleanupPendingError, FailedError
from egmctl.ledger import is_running, start_time
from egmctl.provider import segments
from egmctl.provider.heartbeat import Heartbeat
from egmctl.provider.listing import first_chunk_listed, foreign_segments
from egmctl.provider.local_stages import Endpoint
from egmctl.provider.remembered import remember
from egmctl.steps import step

if TYPE_CHECKING:
    from egmctl.mooncake.descriptor import SegmentDescriptor
    from egmctl.provider.pool import Pool

__all__ = ["Engine", "Publication", "Segments"]

LISTING_MARGIN = 5.0
"""Seconds beyond the client expiry after which a dead owner's segments should have left the Master's listing."""


class Engine:
    """The child that serves stock clients over TCP; none for ``nvlink``. Ledger: resource ``engine`` intended, present
    (pid, start time, data port), removed. It is stopped before any memory goes; an orphan of a dead agent is ended."""

    name = "Transfer Engine child"

    def do(self, pool: Pool) -> None:
        from egmctl.mooncake.transfer_engine import TransferEngineChild

        parts = pool.parts
        if pool.protocol != "tcp" or (parts.engine is not None and parts.engine.alive()):
            return
        with pool.record("engine begins") as ledger:
            ledger.put_resource("engine", "transfer engine", "intended")
        engine = TransferEngineChild(host=pool.host, log_fd=parts.engine_log, on_death=parts.engine_deaths.append)
        parts.engine = engine
        pool.task.tell("engine", "starting the Transfer Engine child")
        engine.start([parts.chunks[index] for index in sorted(parts.chunks)])
        self.note(pool)

    @staticmethod
    def note(pool: Pool) -> None:
        """Record the child that serves now."""
        engine = pool.parts.engine
        if engine is None:
            return
        pid = engine.pid or 0
        with pool.record("engine serves", pid=pid, data_port=engine.data_port) as ledger:
            ledger.put_resource(
                "engine",
                "transfer engine",
                "present",
                pid=pid,
                started=start_time(pid),
                data_port=engine.data_port,
            )

    def undo(self, pool: Pool) -> None:
        present = pool.resources("engine")
        if not present:
            return
        if pool.live is not None and pool.live.engine is not None:
            pool.live.engine.stop()
            pool.live.engine = None
        elif pool.live is None:
            for resource in present:
                self._end_orphan(pool, int(resource.detail.get("pid") or 0), resource.detail.get("started"))
        with pool.record("engine stopped") as ledger:
            ledger.put_resource("engine", "transfer engine", "removed")

    @staticmethod
    def _end_orphan(pool: Pool, pid: int, started: int | None) -> None:
        if not pid or started is None or pool.other_boot or not is_running(pid, started):
            return
        with step("provider.engine.kill_orphan", pid=pid):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while is_running(pid, started):
            if time.monotonic() > deadline:
                raise CleanupPendingError(
                    f"the Transfer Engine child (pid {pid}) does not end",
                    where=f"pool {pool.name}",
                    hint="end it, then run teardown again",
                )
            time.sleep(0.02)


class Publication:
    """The complete descriptor, before any segment: a stock consumer reads it once and keeps it. It is answered by the
    endpoint, or lies at the metadata server (ledger: resource ``metadata`` intended, present, removed)."""

    name = "publication"

    def do(self, pool: Pool) -> None:
        parts = pool.parts
        if parts.endpoint is None and pool.metadata_url is None:  # closed for a move that did not come to its end
            Endpoint.bind(pool, 0)
        self._establish_exclusive(pool)
        with step("provider.register"):
            # Those that are registered are being moved from one Master to another.
            new = [chunk for _, chunk in sorted(parts.chunks.items()) if not parts.registry.holds(chunk)]
            parts.registry.register_remote(new)
        if pool.remembered:
            ranges = [(chunk.address, chunk.address + chunk.spec.nbytes) for chunk in parts.chunks.values()]
            remember(pool.paths, pool.record_now().endpoint, ranges)
        self.publish(pool)

    @staticmethod
    def publish(pool: Pool) -> None:
        """Publish what is so now."""
        from egmctl.mooncake.metadata import MetadataClient

        parts = pool.parts
        descriptor = _descriptor(pool)
        data = descriptor.to_bytes()
        url = pool.metadata_url
        if url is not None:

            def about_to() -> None:
                with pool.record("publication begins", url=url, key=descriptor.name) as ledger:
                    ledger.put_resource("metadata", descriptor.name, "intended", url=url)

            outcome = MetadataClient(url).publish(descriptor.name, descriptor, about_to)
            with pool.record("published", url=url, key=descriptor.name, outcome=outcome) as ledger:
                ledger.put_resource("metadata", descriptor.name, "present", url=url)
        with step("provider.publish", endpoint=descriptor.name, chunks=len(descriptor.buffers)):
            parts.published = data
        parts.descriptor = descriptor

    def undo(self, pool: Pool) -> None:
        from egmctl.mooncake.metadata import MetadataClient

        if pool.live is not None and pool.live.published:
            with step("provider.unpublish"):
                pool.live.published = b""
            pool.live.descriptor = None
        nonce = pool.record_now().nonce
        for resource in pool.resources("metadata"):
            url = str(resource.detail.get("url", pool.metadata_url or ""))
            pool.task.tell("metadata", f"removing {resource.name} from {url}")
            client = MetadataClient(url)
            found = client.withdraw(resource.name, nonce)
            if resource.state == "intended" and not found:
                pool.task.wait(
                    client.timeout,
                    stage="metadata",
                    text=f"{resource.name} was put without an answer: looking whether it still arrives",
                    until=partial(client.withdraw, resource.name, nonce),
                    slice_s=0.25,
                )
            with pool.record("publication removed", url=url, key=resource.name) as ledger:
                ledger.put_resource("metadata", resource.name, "removed")
        if pool.live is not None:
            with step("provider.unregister"):
                pool.live.registry.unregister_remote()

    @staticmethod
    def _establish_exclusive(pool: Pool) -> None:
        """Find out whether the Master may still list a dead owner's segments under our endpoint.

        A key with our nonce in it is ours alone. Else the listing tells. Without one, a port that the kernel chose is
        fresh unless the Master knows a first chunk there by name; a fixed port, which an earlier agent may have used,
        is ours once the Master's expiry has passed since we took it.
        """
        record = pool.record_now()
        if record.exclusive or pool.live is None:
            return
        expiry = pool.plan.client_expiry
        until = pool.live.bound_at + expiry
        exclusive = pool.metadata_url is not None
        if not exclusive:
            foreign = foreign_segments(pool)
            if foreign:
                pool.task.wait(
                    max(0.0, until + LISTING_MARGIN - time.monotonic()),
                    stage="endpoint",
                    text=f"waiting for the Master to drop {len(foreign)} segment(s) of an earlier agent here",
                    until=lambda: not foreign_segments(pool),
                    slice_s=0.25,
                )
                foreign = foreign_segments(pool)
                if foreign:
                    raise FailedError(
                        f"the Master still lists {len(foreign)} segment(s) of others under {record.endpoint}, such as "
                        f"{foreign[0]}",
                        where=record.master or record.endpoint,
                        hint="tear down the pool that mounted them, or give local_hostname another port",
                    )
            if foreign is None and pool.fixed_port:
                pool.task.wait(
                    max(0.0, until - time.monotonic()),
                    stage="endpoint",
                    text="waiting until a segment of an earlier agent on this port can no longer be listed "
                    "(master_admin_addr in the spec saves this)",
                )
            fresh = not pool.fixed_port and not first_chunk_listed(pool)
            exclusive = foreign is not None or fresh or time.monotonic() >= until
        if exclusive:
            with pool.record("endpoint is ours alone") as ledger:
                ledger.set_pool(exclusive=1)


class Segments:
    """Each chunk a segment at the Master, with an id of its own for each attempt. Ledger: all ``mounting`` before the
    first request, then what is known of each. Unmounting is idempotent; a mount that was never answered is settled
    first (`segments.settle_unanswered`); the memory stays for the grace and the leases that began in it."""

    name = "segments"

    def do(self, pool: Pool) -> None:
        record = pool.record_now()
        parts = pool.parts
        if parts.heartbeat is None or parts.heartbeat.master != record.master:
            if parts.heartbeat is not None:
                parts.heartbeat.stop()
            parts.heartbeat = Heartbeat(record.master, record.client, interval=pool.timing.ping_interval)
            parts.heartbeat.start()
        pool.task.wait(
            max(0.0, parts.quiet_until - time.monotonic()),
            stage="leases",
            text="waiting for leases on earlier locations to end",
        )
        segments.offer(pool, [row.index for row in record.chunks])

    def undo(self, pool: Pool) -> None:
        record = pool.record_now()
        for master in record.masters:
            segments.take_back(pool, master)
        if pool.live is not None and pool.live.heartbeat is not None:
            pool.live.heartbeat.stop()
            pool.live.heartbeat = None


def _descriptor(pool: Pool) -> SegmentDescriptor:
    from egmctl.mooncake.descriptor import EgmChunk, EgmFields, nvlink_descriptor, tcp_descriptor
    from egmctl.mooncake.host import host_id

    parts = pool.parts
    record = pool.record_now()
    # Local-only memory is not among these, so it cannot be listed.
    registered = parts.registry.remote()
    chunks = [chunk for chunk, _ in registered]
    egm = EgmFields(
        pool=pool.name,
        nonce=record.nonce,
        kind=pool.plan.memory_kind,
        socket=record.socket,
        host_id=host_id(),
        exclusive=record.exclusive,
        chunks=tuple(EgmChunk(c.spec.index, c.spec.numa_node, c.address, c.spec.nbytes) for c in chunks),
    )
    if pool.protocol == "tcp":
        port = parts.engine.data_port if parts.engine is not None else None
        return tcp_descriptor(
            record.endpoint,
            [(c.address, c.spec.nbytes) for c in chunks],
            data_host=pool.host,
            data_port=port or 0,
            egm=egm,
        )
    rows = [(c.spec.numa_node, c.address, c.spec.nbytes, handle) for c, handle in registered]
    return nvlink_descriptor(record.endpoint, rows, egm=egm)
