"""The facts of a machine that checks look at, gathered when first asked for: shared memory alone never loads CUDA."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from egmctl.memory.base import MemoryKind
from egmctl.memory.driver import CudaError, Driver, get_driver
from egmctl.topology.read import Roots

if TYPE_CHECKING:
    from egmctl.memory.probe import ProbeResult
    from egmctl.paths import Paths
    from egmctl.topology import Topology
    from egmctl.topology.fabric import ImexChannels

__all__ = ["KINDS", "Machine"]

KINDS: tuple[MemoryKind, ...] = ("cuda-fabric", "cuda-posix", "shm")


class Machine:
    """The facts for one memory kind. ``nodes`` are the NUMA nodes of a plan (None: all that can hold pool memory);
    ``roots`` and ``environ`` are where the kernel's files and the variables are read."""

    probe_seconds = 60.0

    def __init__(
        self,
        kind: MemoryKind,
        *,
        topology: Topology,
        paths: Paths | None = None,
        nodes: Sequence[int] | None = None,
        roots: Roots | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.topology = topology
        self.paths = paths
        self.roots = roots or Roots()
        self.environ = os.environ if environ is None else environ
        self.planned = nodes is not None
        self._nodes = nodes

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        return tuple(node.id for node in self.topology.eligible()) if self._nodes is None else tuple(self._nodes)

    @cached_property
    def driver(self) -> Driver | CudaError:
        """The driver, or why there is none."""
        try:
            return get_driver()
        except CudaError as error:
            return error

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Ordinals of the GPUs CUDA shows to this process."""
        if isinstance(self.driver, CudaError):
            return ()
        try:
            return tuple(range(self.driver.device_count()))
        except CudaError:
            return ()

    @cached_property
    def probes(self) -> tuple[ProbeResult, ...]:
        """One real granule on each node, each in a child process; none where there is no GPU to try with."""
        from egmctl.memory.probe import probe

        if not self.devices:
            return ()
        return tuple(probe(self.kind, node, timeout=self.probe_seconds) for node in self.nodes)

    @cached_property
    def imex_channels(self) -> ImexChannels:
        from egmctl.topology.fabric import read_imex_channels

        return read_imex_channels(self.roots.dev / "nvidia-caps-imex-channels", self.roots.proc)
