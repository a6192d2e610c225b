"""``egmctl doctor``: what this machine can and cannot do, for one memory kind or for all it could be meant for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from egmctl.checks.base import CheckResult, ok, run_checks
from egmctl.checks.kinds import checks_for
from egmctl.checks.machine import KINDS, Machine
from egmctl.errors import UsageError
from egmctl.memory.base import MemoryKind
from egmctl.memory.driver import Attribute, CudaError
from egmctl.topology.read import Roots

if TYPE_CHECKING:
    from egmctl.paths import Paths
    from egmctl.topology import Topology

__all__ = ["run_doctor"]


def run_doctor(
    kind: str | None,
    paths: Paths,
    *,
    topology: Topology | None = None,
    roots: Roots | None = None,
    told: Callable[[str, CheckResult], None] | None = None,
) -> dict[str, Any]:
    """The document ``egmctl/doctor/1``: ``ok``, ``kinds`` {kind: ok|None} and ``checks``, each with its kind.

    With ``kind`` that kind alone is checked. Without, ``shm`` always is, and each CUDA kind when this machine could be
    meant for it: GPUs are visible, and for ``cuda-fabric`` attribute 143 is not 0. What was not checked is ``skip``.
    ``told`` hears (kind, result) as results come. Raises `UsageError` for a kind there is not.
    """
    if kind is not None and kind not in KINDS:
        raise UsageError(f"there is no memory kind {kind!r}", hint=f"one of {', '.join(KINDS)}")
    roots = roots or Roots()
    if topology is None:
        from egmctl.topology import read_topology

        topology = read_topology(roots=roots)
    kinds: dict[str, bool | None] = {}
    checks: list[dict[str, Any]] = []
    for each in KINDS:
        if kind is not None and each != kind:
            continue
        machine = Machine(each, topology=topology, paths=paths, roots=roots)
        reason = None if kind is not None else _not_meant(each, machine)

        def tell(result: CheckResult, each: MemoryKind = each) -> None:
            checks.append({"kind": each, **result.document()})
            if told is not None:
                told(each, result)

        if reason is not None:
            kinds[each] = None
            tell(CheckResult(each, "skip", reason, hint=f"egmctl doctor --for {each} checks it all the same"))
            continue
        kinds[each] = ok(run_checks(checks_for(each), machine, tell))
    return {
        "schema": "egmctl/doctor/1",
        "ok": all(verdict is not False for verdict in kinds.values()),
        "kinds": kinds,
        "checks": checks,
    }


def _not_meant(kind: MemoryKind, machine: Machine) -> str | None:
    """Why a kind that nobody asked for is not checked here."""
    if kind == "shm":
        return None
    if isinstance(machine.driver, CudaError) or not machine.devices:
        return "no GPU is visible to CUDA"
    if kind == "cuda-fabric" and machine.driver.attribute(machine.devices[0], Attribute.HOST_NUMA_MULTINODE_IPC) == 0:
        return "attribute 143 (HOST_NUMA_MULTINODE_IPC) is 0: these GPUs cannot share host memory between nodes"
    return None
