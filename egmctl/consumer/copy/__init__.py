"""Copies on GPUs: `make_copier` for fragments, `make_gatherer` for entries at offsets.

Importing this needs no GPU; using it does, except on a model of the driver (see `install_kernels`).
"""

from __future__ import annotations

from collections.abc import Sequence

from egmctl.consumer.copy.arrays import DeviceArray, as_numbers
from egmctl.consumer.copy.completion import Finished, Submitted
from egmctl.consumer.copy.copier import Calibration, Fragment, GpuCopier
from egmctl.consumer.copy.gather import GpuGatherer
from egmctl.consumer.copy.jobs import Kernels, LazyKernels, Range, install_kernels
from egmctl.consumer.copy.options import CopyOptions, OrderMode, Strategy
from egmctl.memory.driver import Driver

__all__ = [
    "Calibration",
    "CopyOptions",
    "DeviceArray",
    "Finished",
    "Fragment",
    "GpuCopier",
    "GpuGatherer",
    "Kernels",
    "OrderMode",
    "Range",
    "Strategy",
    "Submitted",
    "as_numbers",
    "install_kernels",
    "make_copier",
    "make_gatherer",
]


def make_copier(
    driver: Driver, devices: Sequence[int], options: CopyOptions | None = None, *, kernels: Kernels | None = None
) -> GpuCopier:
    """A copier for ``devices``; close it before their contexts go. ``kernels`` may be shared with a gatherer."""
    return GpuCopier(driver, devices, options or CopyOptions(), kernels or LazyKernels(driver))


def make_gatherer(
    driver: Driver, devices: Sequence[int], options: CopyOptions | None = None, *, kernels: Kernels | None = None
) -> GpuGatherer:
    """A gatherer for ``devices``; close it before their contexts go."""
    return GpuGatherer(driver, devices, options or CopyOptions(), kernels or LazyKernels(driver))
