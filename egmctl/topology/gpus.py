"""The visible GPUs and the CPU node of each, from NVML, the CUDA driver and sysfs.

NVML and CUDA say which GPUs there are and which are visible. The CPU node is sysfs's answer; where that is -1 or
absent, CUDA's HOST_NUMA_ID; where neither knows and the machine has one CPU node, that one. NVML's NUMA id is the
GPU's own memory on a coherent machine (node 10, say), and is only ever shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from egmctl.topology import nvml
from egmctl.topology.bdf import Bdf
from egmctl.topology.model import Gpu
from egmctl.topology.sysfs import PciGpu
from egmctl.topology.visible import refuse_mig, visible_devices

__all__ = ["CudaGpu", "ask_cuda", "gpus_from_sysfs", "list_gpus"]

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


@dataclass(frozen=True)
class CudaGpu:
    """One device of the CUDA driver, which has applied CUDA_VISIBLE_DEVICES. ``host_node`` is HOST_NUMA_ID,
    ``memory_node`` NUMA_ID; None when not known."""

    index: int
    uuid: str
    name: str
    bdf: str
    host_node: int | None
    memory_node: int | None


def ask_cuda() -> tuple[tuple[CudaGpu, ...] | None, str]:
    """(devices, ""), or (None, why not). No device at all is an empty list."""
    from egmctl.memory.driver import Attribute, CudaError, get_driver

    try:
        driver = get_driver()
        gpus = []
        for index in range(driver.device_count()):
            node = driver.attribute(index, Attribute.HOST_NUMA_ID)
            own = driver.attribute(index, Attribute.NUMA_ID)
            gpus.append(
                CudaGpu(
                    index=index,
                    uuid=driver.device_uuid(index),
                    name=driver.device_name(index),
                    bdf=str(Bdf.parse(driver.device_bdf(index))),
                    host_node=node if node is not None and node >= 0 else None,
                    memory_node=own if own is not None and own >= 0 else None,
                )
            )
    except CudaError as error:
        return ((), "") if error.number == _NO_DEVICE else (None, error.message)
    return tuple(gpus), ""


def gpus_from_sysfs(pci: Sequence[PciGpu], cpu_nodes: Sequence[int]) -> tuple[tuple[Gpu, ...], list[str]]:
    """All GPUs of a sysfs tree that stands for a machine: nobody else is asked, and all are visible."""
    listed = [_Listed("", _pci_name(gpu), gpu.bdf) for gpu in pci]
    return _place(listed, pci, None, {}, cpu_nodes)


@dataclass(frozen=True)
class _Listed:
    uuid: str
    name: str
    bdf: Bdf


def _pci_name(gpu: PciGpu) -> str:
    return f"NVIDIA [10de:{gpu.device_id:04x}]"


def _may_have_gpus(pci: Sequence[PciGpu], dev: Path) -> bool:
    from egmctl.memory import driver

    # A container may hide the devices from sysfs, and WSL has none there.
    standing_in = nvml.installed() or driver._factory is not None
    return bool(pci) or standing_in or (dev / "nvidiactl").exists() or (dev / "dxg").exists()


def list_gpus(
    pci: Sequence[PciGpu], cpu_nodes: Sequence[int], environ: Mapping[str, str], dev: Path
) -> tuple[tuple[Gpu, ...], list[str], frozenset[int]]:
    """(visible GPUs in CUDA's order, warnings, nodes that are GPU memory). A machine without a GPU costs nothing and
    says nothing. Raises `UsageError` when CUDA_VISIBLE_DEVICES names a MIG instance."""
    if not _may_have_gpus(pci, dev):
        return (), [], frozenset()
    refuse_mig(environ)
    door = nvml.get_nvml()
    by_nvml = door.gpus() if door is not None else ()
    warnings = [f"GPU {gpu.bdf} has MIG on: egmctl works on whole GPUs only" for gpu in by_nvml if gpu.mig]
    memory_nodes = {gpu.bdf: gpu.memory_node for gpu in by_nvml if gpu.memory_node is not None}
    everything = [_Listed(gpu.uuid, gpu.name, Bdf.parse(gpu.bdf)) for gpu in by_nvml]
    if not everything:
        everything = [_Listed("", _pci_name(gpu), gpu.bdf) for gpu in pci]

    shown = visible_devices(environ, [gpu.uuid for gpu in everything])
    by_uuid = environ.get("CUDA_VISIBLE_DEVICES", "").strip().startswith("GPU-")
    if everything and not shown and (by_nvml or not by_uuid):
        warnings.append(f"CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', '')!r} hides all GPUs")
        return (), warnings, frozenset(memory_nodes.values())

    by_cuda, why = ask_cuda()
    hosts = None
    if by_cuda is not None:
        listed = [_Listed(gpu.uuid, gpu.name, Bdf.parse(gpu.bdf)) for gpu in by_cuda]
        hosts = {gpu.bdf: gpu.host_node for gpu in by_cuda}
        memory_nodes.update({gpu.bdf: gpu.memory_node for gpu in by_cuda if gpu.memory_node is not None})
        others = {gpu.bdf for gpu in by_nvml}
        warnings.extend(f"CUDA lists GPU {bdf}, NVML does not" for bdf in hosts if others and bdf not in others)
        if everything and not by_cuda:
            warnings.append("CUDA_ERROR_NO_DEVICE (100): the CUDA driver sees no GPU, though the machine has some")
    else:
        listed = [everything[index] for index in shown]
        warnings.append(f"the CUDA driver was not asked for the GPUs' nodes: {why}")
        if door is None and not (dev / "nvidiactl").exists():
            # sysfs shows a container the whole host, and a host without the driver its idle GPUs.
            listed = []
            warnings = [
                f"sysfs lists {len(pci)} NVIDIA GPU(s), none of which this process can use: there is no "
                f"{dev / 'nvidiactl'} (the driver is not loaded, or the container was given no GPU)"
            ]
        elif door is None:
            warnings.append(f"GPUs are listed by sysfs alone: {nvml.why_no_nvml()}")
            if by_uuid:
                warnings.append("CUDA_VISIBLE_DEVICES names GPUs by UUID, which sysfs does not know: none is taken")
        if listed and _order_in_doubt(environ, everything):
            warnings.append(
                "the GPUs differ, so CUDA's ordinals may not be in PCI order: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
            )
    gpus, doubts = _place(listed, pci, hosts, memory_nodes, cpu_nodes)
    return gpus, warnings + doubts, frozenset(memory_nodes.values()) - set(cpu_nodes)


def _order_in_doubt(environ: Mapping[str, str], gpus: Sequence[_Listed]) -> bool:
    """CUDA puts the fastest GPU first unless told CUDA_DEVICE_ORDER=PCI_BUS_ID; NVML and sysfs list in PCI order."""
    by_ordinal = environ.get("CUDA_VISIBLE_DEVICES", "GPU-").strip()[:4] != "GPU-"
    mixed = len({gpu.name for gpu in gpus}) > 1
    return by_ordinal and mixed and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"


def _place(
    listed: Sequence[_Listed],
    pci: Sequence[PciGpu],
    hosts: Mapping[str, int | None] | None,
    memory_nodes: Mapping[str, int],
    cpu_nodes: Sequence[int],
) -> tuple[tuple[Gpu, ...], list[str]]:
    """Give each GPU its CPU node, telling who answered and who disagreed. ``hosts`` None: CUDA was not asked."""
    by_address = {gpu.bdf: gpu for gpu in pci}
    gpus, warnings = [], []
    for index, gpu in enumerate(listed):
        bdf = str(gpu.bdf)
        device = by_address.get(gpu.bdf)
        from_sysfs = device.numa_node if device is not None else None
        from_cuda = (hosts or {}).get(bdf)
        notes = []
        node: int | None
        if from_sysfs is not None:
            node, source = from_sysfs, "sysfs"
            if from_cuda is not None and from_cuda != from_sysfs:
                notes.append(f"sysfs says node {from_sysfs}, CUDA says node {from_cuda}")
                warnings.append(f"GPU {bdf}: sysfs says node {from_sysfs}, CUDA says node {from_cuda}; sysfs is used")
        else:
            notes.append("sysfs says -1" if device is not None else "not in sysfs")
            if from_cuda is not None:
                node, source = from_cuda, "cuda"
            elif len(cpu_nodes) == 1:
                node, source = cpu_nodes[0], "only-node"
            else:
                node, source = None, "none"
                asked = "CUDA does not know" if hosts is not None else "CUDA was not asked"
                warnings.append(f"GPU {bdf}: no CPU node is known ({notes[0]}, {asked})")
        own = memory_nodes.get(bdf)
        if own is not None:
            notes.append(f"its own memory is node {own}")
        gpus.append(Gpu(index, gpu.uuid, gpu.name, bdf, node, source, "; ".join(notes)))
    return tuple(gpus), warnings
