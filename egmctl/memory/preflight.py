"""What a CUDA memory kind needs of every GPU; `egmctl.checks` asks for it, and tries one real granule on each node."""

from __future__ import annotations

from egmctl.memory.driver import Attribute
from egmctl.memory.probe import Outcome, ProbeResult, probe

__all__ = ["REQUIRED", "Outcome", "ProbeResult", "probe"]

REQUIRED: dict[str, tuple[Attribute, ...]] = {
    "cuda-posix": (
        Attribute.VIRTUAL_MEMORY_MANAGEMENT,
        Attribute.HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT,
        Attribute.HANDLE_TYPE_POSIX_FD,
    ),
    "cuda-fabric": (
        Attribute.VIRTUAL_MEMORY_MANAGEMENT,
        Attribute.HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT,
        Attribute.HANDLE_TYPE_FABRIC,
        Attribute.HOST_NUMA_MULTINODE_IPC,
    ),
}
"""What each kind needs of every GPU. 0 is no; an attribute that the driver does not know is unknown, not no."""
