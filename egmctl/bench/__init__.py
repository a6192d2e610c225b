"""Workloads on a pool, their statistics and their report."""

from egmctl.bench.run import run_bench

__all__ = ["run_bench"]
