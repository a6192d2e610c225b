"""What cuda-fabric needs beyond a GPU: an IMEX channel, a healthy NVLink domain, and consumers that can use it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from typing import ClassVar

from egmctl.checks.base import CheckResult
from egmctl.checks.machine import Machine
from egmctl.programs import ask_program
from egmctl.steps import step

__all__ = ["FabricHealth", "FabricPeer", "ImexChannelFile", "ImexService", "MooncakeEnvironment", "NvlinkWheel"]


class ImexChannelFile:
    """An IMEX channel that this process can open: without one, fabric handles are not permitted."""

    id: ClassVar[str] = "imex-channel"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        channels = facts.imex_channels
        expected = "an IMEX channel file that this process can open"
        if channels.usable:
            yield CheckResult(self.id, "pass", channels.observed(), expected)
        elif facts.probes and all(probe.ok for probe in facts.probes):
            # The driver's own word goes before what is known of its files.
            observed = f"{channels.observed()}; yet the driver made and exported fabric memory"
            yield CheckResult(self.id, "warn", observed, expected)
        else:
            yield CheckResult(self.id, "fail", channels.observed(), expected, channels.remedy())


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
        # A topology read from sysfs alone knows no UUIDs.
        visible = {gpu.uuid or gpu.bdf for gpu in facts.topology.gpus}
        gpus = [gpu for gpu in nvml.gpus() if not visible or visible & {gpu.uuid, gpu.bdf}]
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
        program = shutil.which("nvidia-imex-ctl", path=facts.environ.get("PATH"))
        if program is None:
            yield CheckResult(self.id, "skip", "nvidia-imex-ctl is not installed here")
            return
        try:
            told, code = _ask([program, "-q"], self.seconds)
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
        good = code == 0 and told.upper().startswith("READY")
        told = f"nvidia-imex-ctl says {told!r}" if told else f"nvidia-imex-ctl says nothing and exits with {code}"
        yield CheckResult(
            self.id, "pass" if good else "fail", told, "READY", "" if good else "systemctl status nvidia-imex"
        )


def _ask(command: list[str], seconds: float) -> tuple[str, int]:
    """The first 200 characters of what a program says, and its exit status. Raises as `ask_program`."""
    with step("checks.imex.ask"):
        done = ask_program(command, seconds)
    return done.stdout.decode("utf-8", "replace").strip()[:200], done.returncode


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


class NvlinkWheel:
    """Whether the wheel installed here could be a stock nvlink consumer; the provider needs none."""

    id: ClassVar[str] = "stock-nvlink"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        from egmctl.mooncake.wheel import wheel_info

        info = wheel_info()
        if info.distribution is None:
            yield CheckResult(self.id, "skip", "no Mooncake wheel here; publishing over nvlink needs none")
            return
        name = f"{info.distribution} {info.version}"
        expected = "a build with the nvlink transport, for stock consumers on this host"
        if info.has_nvlink:
            yield CheckResult(self.id, "pass", f"{name} has the nvlink transport")
        elif info.has_nvlink is None:
            reason = info.error or "it does not say SUPPORT_MNNVL"
            yield CheckResult(self.id, "unknown", f"{name}: {reason}", expected, info.hint)
        else:
            yield CheckResult(
                self.id,
                "warn",
                f"{name} has no nvlink transport (SUPPORT_MNNVL)",
                expected,
                "arm64 CUDA wheels have it: pip install 'egmctl[mooncake-cuda13]' there; on x86-64 build Mooncake with "
                "USE_MNNVL",
            )


class MooncakeEnvironment:
    """Mooncake tests these variables by presence: ``=0`` still sets them."""

    id: ClassVar[str] = "mooncake-environment"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        if "MC_USE_NVLINK_IPC" in facts.environ:
            yield CheckResult(
                self.id,
                "warn",
                f"MC_USE_NVLINK_IPC={facts.environ['MC_USE_NVLINK_IPC']!r} is set, and stock Mooncake uses no fabric "
                "memory then, whatever the value",
                "MC_USE_NVLINK_IPC not set",
                "unset MC_USE_NVLINK_IPC",
            )
            return
        yield CheckResult(self.id, "pass", "no variable that turns fabric memory off is set")
