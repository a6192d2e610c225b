"""The machines that copies are tested on: a model of the driver everywhere, and a real GPU where there is one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from egmctl.consumer.copy import CopyOptions, GpuCopier, GpuGatherer, Kernels, make_copier, make_gatherer
from egmctl.memory.driver import CudaError, Driver
from tests.model.driver import Config, ModelDriver
from tests.model.kernels import ModelKernels

ROOM = 1 << 20


@dataclass
class Machine:
    """A driver, its kernels, and pieces of memory that are filled and read through the driver alone."""

    driver: Driver
    kernels: Kernels
    cache: Path
    held: list[tuple[str, int]] = field(default_factory=list)

    def options(self, **changes: object) -> CopyOptions:
        return CopyOptions(cache=self.cache, **changes)  # type: ignore[arg-type]

    def copier(self, **changes: object) -> GpuCopier:
        return make_copier(self.driver, [0], self.options(**changes), kernels=self.kernels)

    def gatherer(self, **changes: object) -> GpuGatherer:
        return make_gatherer(self.driver, [0], self.options(**changes), kernels=self.kernels)

    def hbm(self, nbytes: int = ROOM) -> int:
        self.driver.use_device(0)
        address = self.driver.mem_alloc(nbytes)
        self.held.append(("hbm", address))
        return address

    def dram(self, nbytes: int = ROOM) -> int:
        self.driver.use_device(0)
        address = self.driver.host_alloc(nbytes)
        self.held.append(("dram", address))
        return address

    def write(self, address: int, data: bytes) -> None:
        self.driver.use_device(0)
        buffer = ctypes.create_string_buffer(data, len(data))
        self.driver.memcpy(address, ctypes.addressof(buffer), len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        self.driver.use_device(0)
        buffer = ctypes.create_string_buffer(nbytes)
        self.driver.memcpy(ctypes.addressof(buffer), address, nbytes)
        return buffer.raw

    def free(self) -> None:
        self.driver.use_device(0)
        for kind, address in self.held:
            (self.driver.mem_free if kind == "hbm" else self.driver.host_free)(address)
        self.held.clear()


@pytest.fixture(scope="module", params=["model", pytest.param("gpu", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("machine")
    if request.param == "gpu":
        try:
            from egmctl.memory.cuda_driver import CudaDriver

            driver: Driver = CudaDriver()
            driver.use_device(0)
        except CudaError as error:
            pytest.skip(f"no GPU here: {error}")
        from egmctl.consumer.copy.kernels import CudaKernels

        kernels: Kernels = CudaKernels(driver)
    else:
        model = ModelDriver(Config(directory=folder))
        driver, kernels = model, ModelKernels(model)
    machine = Machine(driver, kernels, folder / "copy.json")
    yield machine
    machine.free()


class ModelMachine(Machine):
    """The model alone, for what cannot be made to happen on a GPU."""

    driver: ModelDriver


@pytest.fixture
def model(tmp_path: Path) -> Iterator[ModelMachine]:
    driver = ModelDriver(Config(directory=tmp_path))
    machine = ModelMachine(driver, ModelKernels(driver), tmp_path / "copy.json")
    yield machine
    driver.config.faults.clear()
    driver._sticky = None
    machine.free()
