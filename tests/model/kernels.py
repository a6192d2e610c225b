"""The copy kernels on the model of the driver: the CPU does what they do, in the order of the model's streams."""

from __future__ import annotations

from collections.abc import Callable

from egmctl.consumer.copy.host_kernels import HostKernels
from egmctl.consumer.copy.jobs import install_kernels
from egmctl.memory.driver import Driver
from tests.model.driver import ILLEGAL_ADDRESS, ModelDriver, Refused

__all__ = ["ModelKernels", "install"]


class ModelKernels(HostKernels):
    """Touches only what the device may touch; anything else is an error that sticks, as on a GPU."""

    def __init__(self, driver: ModelDriver) -> None:
        super().__init__(self._find, self._later)
        self._driver = driver

    def _find(self, device: int, address: int, nbytes: int) -> int:
        return self._driver.host_pointer(address, nbytes)

    def _later(self, device: int, stream: int, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                self._driver.use_device(device)
                work()
            except Refused:
                self._driver._sticky = ILLEGAL_ADDRESS

        self._driver._stream(stream).put(run)


def _make(driver: Driver) -> ModelKernels:
    if not isinstance(driver, ModelDriver):
        raise TypeError(f"{type(driver).__name__} is not the model")
    return ModelKernels(driver)


def install() -> None:
    """The seam: ``EGMCTL_SEAMS=tests.model.driver:install,tests.model.kernels:install``."""
    install_kernels(_make)
