"""NUMA nodes and NVIDIA PCI devices as sysfs shows them, under ``/sys`` or any copy of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from egmctl.topology.bdf import Bdf
from egmctl.topology.lists import parse_list, read_int, read_text
from egmctl.topology.model import NumaNode

__all__ = ["PciGpu", "parse_meminfo", "read_nodes", "read_pci_gpus"]

_NODE = re.compile(r"node([0-9]{1,5})", re.ASCII)
_HUGE = re.compile(r"hugepages-([0-9]{1,12})kB", re.ASCII)
_MEMINFO = re.compile(r"^(?:Node\s+\d+\s+)?([\w()]+):\s+(\d+)(\s+kB)?\s*$", re.MULTILINE | re.ASCII)
_NVIDIA = 0x10DE
_DISPLAY = 0x03  # PCI base class: VGA (0x0300) and 3D controllers (0x0302)


@dataclass(frozen=True)
class PciGpu:
    """An NVIDIA display device; ``numa_node`` None where sysfs says -1 or nothing."""

    bdf: Bdf
    device_id: int
    numa_node: int | None


def parse_meminfo(text: str) -> dict[str, int]:
    """The lines of a ``meminfo`` (a node's or ``/proc``'s), in bytes where the kernel says kB."""
    return {name: int(value) * (1024 if unit else 1) for name, value, unit in _MEMINFO.findall(text)}


def _listed(path: Path) -> tuple[int, ...] | None:
    text = read_text(path)
    try:
        return None if text is None else parse_list(text)
    except ValueError:
        return None


def read_nodes(sys: Path, allowed: Collection[int] | None, gpu_memory: Collection[int] = ()) -> tuple[NumaNode, ...]:
    """The nodes of a sysfs tree, ascending, each with its role.

    ``allowed`` are the nodes of the cpuset, None for all; ``gpu_memory`` nodes that a driver named as a GPU's own
    memory. Without a driver, a CPU-less node with a generic initiator (how firmware describes a coherent GPU) on a
    machine with NVIDIA GPUs counts as one.
    """
    root = sys / "devices/system/node"
    online = _listed(root / "online")
    initiators = set(gpu_memory)
    if read_pci_gpus(sys):
        initiators.update(_listed(root / "has_generic_initiator") or ())
    nodes = []
    for folder in sorted(root.glob("node*")) if root.is_dir() else []:
        match = _NODE.fullmatch(folder.name)
        if match is None:
            continue
        number = int(match[1])
        cpus = _listed(folder / "cpulist") or ()
        memory = parse_meminfo(read_text(folder / "meminfo") or "")
        total = memory.get("MemTotal", 0)
        may = allowed is None or number in allowed
        if online is not None and number not in online:
            role = "offline"
        elif total == 0:
            role = "no-memory"
        elif not cpus:
            role = "gpu-memory" if number in initiators else "no-cpus"
        else:
            role = "pool" if may else "not-allowed"
        nodes.append(NumaNode(number, cpus, total, _free(memory), may, role, _huge_pages(folder)))
    return tuple(sorted(nodes, key=lambda node: node.id))


def _free(memory: Mapping[str, int]) -> int:
    """Free and reclaimable: page cache that is not shared memory (which has nowhere to go) and reclaimable slab."""
    cache = max(0, memory.get("FilePages", 0) - memory.get("Shmem", 0))
    free = memory.get("MemFree", 0) + cache + memory.get("SReclaimable", 0)
    return min(free, memory.get("MemTotal", free))


def _huge_pages(folder: Path) -> dict[int, int]:
    pages = {}
    for entry in sorted((folder / "hugepages").glob("hugepages-*kB")):
        match = _HUGE.fullmatch(entry.name)
        free = read_int(entry / "free_hugepages")
        if match is not None and free is not None:
            pages[int(match[1]) * 1024] = free
    return pages


def read_pci_gpus(sys: Path) -> tuple[PciGpu, ...]:
    """NVIDIA GPUs among the PCI devices, in PCI order; virtual functions are left out."""
    gpus = []
    folder = sys / "bus/pci/devices"
    for device in sorted(folder.iterdir()) if folder.is_dir() else []:
        if read_int(device / "vendor", 16) != _NVIDIA or (read_int(device / "class", 16) or 0) >> 16 != _DISPLAY:
            continue
        if (device / "physfn").exists():
            continue
        node = read_int(device / "numa_node")
        gpus.append(
            PciGpu(
                bdf=Bdf.parse(device.name),
                device_id=read_int(device / "device", 16) or 0,
                numa_node=node if node is not None and node >= 0 else None,
            )
        )
    return tuple(sorted(gpus, key=lambda gpu: gpu.bdf))
