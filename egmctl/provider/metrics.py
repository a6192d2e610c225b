"""A pool's figures for Prometheus: read off its state when they are asked for, and counted nowhere twice.

Needs ``prometheus_client`` (the extra ``egmctl[metrics]``). The registry is its own, so nothing of another library in
this process is told.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from egmctl.ledger import PoolRecord
    from egmctl.provider.pool import Pool

__all__ = ["STATES", "PoolMetrics"]

STATES = (
    "provisioning",
    "provisioned",
    "mounting",
    "ready",
    "degraded",
    "tearing-down",
    "cleanup-pending",
    "gone",
    "abandoned",
)
_ENDING = ("tearing-down", "cleanup-pending")


class PoolMetrics(Collector):
    """``text()`` is the page, ``content_type`` its type. Every figure carries the label ``pool``; bytes are bytes,
    times seconds."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        page: bytes = generate_latest(self._registry)
        return page

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        record = self._pool.record_now()
        yield from self._state()
        yield from self._memory(record)
        yield from self._work()
        yield from self._master()

    def _gauge(self, name: str, text: str, values: dict[str, float], label: str) -> Metric:
        family = GaugeMetricFamily(f"egmctl_{name}", text, labels=["pool", label])
        for value, figure in values.items():
            family.add_metric([self._pool.name, value], figure)
        return family

    def _one(self, name: str, text: str, figure: float) -> Metric:
        family = GaugeMetricFamily(f"egmctl_{name}", text, labels=["pool"])
        family.add_metric([self._pool.name], figure)
        return family

    def _count(self, name: str, text: str, figure: float) -> Metric:
        family = CounterMetricFamily(f"egmctl_{name}", text, labels=["pool"])
        family.add_metric([self._pool.name], figure)
        return family

    def _state(self) -> Iterator[Metric]:
        pool = self._pool
        state = pool.state
        info = InfoMetricFamily("egmctl_pool", "What the pool is.", labels=["pool"])
        info.add_metric([pool.name], {"memory_kind": pool.plan.memory_kind, "protocol": pool.protocol})
        yield info
        one_hot = {each: float(each == state) for each in STATES}
        yield self._gauge("pool_state", "1 for the state the pool is in.", one_hot, "state")
        yield self._one("pool_ready", "Whether the pool is mounted and works.", float(state == "ready"))

    def _memory(self, record: PoolRecord) -> Iterator[Metric]:
        planned = {str(node.numa_node): float(node.bytes) for node in self._pool.plan.nodes}
        yield self._gauge("capacity_bytes", "What the plan takes of each NUMA node.", planned, "numa_node")
        owned: Counter[str] = Counter(dict.fromkeys(planned, 0))
        for chunk in record.live_chunks:
            owned[str(chunk.numa_node)] += chunk.nbytes
        text = "What is allocated, or may be, on each NUMA node."
        yield self._gauge("allocated_bytes", text, {node: float(owned[node]) for node in owned}, "numa_node")
        # A chunk is where it stands at the Master, or, not offered there, where its memory stands.
        at_master = {row.chunk: row.state for row in record.live_segments}
        states = Counter(at_master.get(chunk.index, chunk.state) for chunk in record.chunks)
        yield self._gauge("chunks", "Chunks by state.", {name: float(count) for name, count in states.items()}, "state")
        pending = sum(chunk.nbytes for chunk in record.live_chunks) if self._pool.state in _ENDING else 0
        yield self._one("cleanup_pending_bytes", "Memory that a teardown has yet to release.", pending)

    def _work(self) -> Iterator[Metric]:
        meters = self._pool.meters
        labels = ["pool", "stage", "direction"]
        seconds = SummaryMetricFamily("egmctl_stage_seconds", "Time spent in each stage.", labels=labels)
        failures = CounterMetricFamily("egmctl_stage_failures", "Stages that failed.", labels=labels)
        for (stage, direction), (runs, total, failed) in sorted(meters.stages().items()):
            seconds.add_metric([self._pool.name, stage, direction], runs, total)
            failures.add_metric([self._pool.name, stage, direction], failed)
        yield seconds
        yield failures
        yield self._count("rollbacks", "Times that failed work was undone.", meters.events("rollbacks"))
        yield self._count("cleanups", "Times that a teardown was tried.", meters.events("cleanups"))
        yield self._count("remounts", "Chunks mounted anew without being told to.", meters.events("remounts"))
        restarts = meters.events("engine_restarts")
        yield self._count("transfer_engine_restarts", "Transfer Engine children that were replaced.", restarts)

    def _master(self) -> Iterator[Metric]:
        heartbeat = None if self._pool.live is None else self._pool.live.heartbeat
        if heartbeat is None:
            return
        pulse = heartbeat.pulse()
        yield self._count("pings_sent", "Pings to the Master since it was mounted there.", pulse.sent)
        yield self._count("pings_missed", "Of those, the ones without an answer.", pulse.missed)
        if pulse.last_contact is not None:
            age = time.monotonic() - pulse.last_contact
            yield self._one("master_last_contact_seconds", "Since the last answered ping.", age)
