"""Whether the GPUs of this host stand in a healthy NVLink domain, and whether fabric handles may be made at all.

Pure judgement of what `egmctl.topology.nvml` and two files say; the rules are those of the field: every GPU must be
completed and successful, in one cluster and clique, with a cluster UUID that is not zero (zeros compare equal, so two
machines without a domain would look like one), and not unhealthy.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from egmctl.topology.lists import read_text
from egmctl.topology.nvml import FabricInfo

__all__ = [
    "FabricVerdict",
    "Finding",
    "ImexChannel",
    "ImexChannels",
    "install_imex_channels",
    "judge_fabric",
    "read_imex_channels",
]

NO_CLUSTER = "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True)
class Finding:
    """One thing wrong or in doubt: ``status`` is ``fail``, ``warn`` or ``unknown``; ``gpu`` its BDF, "" for all."""

    status: Literal["fail", "warn", "unknown"]
    gpu: str
    observed: str
    expected: str
    hint: str


@dataclass(frozen=True)
class FabricVerdict:
    """``status`` is ``pass``, ``warn``, ``fail`` or ``unknown``; ``domain`` the (cluster UUID, clique) all agree on."""

    status: str
    domain: tuple[str, int] | None
    findings: tuple[Finding, ...]


def judge_fabric(gpus: Sequence[tuple[str, FabricInfo | None]]) -> FabricVerdict:
    """Judge (BDF, fabric information) of every visible GPU."""
    findings: list[Finding] = []
    for bdf, info in gpus:
        findings.extend(_judge_one(bdf, info))
    domains = {(info.cluster_uuid, info.clique_id) for _, info in gpus if info is not None}
    if len(domains) > 1:
        told = ", ".join(
            f"{bdf} in {info.cluster_uuid} clique {info.clique_id}" for bdf, info in gpus if info is not None
        )
        findings.append(
            Finding(
                "fail",
                "",
                told,
                "the same cluster UUID and clique on all GPUs",
                "use only the GPUs of one clique (CUDA_VISIBLE_DEVICES), or have the partition repaired",
            )
        )
    if not gpus:
        findings.append(Finding("unknown", "", "no GPU", "at least one GPU", "run this where the GPUs are"))
    found = {finding.status for finding in findings}
    status = next((word for word in ("fail", "unknown", "warn") if word in found), "pass")
    domain = next(iter(domains)) if len(domains) == 1 else None
    return FabricVerdict(status, None if domain is None or domain[0] == NO_CLUSTER else domain, tuple(findings))


def _judge_one(bdf: str, info: FabricInfo | None) -> list[Finding]:
    if info is None:
        return [
            Finding(
                "unknown",
                bdf,
                "NVML gives no fabric information",
                "state completed",
                "this GPU is not part of an NVLink fabric, or the driver is too old to say; update the driver",
            )
        ]
    findings = []
    if info.state != "completed":
        hint = "wait for the fabric manager to finish and look again"
        if info.state == "not started":
            hint = "start the fabric manager (systemctl status nvidia-fabricmanager, or NMX-C on an NVL72)"
        findings.append(Finding("fail", bdf, f"fabric state {info.state}", "state completed", hint))
    if info.status != 0:
        findings.append(
            Finding(
                "fail",
                bdf,
                f"fabric status {info.status_name} (NVML {info.status})",
                "status success (0)",
                "look at the fabric manager's log and at `nvidia-smi -q` under Fabric; reset the GPU or have the "
                "partition repaired",
            )
        )
    if info.cluster_uuid == NO_CLUSTER:
        findings.append(
            Finding(
                "fail",
                bdf,
                f"cluster UUID {NO_CLUSTER}",
                "a cluster UUID that is not zero",
                'this GPU is in no multi-node NVLink domain: use memory = "cuda-posix" on this host, or have the '
                "domain configured (nvidia-imex and the fabric manager)",
            )
        )
    parts = ", ".join(f"{name}: {word}" for name, word in info.health_bits.items())
    if info.health is None:
        findings.append(
            Finding("warn", bdf, "fabric health not reported", "health healthy", "a newer driver reports it")
        )
    elif info.health != "healthy":
        findings.append(
            Finding(
                "fail" if info.health == "unhealthy" else "warn",
                bdf,
                f"fabric health {info.health}" + (f" ({parts})" if parts else ""),
                "health healthy",
                "look at `nvidia-smi -q` under Fabric and at the NVLink errors (nvidia-smi nvlink -e)",
            )
        )
    return findings


@dataclass(frozen=True)
class ImexChannel:
    """One channel file; ``problem`` is "" when this process can open it."""

    number: int
    path: str
    problem: str


@dataclass(frozen=True)
class ImexChannels:
    """The IMEX channel files of this host and the character device major they must have (None: driver lacks it)."""

    folder: str
    major: int | None
    channels: tuple[ImexChannel, ...]

    @property
    def usable(self) -> bool:
        return any(not channel.problem for channel in self.channels)

    def observed(self) -> str:
        """What there is, in one line."""
        if not self.channels:
            major = "no major in /proc/devices" if self.major is None else f"major {self.major}"
            return f"no IMEX channel file in {self.folder} ({major})"
        return "; ".join(f"{channel.path}: {channel.problem or 'can be opened'}" for channel in self.channels)

    def remedy(self) -> str:
        """The commands that make channel 0 and keep it over a reboot; "" when a channel is usable.

        The persistent form is the module parameter ``NVreg_CreateImexChannel0``. Running as root is no remedy: a file
        that does not exist helps nobody.
        """
        if self.usable:
            return ""
        if self.major is None:
            return (
                "this driver has no IMEX channels (nvidia-caps-imex-channels is not in /proc/devices): it needs an "
                "open-kernel driver with multi-node NVLink support, loaded on this host"
            )
        if self.channels:
            return (
                f"give this process access to {self.channels[0].path}: its owner and mode, or in a container "
                f"--device {self.channels[0].path} (Kubernetes: a ComputeDomain resource claim)"
            )
        return (
            f"mkdir -p {self.folder} && mknod -m 0666 {self.folder}/channel0 c {self.major} 0; to keep it: "
            "options nvidia NVreg_CreateImexChannel0=1 in /etc/modprobe.d/nvidia-imex.conf; in a container pass the "
            "file in"
        )


_CHANNELS = Path("/dev/nvidia-caps-imex-channels")
_stand_in: Callable[[], ImexChannels] | None = None


def install_imex_channels(factory: Callable[[], ImexChannels] | None) -> None:
    """Put other channel files in the place of this machine's, for tests (see `egmctl.seams`); None restores them."""
    global _stand_in
    _stand_in = factory


def read_imex_channels(folder: Path = _CHANNELS, proc: Path = Path("/proc")) -> ImexChannels:
    """List the channel files, trying to open each (what a device cgroup forbids shows only then)."""
    if _stand_in is not None and folder == _CHANNELS:
        return _stand_in()
    major = None
    for line in (read_text(proc / "devices") or "").splitlines():
        words = line.split()
        if len(words) == 2 and words[1] == "nvidia-caps-imex-channels" and words[0].isdecimal():
            major = int(words[0])
    channels = []
    try:
        names = os.listdir(folder)
    except OSError:
        names = []
    for name in names[:4096]:
        match = re.fullmatch(r"channel([0-9]{1,5})", name, re.ASCII)
        if match is not None:
            channels.append(ImexChannel(int(match[1]), str(folder / name), _try_to_open(folder / name, major)))
    return ImexChannels(str(folder), major, tuple(sorted(channels, key=lambda channel: channel.number)))


def _try_to_open(path: Path, major: int | None) -> str:
    try:
        found = os.major(path.stat().st_rdev)
        if major is not None and found != major:
            return f"has major {found}, not {major}: made for another boot; make it anew"
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return f"cannot be opened: {error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)})"
    return ""
