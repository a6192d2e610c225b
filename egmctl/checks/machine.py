"""What a machine must have for each memory kind, as checks that ``doctor`` and the preflight of ``provision`` share.

`Machine` gathers facts when a check first asks for them, so that a check of shared memory never loads CUDA.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from egmctl.checks.base import Check, CheckResult
from egmctl.errors import EgmError
from egmctl.memory.base import ChunkSpec, MemoryKind
from egmctl.memory.driver import Attribute, CudaError, Driver, get_driver
from egmctl.units import format_size

if TYPE_CHECKING:
    from egmctl.memory.preflight import ProbeResult
    from egmctl.paths import Paths
    from egmctl.topology import Topology

__all__ = ["KINDS", "Machine", "checks_for"]

KINDS: tuple[MemoryKind, ...] = ("cuda-fabric", "cuda-posix", "shm")
_CUDA: tuple[MemoryKind, ...] = ("cuda-fabric", "cuda-posix")
# NFS, SMB and their like: their locks and syncs are not those of this host. From statfs(2).
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "beegfs", "afs")


class Machine:
    """The facts of this machine for one memory kind; ``nodes`` restricts them to the NUMA nodes of a plan."""

    def __init__(
        self, kind: MemoryKind, *, topology: Topology, paths: Paths | None = None, nodes: Sequence[int] | None = None
    ) -> None:
        self.kind = kind
        self.topology = topology
        self.paths = paths
        self._nodes = nodes

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        return tuple(node.id for node in self.topology.eligible()) if self._nodes is None else tuple(self._nodes)

    @cached_property
    def driver(self) -> Driver | CudaError:
        """The driver, or why there is none."""
        try:
            return get_driver()
        except CudaError as error:
            return error

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Ordinals of the GPUs CUDA shows to this process."""
        if isinstance(self.driver, CudaError):
            return ()
        try:
            return tuple(range(self.driver.device_count()))
        except CudaError:
            return ()

    @cached_property
    def probes(self) -> tuple[ProbeResult, ...]:
        """One real granule on each node, each in a child process."""
        from egmctl.memory.preflight import probe

        return tuple(probe(self.kind, node) for node in self.nodes)


class StateFolder:
    """The ledger's folder can be written and is on this host's own disk."""

    id: ClassVar[str] = "state-folder"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        if facts.paths is None:
            yield CheckResult(self.id, "skip", "no state folder was asked about")
            return
        folder = facts.paths.state
        existing = folder
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if not os.access(existing, os.W_OK | os.X_OK):
            yield CheckResult(
                self.id,
                "fail",
                f"{existing} cannot be written by uid {os.geteuid()}",
                "a folder for the ledger that this user can write",
                "give another with --state-dir",
            )
            return
        kind = _file_system(str(existing))
        if kind in _NETWORK_FILE_SYSTEMS:
            yield CheckResult(
                self.id,
                "warn",
                f"{folder} is on {kind}",
                "a local file system",
                "a ledger belongs to one host: give a local folder with --state-dir",
            )
            return
        yield CheckResult(self.id, "pass", f"{folder} ({kind or 'file system unknown'})")


def _file_system(path: str) -> str:
    best, kind = "", ""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                fields = line.split()
                point = fields[1].replace("\\040", " ")
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):
                    best, kind = point, fields[2]
    except (OSError, IndexError):
        return ""
    return kind


class NumaNodes:
    """At least one node a pool can use."""

    id: ClassVar[str] = "numa-nodes"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        eligible = {node.id: node for node in facts.topology.eligible()}
        roles = ", ".join(f"{node.id} {node.role}" for node in facts.topology.nodes)
        missing = [node for node in facts.nodes if node not in eligible]
        if missing or not eligible:
            yield CheckResult(
                self.id,
                "fail",
                f"nodes by role: {roles or 'none'}",
                f"nodes {missing} usable" if missing else "one node with CPUs and memory that the cpuset allows",
                "see `egmctl topology`; a container's cpuset may hide nodes",
            )
            return
        free = ", ".join(f"node {n}: {format_size(eligible[n].memory_free)} free" for n in facts.nodes)
        yield CheckResult(self.id, "pass", f"{free} ({roles})")


