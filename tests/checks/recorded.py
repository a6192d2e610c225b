"""NVML as recorded in JSON: a seam for other processes (``EGMCTL_SEAMS=tests.checks.recorded:install``)."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from egmctl.topology.nvml import FabricInfo, NvmlGpu, install_nvml

__all__ = ["RecordedNvml", "install"]

VARIABLE = "EGMCTL_TEST_NVML"


@dataclass
class RecordedNvml:
    """GPUs and the fabric information of each, by index."""

    listed: tuple[NvmlGpu, ...]
    fabrics: tuple[FabricInfo | None, ...]

    def driver_version(self) -> str | None:
        return "580.95"

    def gpus(self) -> tuple[NvmlGpu, ...]:
        return self.listed

    def fabric(self, index: int) -> FabricInfo | None:
        return self.fabrics[index]

    def to_env(self) -> dict[str, str]:
        document = [[asdict(gpu) for gpu in self.listed], [info and asdict(info) for info in self.fabrics]]
        return {VARIABLE: json.dumps(document)}


def install() -> None:
    listed, fabrics = json.loads(os.environ[VARIABLE])
    nvml = RecordedNvml(
        tuple(NvmlGpu(**gpu) for gpu in listed), tuple(None if info is None else FabricInfo(**info) for info in fabrics)
    )
    install_nvml(lambda: nvml)
