"""Whether this machine can give memory of a CUDA kind: attributes by number, then one real granule in a child.

The child exists because some drivers end the process (not the call) when asked for memory on a node without CPUs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from egmctl.errors import PreflightError
from egmctl.memory.base import MemoryKind
from egmctl.memory.driver import Attribute, Driver
from egmctl.steps import step

__all__ = ["Outcome", "ProbeResult", "REQUIRED", "attribute_problems", "check_cuda", "imex_remedy", "probe"]

Outcome = Literal["ok", "not-permitted", "not-supported", "out-of-memory", "no-driver", "failed", "crashed", "timeout"]

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

PROBE_SECONDS = 60.0
_CHANNELS = Path("/dev/nvidia-caps-imex-channels")


@dataclass(frozen=True)
class ProbeResult:
    """How one granule fared on one node: created, mapped, touched by the CPU, exported, released."""

    kind: str
    numa_node: int
    outcome: Outcome
    detail: str = ""
    call: str = ""
    name: str = ""
    number: int | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"


def attribute_problems(driver: Driver, kind: str, devices: Sequence[int]) -> list[str]:
    """What the GPUs' attributes rule out, one sentence each; nothing when all is well or unknown."""
    problems = []
    for device in devices:
        for attribute in REQUIRED[kind]:
            if driver.attribute(device, attribute) == 0:
                problems.append(f"GPU {device}: attribute {attribute.value} ({attribute.name}) is 0")
    return problems


def imex_remedy() -> str:
    """How this process gets an IMEX channel, with this machine's own device number."""
    try:
        names = sorted(path.name for path in _CHANNELS.iterdir())
    except OSError:
        names = []
    usable = [name for name in names if os.access(_CHANNELS / name, os.R_OK | os.W_OK)]
    if usable:
        return f"{_CHANNELS / usable[0]} can be opened; check the domain: systemctl status nvidia-imex, nvidia-smi -q"
    if names:
        return f"this user may not open {_CHANNELS / names[0]}: grant it, or pass the device into the container"
    major = "MAJOR"
    try:
        for line in Path("/proc/devices").read_text(encoding="ascii", errors="replace").splitlines():
            if line.split()[1:] == ["nvidia-caps-imex-channels"]:
                major = line.split()[0]
    except OSError:
        pass
    return (
        f"there is no IMEX channel file: mkdir -p {_CHANNELS} && mknod {_CHANNELS}/channel0 c {major} 0, and for good:"
        f" options nvidia NVreg_CreateImexChannel0=1 in /etc/modprobe.d"
    )


def probe(kind: MemoryKind, numa_node: int, *, timeout: float = PROBE_SECONDS) -> ProbeResult:
    """Try one granule in a child process; whatever becomes of the child is the result."""
    command = [sys.executable, "-m", "egmctl.memory.probe", kind, str(numa_node)]
    began = time.monotonic()
    try:
        with step("memory.probe.run", numa_node=numa_node):
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False, close_fds=True
            )
    except subprocess.TimeoutExpired:
        return ProbeResult(kind, numa_node, "timeout", f"no answer within {timeout:g} s", seconds=timeout)
    except OSError as error:
        return ProbeResult(kind, numa_node, "failed", f"the probe could not be started: {error.strerror}")
    seconds = time.monotonic() - began
    if done.returncode < 0:
        number = -done.returncode
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        return ProbeResult(kind, numa_node, "crashed", f"the driver ended the process: {name}", seconds=seconds)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
        return ProbeResult(**{**answer, "seconds": seconds})
    except (ValueError, TypeError):
        tail = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        text = f"the probe exited with {done.returncode}: {''.join(tail)[:200]}"
        return ProbeResult(kind, numa_node, "failed", text, seconds=seconds)


def check_cuda(driver: Driver, kind: MemoryKind, devices: Sequence[int], nodes: Sequence[int]) -> None:
    """Raise `PreflightError` with everything that stands in the way; ``facts`` hold the same as data."""
    problems = attribute_problems(driver, kind, devices)
    results = [probe(kind, node) for node in nodes]
    hints = []
    for result in results:
        if not result.ok:
            problems.append(f"NUMA node {result.numa_node}: {result.detail} [{result.outcome}]")
    outcomes = {result.outcome for result in results}
    if kind == "cuda-fabric" and ("not-permitted" in outcomes or problems):
        hints.append(imex_remedy())
    if "crashed" in outcomes or "not-supported" in outcomes:
        hints.append("name only nodes with CPUs in egm_numa_nodes (`egmctl topology` shows each node's role)")
    if "out-of-memory" in outcomes:
        hints.append("free memory on the node")
    if kind == "cuda-fabric" and problems:
        hints.append('or use memory = "cuda-posix" on this host')
    if not problems:
        return
    raise PreflightError(
        "; ".join(problems),
        where=f"memory kind {kind}",
        hint="; ".join(hints) or f"see `egmctl doctor --for {kind}`",
        facts={
            "attributes": {
                str(device): {str(a.value): driver.attribute(device, a) for a in REQUIRED[kind]} for device in devices
            },
            "probes": [asdict(result) for result in results],
        },
    )
