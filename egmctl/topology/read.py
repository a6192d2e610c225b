"""Read the machine at hand, or a copy of ``/sys`` that stands for another."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from egmctl.errors import PreflightError, UsageError
from egmctl.topology.gpus import gpus_from_sysfs, list_gpus
from egmctl.topology.limits import allowed_nodes, memory_headroom
from egmctl.topology.lists import parse_list, read_text
from egmctl.topology.model import NumaNode, Topology
from egmctl.topology.sysfs import parse_meminfo, read_nodes, read_pci_gpus

__all__ = ["Roots", "read_topology"]


@dataclass(frozen=True)
class Roots:
    """Where the kernel's file systems are mounted."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")


def read_topology(
    sysfs_root: Path | str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    roots: Roots = Roots(),
) -> Topology:
    """What this machine is now; with ``sysfs_root``, what that copy of ``/sys`` shows and nothing else: all online
    nodes are allowed, all GPUs visible, and neither NVML nor CUDA nor ``/proc`` is asked.

    Raises `UsageError` for a root that is no sysfs, and for MIG in CUDA_VISIBLE_DEVICES.
    """
    if sysfs_root is not None:
        return _read_copy(Path(sysfs_root))
    warnings: list[str] = []
    pci = read_pci_gpus(roots.sys)
    allowed = allowed_nodes(roots.proc)
    nodes = read_nodes(roots.sys, allowed)
    gpus, doubts, gpu_memory = list_gpus(pci, _cpu_nodes(nodes), os.environ if environ is None else environ, roots.dev)
    warnings.extend(doubts)
    if gpu_memory:
        nodes = read_nodes(roots.sys, allowed, gpu_memory)
    if not nodes:
        nodes = (_only_node(roots),)
        warnings.append("this kernel shows no NUMA nodes in sysfs: the machine is taken as one node")
    return Topology(
        nodes=nodes,
        gpus=gpus,
        headroom=memory_headroom(roots.proc),
        hostname=socket.gethostname(),
        warnings=tuple(warnings),
    )


def _read_copy(root: Path) -> Topology:
    nodes = read_nodes(root, None)
    if not nodes:
        raise UsageError(
            "no NUMA nodes below it (devices/system/node)",
            where=str(root),
            hint="--sysfs-root is a folder that stands for /sys",
        )
    gpus, warnings = gpus_from_sysfs(read_pci_gpus(root), _cpu_nodes(nodes))
    return Topology(nodes=nodes, gpus=gpus, origin=f"sysfs root {root}", warnings=tuple(warnings))


def _cpu_nodes(nodes: tuple[NumaNode, ...]) -> list[int]:
    return [node.id for node in nodes if node.role in ("pool", "not-allowed")]


def _only_node(roots: Roots) -> NumaNode:
    memory = parse_meminfo(read_text(roots.proc / "meminfo") or "")
    try:
        cpus = parse_list(read_text(roots.sys / "devices/system/cpu/online") or "") or tuple(range(os.cpu_count() or 1))
    except ValueError:
        cpus = tuple(range(os.cpu_count() or 1))
    total = memory.get("MemTotal", 0)
    if total == 0:
        raise PreflightError(
            "the kernel tells no memory size", where=str(roots.proc / "meminfo"), hint="mount procfs and sysfs here"
        )
    return NumaNode(0, cpus, total, memory.get("MemAvailable", 0))
