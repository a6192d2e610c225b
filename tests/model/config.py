"""How the model of the driver is to behave: in code, or as JSON in ``EGMCTL_MODEL``.

``EGMCTL_MODEL_DIR`` is the folder that stands for the machine's memory: processes with the same one import each
other's handles.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

__all__ = ["Config", "Device", "Fault"]

GRANULARITY = 2 << 20

# What two H200 said, with a fabric that works: CUdevice_attribute numbers and values.
ATTRIBUTES = {16: 132, 33: 1, 34: 0, 50: 0, 102: 1, 103: 1, 110: 1, 128: 1, 130: 0, 131: -1, 134: 0, 141: 1, 143: 1}


@dataclass(frozen=True)
class Device:
    """One GPU: its NUMA node is what HOST_NUMA_ID (134) answers."""

    bdf: str
    numa_node: int = 0
    uuid: str = ""
    name: str = "NVIDIA Model"
    total_bytes: int = 1 << 30


@dataclass
class Fault:
    """The ``nth`` call (from 1) of a name, and ``times`` - 1 more, fail; nth 0: every call. ``program``: only in
    processes with this word in their command line."""

    call: str
    nth: int = 1
    times: int = 1
    name: str = "CUDA_ERROR_UNKNOWN"
    number: int = 999
    program: str = ""


@dataclass
class Config:
    """One machine. Node numbers that are not in ``nodes`` do not exist."""

    directory: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="egm-model-")))
    nodes: tuple[int, ...] = (0, 1)
    devices: tuple[Device, ...] = (Device("0000:01:00.0", 0), Device("0001:01:00.0", 1))
    attributes: dict[int, int | None] = field(default_factory=dict)
    granularity: int = GRANULARITY
    rdma: bool = False  # whether HOST_NUMA memory takes the GPU-direct-RDMA flag; two H200 refused it
    fabric: str = "ok"  # or "not-permitted", "not-supported"
    host: str = "host-a"  # fabric memory of another host is out of the CPU's reach
    refuse_nodes: dict[int, tuple[str, int]] = field(default_factory=dict)
    crash_nodes: tuple[int, ...] = ()
    hang_nodes: tuple[int, ...] = ()
    node_bytes: dict[int, int] = field(default_factory=dict)
    reuse_handles: bool = False  # fabric handles repeat after a restart, as after a driver reload
    driver_missing: bool = False
    faults: list[Fault] = field(default_factory=list)
    copy_delay: float = 0.0  # seconds that each queued copy takes before it happens
    log: Path | None = None  # one JSON line a call
    leaks: Path | None = None  # one JSON line a process, at its exit

    @classmethod
    def from_env(cls) -> Config:
        values: dict[str, Any] = json.loads(os.environ.get("EGMCTL_MODEL", "{}"))
        unknown = set(values) - {one.name for one in fields(cls)}
        if unknown:
            raise ValueError(f"EGMCTL_MODEL: unknown {sorted(unknown)}")
        if "directory" not in values and "EGMCTL_MODEL_DIR" in os.environ:
            values["directory"] = os.environ["EGMCTL_MODEL_DIR"]
        for name in ("directory", "log", "leaks"):
            if values.get(name):
                values[name] = Path(values[name])
        for name in ("nodes", "crash_nodes", "hang_nodes"):
            if name in values:
                values[name] = tuple(values[name])
        if "devices" in values:
            values["devices"] = tuple(Device(**one) for one in values["devices"])
        for name in ("attributes", "node_bytes", "refuse_nodes"):
            if name in values:
                values[name] = {int(key): value for key, value in values[name].items()}
        if "refuse_nodes" in values:
            values["refuse_nodes"] = {key: tuple(value) for key, value in values["refuse_nodes"].items()}
        values["faults"] = [Fault(**one) for one in values.get("faults", [])]
        return cls(**values)

    def to_env(self) -> dict[str, str]:
        """The environment with which another process gets the same machine."""
        values: dict[str, Any] = {
            "nodes": self.nodes,
            "devices": [vars(device) for device in self.devices],
            "attributes": self.attributes,
            "granularity": self.granularity,
            "rdma": self.rdma,
            "fabric": self.fabric,
            "host": self.host,
            "refuse_nodes": self.refuse_nodes,
            "crash_nodes": self.crash_nodes,
            "hang_nodes": self.hang_nodes,
            "node_bytes": self.node_bytes,
            "reuse_handles": self.reuse_handles,
            "driver_missing": self.driver_missing,
            "faults": [vars(fault) for fault in self.faults],
            "copy_delay": self.copy_delay,
            "log": str(self.log) if self.log else None,
            "leaks": str(self.leaks) if self.leaks else None,
        }
        return {
            "EGMCTL_MODEL": json.dumps(values),
            "EGMCTL_MODEL_DIR": str(self.directory),
            "EGMCTL_SEAMS": "tests.model.driver:install",
        }

    def attribute(self, device: int, number: int) -> int | None:
        if number in self.attributes:
            return self.attributes[number]
        if number == 134:
            return self.devices[device].numa_node
        return ATTRIBUTES.get(number)
