"""Before the first allocation: the checks of a plan's memory kind, and one refusal that names all in the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from egmctl.checks.base import CheckResult, run_checks
from egmctl.checks.kinds import preflight_checks_for
from egmctl.checks.machine import Machine
from egmctl.errors import PreflightError
from egmctl.memory.base import MemoryKind
from egmctl.topology.read import Roots

if TYPE_CHECKING:
    from egmctl.paths import Paths
    from egmctl.topology import Topology

__all__ = ["preflight"]


def preflight(
    kind: MemoryKind,
    nodes: Sequence[int],
    topology: Topology,
    *,
    paths: Paths | None = None,
    roots: Roots | None = None,
) -> list[CheckResult]:
    """Everything this machine must have to lend ``kind`` memory on ``nodes``; nothing of the pool is allocated.

    Returns the findings (warnings among them). Raises `PreflightError` (exit 3) when any check fails, with what was
    observed and the remedies in its message and hint, and all findings as ``facts["checks"]``.
    """
    machine = Machine(kind, topology=topology, paths=paths, nodes=nodes, roots=roots)
    results = run_checks(preflight_checks_for(kind), machine)
    failed = [result for result in results if result.status == "fail"]
    if not failed:
        return results
    hints = dict.fromkeys(result.hint for result in failed if result.hint)
    raise PreflightError(
        "; ".join(dict.fromkeys(result.observed for result in failed)),
        where=f"memory kind {kind}: {', '.join(dict.fromkeys(result.id.partition('/')[0] for result in failed))}",
        hint="; ".join(hints) or f"see `egmctl doctor --for {kind}`",
        facts={"memory_kind": kind, "checks": [result.document() for result in results]},
    )
