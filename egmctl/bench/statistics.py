"""Percentiles of what was measured: nearest rank, so that every figure is one that was really seen."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["latency_us", "percentile", "rate_gbps"]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of all do not exceed. Raises `ValueError` for no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def latency_us(nanoseconds: Sequence[int]) -> dict[str, float]:
    """p50, p90, p99 and max of single operations, in microseconds."""
    values = [ns / 1e3 for ns in nanoseconds]
    return {
        "p50": round(percentile(values, 50), 1),
        "p90": round(percentile(values, 90), 1),
        "p99": round(percentile(values, 99), 1),
        "max": round(max(values), 1),
    }


def rate_gbps(nanoseconds: Sequence[int], nbytes: int) -> dict[str, float]:
    """10**9 bytes a second of single operations of ``nbytes`` (p50, p10 the slow end), and ``mean`` over all."""
    values = [nbytes / max(1, ns) for ns in nanoseconds]
    return {
        "p50": round(percentile(values, 50), 4),
        "p10": round(percentile(values, 10), 4),
        "mean": round(nbytes * len(nanoseconds) / max(1, sum(nanoseconds)), 4),
    }
