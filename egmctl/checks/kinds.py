"""Which checks matter to which memory kind."""

from __future__ import annotations

from egmctl.checks.base import Check
from egmctl.checks.fabric import (
    FabricHealth,
    FabricPeer,
    ImexChannelFile,
    ImexService,
    MooncakeEnvironment,
    NvlinkWheel,
)
from egmctl.checks.gpus import CudaAttributes, CudaDriverPresent, CudaGranule, GpuNodes
from egmctl.checks.host import NumaNodes, ShmGranule, StateFolder, TransferEngine
from egmctl.checks.machine import Machine
from egmctl.memory.base import MemoryKind

__all__ = ["checks_for", "preflight_checks_for"]

_COMMON: tuple[Check[Machine], ...] = (StateFolder(), NumaNodes())
_BY_KIND: dict[MemoryKind, tuple[Check[Machine], ...]] = {
    "shm": (),
    "cuda-posix": (CudaDriverPresent(), GpuNodes(), CudaAttributes(), CudaGranule()),
    "cuda-fabric": (
        CudaDriverPresent(),
        GpuNodes(),
        CudaAttributes(),
        ImexChannelFile(),
        FabricHealth(),
        CudaGranule(),
        ImexService(),
        MooncakeEnvironment(),
    ),
}
# What provisioning tries anyhow (shared memory fails at once and is undone) or does not need.
_DOCTOR_ONLY: dict[MemoryKind, tuple[Check[Machine], ...]] = {
    "shm": (ShmGranule(), TransferEngine()),
    "cuda-posix": (TransferEngine(),),
    "cuda-fabric": (NvlinkWheel(), FabricPeer()),
}


def checks_for(kind: MemoryKind) -> tuple[Check[Machine], ...]:
    """All that ``doctor`` looks at, in the order in which a person would mend things."""
    return preflight_checks_for(kind) + _DOCTOR_ONLY[kind]


def preflight_checks_for(kind: MemoryKind) -> tuple[Check[Machine], ...]:
    """What has to hold before ``provision`` allocates anything."""
    return _COMMON + _BY_KIND[kind]
