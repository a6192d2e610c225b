"""Machines on disk, and stand-ins for NVML and the CUDA driver at their seams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from egmctl.memory import driver
from egmctl.topology import nvml
from tests.fixtures import machines


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str], Path]:
    """``machine("laptop")`` is the folder that stands for that machine's /sys."""
    return lambda name: machines.lay_out(machines.describe(name), tmp_path / name)


@pytest.fixture
def _seams() -> Iterator[None]:
    yield
    nvml.install_nvml(None)
    driver.install_driver(None)


@dataclass
class FakeNvml:
    """NVML as recorded: GPUs, and fabric information by index."""

    listed: tuple[nvml.NvmlGpu, ...]
    fabrics: dict[int, nvml.FabricInfo]

    def driver_version(self) -> str | None:
        return "580.0"

    def gpus(self) -> tuple[nvml.NvmlGpu, ...]:
        return self.listed

    def fabric(self, index: int) -> nvml.FabricInfo | None:
        return self.fabrics.get(index)


@dataclass
class CudaDevice:
    uuid: str
    name: str
    bdf: str
    host_node: int | None
    memory_node: int | None = None


class FakeCuda:
    """The few driver calls that topology makes."""

    def __init__(self, devices: list[CudaDevice], error: driver.CudaError | None = None) -> None:
        self.devices = devices
        self.error = error

    def device_count(self) -> int:
        if self.error is not None:
            raise self.error
        return len(self.devices)

    def device_name(self, device: int) -> str:
        return self.devices[device].name

    def device_uuid(self, device: int) -> str:
        return self.devices[device].uuid

    def device_bdf(self, device: int) -> str:
        return self.devices[device].bdf

    def attribute(self, device: int, attribute: int) -> int | None:
        if attribute == driver.Attribute.HOST_NUMA_ID:
            return self.devices[device].host_node
        assert attribute == driver.Attribute.NUMA_ID
        return self.devices[device].memory_node


@pytest.fixture
def stand_in(_seams: None) -> Callable[..., None]:
    """Install what NVML lists (None: no NVML) and what CUDA answers (None: no driver)."""

    def install(listed: tuple[nvml.NvmlGpu, ...] | None, cuda: FakeCuda | None) -> None:
        nvml.install_nvml(lambda: None if listed is None else FakeNvml(listed, {}))
        absent = driver.CudaError("cuInit", "DRIVER_NOT_FOUND", -1)
        answer = cuda or FakeCuda([], absent)
        driver.install_driver(lambda: answer)  # type: ignore[arg-type,return-value]

    return install
