"""Machines that are not at hand, whole: their /sys, /proc and /dev, a model of their driver, and recorded NVML."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from egmctl.checks.base import Check, CheckResult, run_checks
from egmctl.checks.doctor import run_doctor
from egmctl.checks.kinds import checks_for
from egmctl.checks.machine import Machine
from egmctl.memory.base import MemoryKind
from egmctl.memory.driver import CudaError, install_driver
from egmctl.paths import Paths
from egmctl.topology import Topology, read_topology
from egmctl.topology.nvml import FabricInfo, NvmlGpu, install_nvml
from egmctl.topology.read import Roots
from tests.checks.recorded import RecordedNvml
from tests.fixtures import machines
from tests.model.config import Config, Device
from tests.model.driver import ModelDriver

ROOT = Path(__file__).resolve().parents[2]
HEALTHY = FabricInfo("completed", 0, "success", "01020304-0506-0708-090a-0b0c0d0e0f10", 3, "healthy", {})
ZERO = replace(HEALTHY, cluster_uuid="00000000-0000-0000-0000-000000000000", clique_id=0)
MAJOR = 511


@dataclass
class Host:
    """One machine. Change what lies in its folders, then ask."""

    topology: Topology
    roots: Roots
    paths: Paths
    config: Config

    @property
    def channels(self) -> Path:
        return self.roots.dev / "nvidia-caps-imex-channels"

    def machine(self, kind: MemoryKind, nodes: Sequence[int] | None = None, **environ: str) -> Machine:
        variables = {"PATH": str(self.roots.dev / "bin"), **environ}
        return Machine(kind, topology=self.topology, paths=self.paths, nodes=nodes, roots=self.roots, environ=variables)

    def check(
        self, kind: MemoryKind, *only: type[Check[Machine]], nodes: Sequence[int] | None = None, **environ: str
    ) -> dict[str, CheckResult]:
        """What each check of a kind (or ``only`` some) finds, by id."""
        chosen = [check for check in checks_for(kind) if not only or isinstance(check, only)]
        found = run_checks(chosen, self.machine(kind, nodes, **environ))
        assert len({result.id for result in found}) == len(found), "two findings of one id"
        return {result.id: result for result in found}

    def doctor(self, kind: str | None = None) -> dict[str, Any]:
        return run_doctor(kind, self.paths, topology=self.topology, roots=self.roots)


Build = Callable[..., Host]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """``build("gb200-tray")`` is that machine in good order.

    ``imex``: whether it has a channel file that opens; ``fabrics``: what NVML says of each GPU (None: no NVML);
    ``change`` edits the machine's description; ``driver`` False: no driver; the rest goes to the model's `Config`.
    """

    def make(
        name: str,
        *,
        imex: bool = True,
        fabrics: Sequence[FabricInfo | None] | None = (),
        change: Callable[[dict[str, Any]], object] = lambda _: None,
        driver: bool = True,
        product: str = "NVIDIA Model",
        **config: Any,
    ) -> Host:
        description = machines.describe(name)
        change(description)
        base = tmp_path / "machine"
        roots = Roots(machines.lay_out(description, base / "sys"), base / "proc", base / "dev")
        (roots.proc / "self").mkdir(parents=True)
        (roots.dev / "bin").mkdir(parents=True)
        (roots.dev / "nvidiactl").touch()
        (roots.proc / "meminfo").write_text("MemTotal: 900000000 kB\nMemAvailable:    800000000 kB\n")
        (roots.proc / "self/status").write_text("Name:\tx\nMems_allowed_list:\t0-33\n")
        (roots.proc / "self/mounts").write_text("/dev/vda1 / ext4 rw 0 0\n")
        major = 1 if imex else MAJOR  # /dev/null is the one character device that opens everywhere
        (roots.proc / "devices").write_text(f"Character devices:\n195 nvidia\n{major} nvidia-caps-imex-channels\n")
        if imex:
            channels = roots.dev / "nvidia-caps-imex-channels"
            channels.mkdir()
            (channels / "channel0").symlink_to("/dev/null")

        gpus = [each for each in description["pci"] if (each["vendor"], each["class"][:4]) == ("0x10de", "0x03")]
        nodes = [node["id"] for node in description["nodes"] if node["cpus"]]
        devices = tuple(Device(gpu["bdf"], max(gpu["numa_node"] or 0, 0), name=product) for gpu in gpus)
        options = {"nodes": tuple(nodes), "devices": devices, "directory": tmp_path / "memory", **config}
        model = Config(**options)
        for variable, value in model.to_env().items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        install_driver(_missing if not driver or not gpus else lambda: ModelDriver(model))
        if fabrics == ():
            fabrics = [HEALTHY] * len(gpus)
        if fabrics is None or not gpus:
            install_nvml(lambda: None)
        else:
            listed = ModelDriver(model)
            recorded = RecordedNvml(
                tuple(
                    NvmlGpu(index, listed.device_uuid(index), product, listed.device_bdf(index))
                    for index in range(len(devices))
                ),
                tuple(fabrics),
            )
            install_nvml(lambda: recorded)
        topology = read_topology(environ={}, roots=roots)
        return Host(topology, roots, Paths(tmp_path / "state", tmp_path / "run"), model)

    yield make
    install_driver(None)
    install_nvml(None)


def _missing() -> ModelDriver:
    raise CudaError("cuInit", "DRIVER_NOT_FOUND", -1, hint="install the NVIDIA driver")


def program(folder: Path, name: str, text: str) -> Path:
    """A real program for a PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    os.chmod(path, 0o755)
    return path
