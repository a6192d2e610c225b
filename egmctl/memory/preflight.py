"""Whether this machine can give memory of a CUDA kind: attributes by number, then one real granule on each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from egmctl.errors import PreflightError
from egmctl.memory.base import MemoryKind
from egmctl.memory.driver import Attribute, Driver
from egmctl.memory.probe import ProbeResult, probe

__all__ = ["REQUIRED", "ProbeResult", "attribute_problems", "check_cuda", "probe"]

REQUIRED: dict[str, tuple[Attribute, ...]] = {
    "cuda-posix": (
        Attribute.VIRTUAL_MEMORY_MANAGEMENT,
        Attribute.HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT,
        Attribute.HANDLE_TYPE_POSIX_FD,
    ),
    "cuda-fabric": (
        Attribute.VIRTUAL_MEMORY_MANAGEMENT,
        Attribute.HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT,
        Attribute.HANDLE_TYPE_FABRIC,
        Attribute.HOST_NUMA_MULTINODE_IPC,
    ),
}
"""What each kind needs of every GPU. 0 is no; an attribute that the driver does not know is unknown, not no."""

_NO_CHANNEL = (
    "the process can open no IMEX channel (/dev/nvidia-caps-imex-channels/channelN), or the domain is not up:"
    " `egmctl doctor --for cuda-fabric` says which and prints the command that mends it"
)


def attribute_problems(driver: Driver, kind: str, devices: Sequence[int]) -> list[str]:
    """What the GPUs' attributes rule out, one sentence each; nothing when all is well or unknown."""
    problems = []
    for device in devices:
        for attribute in REQUIRED[kind]:
            if driver.attribute(device, attribute) == 0:
                problems.append(f"GPU {device}: attribute {attribute.value} ({attribute.name}) is 0")
    return problems


def check_cuda(driver: Driver, kind: MemoryKind, devices: Sequence[int], nodes: Sequence[int]) -> None:
    """Raise `PreflightError` with everything that stands in the way; ``facts`` hold the same as data."""
    problems = attribute_problems(driver, kind, devices)
    results = [probe(kind, node) for node in nodes]
    hints = []
    for result in results:
        if not result.ok:
            problems.append(f"NUMA node {result.numa_node}: {result.detail} [{result.outcome}]")
    outcomes = {result.outcome for result in results}
    if "not-permitted" in outcomes:
        hints.append(_NO_CHANNEL if kind == "cuda-fabric" else f"see `egmctl doctor --for {kind}`")
    if "crashed" in outcomes or "not-supported" in outcomes:
        hints.append("name only nodes with CPUs in egm_numa_nodes (`egmctl topology` shows each node's role)")
    if "out-of-memory" in outcomes:
        hints.append("free memory on the node")
    if kind == "cuda-fabric" and problems:
        hints.append('or use memory = "cuda-posix" on this host')
    if not problems:
        return
    raise PreflightError(
        "; ".join(problems),
        where=f"memory kind {kind}",
        hint="; ".join(hints) or f"see `egmctl doctor --for {kind}`",
        facts={
            "attributes": {
                str(device): {str(a.value): driver.attribute(device, a) for a in REQUIRED[kind]} for device in devices
            },
            "probes": [asdict(result) for result in results],
        },
    )
