"""What the CUDA kinds need: a driver, GPUs whose CPU node is known, their attributes, and one granule as a proof."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from egmctl.checks.base import CheckResult
from egmctl.checks.machine import Machine
from egmctl.memory.driver import Attribute, CudaError
from egmctl.memory.probe import ProbeResult

__all__ = ["CudaAttributes", "CudaDriverPresent", "CudaGranule", "GpuNodes"]

POSIX_INSTEAD = 'use memory = "cuda-posix" on this host'


class CudaDriverPresent:
    """There is a driver and it shows GPUs."""

    id: ClassVar[str] = "cuda-driver"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        if isinstance(facts.driver, CudaError):
            yield CheckResult(
                self.id,
                "fail",
                f"{facts.driver.message}{f' ({facts.driver.where})' if facts.driver.where else ''}",
                "a CUDA driver and the extra egmctl[cuda]",
                facts.driver.hint or "install the NVIDIA driver, and: pip install 'egmctl[cuda]'",
            )
            return
        try:
            version = facts.driver.version()
            count = facts.driver.device_count()
        except CudaError as error:
            yield CheckResult(self.id, "fail", str(error), "a working CUDA driver", error.hint)
            return
        observed = f"CUDA {version // 1000}.{version % 1000 // 10}, {count} GPU(s) visible"
        if count == 0:
            yield CheckResult(
                self.id, "fail", observed, "at least one visible GPU", "look at CUDA_VISIBLE_DEVICES and nvidia-smi"
            )
            return
        yield CheckResult(self.id, "pass", observed)


class GpuNodes:
    """Every visible GPU's CPU NUMA node is known, or a plan has chosen the nodes without asking."""

    id: ClassVar[str] = "gpu-numa"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        gpus = facts.topology.gpus
        if not gpus:
            yield CheckResult(self.id, "skip", "no GPU is visible")
            return
        lost = [gpu for gpu in gpus if gpu.numa_node is None]
        told = ", ".join(f"{gpu.bdf} on node {gpu.numa_node} ({gpu.source})" for gpu in gpus if gpu not in lost)
        if lost:
            nodes = [str(node.id) for node in facts.topology.eligible()]
            yield CheckResult(
                self.id,
                "fail" if len(nodes) > 1 and not facts.planned else "warn",
                "no source says the node of " + ", ".join(gpu.bdf for gpu in lost),
                "a CPU NUMA node for every GPU",
                f'give the nodes yourself: egm_numa_nodes = "{",".join(nodes)}"',
            )
        notes = "; ".join(gpu.note for gpu in gpus if gpu.note)
        if told:
            yield CheckResult(self.id, "warn" if notes else "pass", f"{told}{f' ({notes})' if notes else ''}")


class CudaAttributes:
    """What each GPU says it supports, by attribute number. An attribute unknown to the driver is unknown, not no."""

    id: ClassVar[str] = "cuda-attributes"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        from egmctl.memory.preflight import REQUIRED

        if isinstance(facts.driver, CudaError) or not facts.devices:
            yield CheckResult(self.id, "skip", "no GPU to ask")
            return
        for device in facts.devices:
            for attribute in REQUIRED[facts.kind]:
                where = f"{self.id}/gpu{device}/{attribute.value}"
                value = facts.driver.attribute(device, attribute)
                observed = f"attribute {attribute.value} ({attribute.name}) is {value}"
                if value is None:
                    told = f"this driver does not know attribute {attribute.value} ({attribute.name})"
                    yield CheckResult(where, "unknown", told, "1", "a newer driver can say; the granule decides")
                elif value == 0:
                    yield CheckResult(where, "fail", observed, "1", _attribute_hint(attribute))
                else:
                    yield CheckResult(where, "pass", observed)


def _attribute_hint(attribute: Attribute) -> str:
    if attribute is Attribute.HOST_NUMA_MULTINODE_IPC:
        return (
            "this platform cannot share host memory with other nodes over NVLink (GB200 and GB300 NVL72 can): "
            + POSIX_INSTEAD
        )
    return "this GPU or driver lacks it; a newer driver may have it"


class CudaGranule:
    """One real granule per node created, touched, exported and released, in a child process."""

    id: ClassVar[str] = "cuda-granule"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        if isinstance(facts.driver, CudaError) or not facts.devices:
            yield CheckResult(self.id, "skip", "no GPU to try it with")
            return
        for result in facts.probes:
            where = f"{self.id}/node{result.numa_node}"
            if result.ok:
                yield CheckResult(where, "pass", f"{result.detail} in {result.seconds:.2f} s")
                continue
            yield CheckResult(
                where,
                "fail",
                f"{result.detail} [{result.outcome}]",
                f"a {facts.kind} granule on NUMA node {result.numa_node}",
                _granule_hint(facts, result),
            )


def _granule_hint(facts: Machine, result: ProbeResult) -> str:
    outcome = result.outcome
    if outcome == "not-permitted" and facts.kind == "cuda-fabric":
        return facts.imex_channels.remedy() or (
            "the channel file is there: check the domain (systemctl status nvidia-imex; nvidia-smi -q, Fabric)"
        )
    if outcome == "not-permitted":
        return "the driver refuses this process: see what its container or security policy withholds"
    if outcome in ("crashed", "not-supported"):
        node = facts.topology.node(result.numa_node)
        if node is not None and node in facts.topology.eligible():
            instead = f", or {POSIX_INSTEAD}" if facts.kind == "cuda-fabric" else ""
            return f"this driver gives no {facts.kind} memory on a CPU node: update it{instead}"
        return "name only nodes with CPUs in egm_numa_nodes (`egmctl topology` shows each node's role)"
    if outcome == "out-of-memory":
        return "free memory on the node, or raise the cgroup's limit"
    if outcome == "timeout":
        return "the driver hangs: look at dmesg for Xid lines and at nvidia-smi"
    return "look at dmesg for what the driver says"