class ShmGranule:
    """A small chunk of shared memory is really created, bound and checked on every node."""

    id: ClassVar[str] = "shm-chunk"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        from egmctl.memory import provider_memory

        for node in facts.nodes:
            where = f"{self.id}/node{node}"
            memory = provider_memory("shm", total_bytes=2 << 20)
            try:
                chunk = memory.create(ChunkSpec(0, node, 2 << 20), lambda _: None)
                memory.release(chunk)
            except EgmError as error:
                yield CheckResult(where, "fail", str(error), "a bound, sealed memfd of 2 MiB", error.hint)
                continue
            finally:
                memory.close()
            warnings = getattr(memory, "warnings", ())
            if warnings:
                yield CheckResult(where, "warn", "; ".join(warnings), "memory bound to its node")
            else:
                yield CheckResult(where, "pass", "2 MiB created, bound, placed on the node and released")


class CudaDriverPresent:
    """There is a driver and it shows GPUs."""

    id: ClassVar[str] = "cuda-driver"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        if isinstance(facts.driver, CudaError):
            yield CheckResult(
                self.id,
                "fail",
                str(facts.driver),
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
            'use memory = "cuda-posix" on this host'
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
                _granule_hint(facts, result.outcome),
            )


def _granule_hint(facts: Machine, outcome: str) -> str:
    if outcome == "not-permitted" and facts.kind == "cuda-fabric":
        return _imex_hint()
    if outcome in ("crashed", "not-supported"):
        return "name only nodes with CPUs in egm_numa_nodes (`egmctl topology` shows each node's role)"
    if outcome == "out-of-memory":
        return "free memory on the node, or raise the cgroup's limit"
    if outcome == "timeout":
        return "the driver hangs: look at dmesg for Xid lines and at nvidia-smi"
    return "look at dmesg for what the driver says"


def _imex_hint() -> str:
    from egmctl.topology.fabric import read_imex_channels

    return read_imex_channels().remedy() or (
        "the channel file is there: check the domain (systemctl status nvidia-imex; nvidia-smi -q, Fabric)"
    )


class ImexChannelFile:
    """An IMEX channel that this process can open: without one, fabric handles are not permitted."""

    id: ClassVar[str] = "imex-channel"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        from egmctl.topology.fabric import read_imex_channels

        channels = read_imex_channels()
        yield CheckResult(
            self.id,
            "pass" if channels.usable else "fail",
            channels.observed(),
            "an IMEX channel file that this process can open",
            channels.remedy(),
        )


class FabricHealth:
    """State, status, cluster UUID, clique and health of every GPU, and that they agree."""

    id: ClassVar[str] = "nvlink-fabric"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        from egmctl.topology.fabric import judge_fabric
        from egmctl.topology.nvml import get_nvml, why_no_nvml

        nvml = get_nvml()
        if nvml is None:
            yield CheckResult(self.id, "unknown", why_no_nvml(), "NVML", "pip install 'egmctl[cuda]' on a GPU host")
            return
        visible = {gpu.uuid for gpu in facts.topology.gpus}
        gpus = [gpu for gpu in nvml.gpus() if not visible or gpu.uuid in visible]
        verdict = judge_fabric([(gpu.bdf, nvml.fabric(gpu.index)) for gpu in gpus])
        for finding in verdict.findings:
            where = f"{self.id}/{finding.gpu}" if finding.gpu else self.id
            yield CheckResult(where, finding.status, finding.observed, finding.expected, finding.hint)
        if verdict.status == "pass" and verdict.domain is not None:
            cluster, clique = verdict.domain
            yield CheckResult(self.id, "pass", f"cluster {cluster}, clique {clique}, {len(gpus)} GPU(s) agree")


class ImexService:
    """The IMEX daemon's own word, asked with a time limit: a hang is itself the finding."""

    id: ClassVar[str] = "imex-service"
    seconds = 10.0

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        program = shutil.which("nvidia-imex-ctl")
        if program is None:
            yield CheckResult(self.id, "skip", "nvidia-imex-ctl is not installed here")
            return
        try:
            done = subprocess.run(
                [program, "-q"], stdin=subprocess.DEVNULL, capture_output=True, timeout=self.seconds, check=False
            )
        except subprocess.TimeoutExpired:
            yield CheckResult(
                self.id,
                "fail",
                f"nvidia-imex-ctl -q gave no answer within {self.seconds:g} s",
                "READY",
                "the daemon hangs: systemctl restart nvidia-imex, and look at its log",
            )
            return
        except OSError as error:
            yield CheckResult(self.id, "unknown", f"nvidia-imex-ctl cannot be run: {error.strerror}", "READY")
            return
        told = done.stdout.decode("utf-8", "replace").strip()[:200] or f"exit {done.returncode}"
        good = done.returncode == 0 and told.upper().startswith("READY")
        yield CheckResult(
            self.id, "pass" if good else "fail", told, "READY", "" if good else "systemctl status nvidia-imex"
        )


class FabricPeer:
    """What cannot be seen from one machine alone."""

    id: ClassVar[str] = "fabric-peer"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        yield CheckResult(
            self.id,
            "skip",
            "local only: importing one's own handle needs no working domain",
            "another node imports a chunk",
            "run `egmctl verify POOL` from another node of the domain",
        )


class GpuNodes:
    """Every visible GPU's CPU NUMA node is known."""

    id: ClassVar[str] = "gpu-numa"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        gpus = facts.topology.gpus
        if not gpus:
            yield CheckResult(self.id, "skip", "no GPU is visible")
            return
        lost = [gpu for gpu in gpus if gpu.numa_node is None]
        told = ", ".join(f"{gpu.bdf} on node {gpu.numa_node} ({gpu.source})" for gpu in gpus if gpu not in lost)
        if lost:
            several = len(facts.topology.eligible()) > 1
            yield CheckResult(
                self.id,
                "fail" if several else "warn",
                "no source says the node of " + ", ".join(gpu.bdf for gpu in lost),
                "a CPU NUMA node for every GPU",
                'give the nodes yourself: egm_numa_nodes = "0,1"',
            )
        notes = "; ".join(gpu.note for gpu in gpus if gpu.note)
        if told:
            yield CheckResult(self.id, "warn" if notes else "pass", f"{told}{f' ({notes})' if notes else ''}")


class TransferEngine:
    """Stock clients of the tcp kinds are served by the Transfer Engine of a Mooncake wheel."""

    id: ClassVar[str] = "transfer-engine"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        from egmctl.mooncake.wheel import wheel_info

        info = wheel_info()
        if info.importable:
            yield CheckResult(
                self.id,
                "pass",
                f"{info.distribution} {info.version}; it listens on all interfaces, whatever it is told",
            )
            return
        yield CheckResult(
            self.id,
            "warn",
            info.error,
            "a Mooncake wheel that can be imported; provision works without, mount over tcp does not",
            info.hint,
        )


class NvlinkWheel:
    """Whether the wheel installed here could be a stock nvlink consumer; the provider needs none."""

    id: ClassVar[str] = "stock-nvlink"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        from egmctl.mooncake.wheel import wheel_info

        info = wheel_info()
        if info.distribution is None:
            yield CheckResult(self.id, "skip", "no Mooncake wheel here; publishing over nvlink needs none")
            return
        if info.has_nvlink:
            yield CheckResult(self.id, "pass", f"{info.distribution} {info.version} has the nvlink transport")
            return
        yield CheckResult(
            self.id,
            "warn",
            f"{info.distribution} {info.version} has no nvlink transport (SUPPORT_MNNVL)",
            "a build with it, for stock consumers on this host",
            "arm64 CUDA wheels have it; on x86-64 build Mooncake with USE_MNNVL",
        )


class MooncakeEnvironment:
    """Mooncake tests these variables by presence: ``=0`` still sets them."""

    id: ClassVar[str] = "mooncake-environment"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        if "MC_USE_NVLINK_IPC" in os.environ:
            yield CheckResult(
                self.id,
                "warn",
                "MC_USE_NVLINK_IPC is set, which turns fabric memory off in stock Mooncake, whatever its value",
                "MC_USE_NVLINK_IPC not set",
                "unset MC_USE_NVLINK_IPC",
            )
            return
        yield CheckResult(self.id, "pass", "no variable that turns fabric memory off is set")


_COMMON: tuple[Check[Machine], ...] = (StateFolder(), NumaNodes())
_BY_KIND: dict[MemoryKind, tuple[Check[Machine], ...]] = {
    "shm": (ShmGranule(), TransferEngine()),
    "cuda-posix": (CudaDriverPresent(), GpuNodes(), CudaAttributes(), CudaGranule(), TransferEngine()),
    "cuda-fabric": (
        CudaDriverPresent(),
        GpuNodes(),
        CudaAttributes(),
        ImexChannelFile(),
        FabricHealth(),
        CudaGranule(),
        ImexService(),
        MooncakeEnvironment(),
        NvlinkWheel(),
        FabricPeer(),
    ),
}


def checks_for(kind: MemoryKind) -> tuple[Check[Machine], ...]:
    """The checks that matter to one memory kind, in the order in which a person would mend things."""
    return _COMMON + _BY_KIND[kind]
