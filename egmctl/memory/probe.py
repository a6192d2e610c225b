"""One granule through its whole life, in a child process that may not survive: some drivers end the process (not the
call) when asked for memory on a node without CPUs.

The child is ``python -m egmctl.memory.probe KIND NODE``, which prints one line of JSON.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from egmctl.memory.base import MemoryKind
from egmctl.programs import ask_program
from egmctl.steps import step

__all__ = ["PROBE_SECONDS", "Outcome", "ProbeResult", "main", "probe"]

Outcome = Literal["ok", "not-permitted", "not-supported", "out-of-memory", "no-driver", "failed", "crashed", "timeout"]

PROBE_SECONDS = 60.0


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


def probe(kind: MemoryKind, numa_node: int, *, timeout: float = PROBE_SECONDS) -> ProbeResult:
    """Try one granule in a child process; whatever becomes of the child is the result."""
    command = [sys.executable, "-m", "egmctl.memory.probe", kind, str(numa_node)]
    began = time.monotonic()
    try:
        with step("memory.probe.run", numa_node=numa_node):
            done = ask_program(command, timeout)
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


# A granule on a node is well formed, so INVALID_VALUE (1) is the driver's no to the node.
_OUTCOMES: dict[int, Outcome] = {
    -1: "no-driver",
    1: "not-supported",
    2: "out-of-memory",
    100: "no-driver",
    101: "not-supported",
    800: "not-permitted",
    801: "not-supported",
}


def attempt(kind: str, node: int) -> dict[str, Any]:
    """The result's fields, see `egmctl.memory.preflight.ProbeResult`."""
    from egmctl.errors import EgmError
    from egmctl.memory.base import ChunkSpec
    from egmctl.memory.cuda import CudaProvider

    result: dict[str, Any] = {"kind": kind, "numa_node": node}
    memory: CudaProvider | None = None
    try:
        memory = CudaProvider(kind, 0)  # type: ignore[arg-type]
        spec = ChunkSpec(0, node, memory.granularity(node))
        chunk = memory.create(spec, lambda _: None)
        view = chunk.host_view()
        view[0] = view[-1] = 1
        view.release()
        memory.release(chunk)
        memory.close()
    except EgmError as error:
        if memory is not None:
            with suppress(EgmError):  # the first failure is the finding
                for left in memory.chunks():
                    memory.release(left)
                memory.close()
        number = error.facts.get("number")
        outcome = _OUTCOMES.get(number, "failed") if isinstance(number, int) else "failed"
        facts: dict[str, Any] = {key: error.facts[key] for key in ("call", "name", "number") if key in error.facts}
        return {**result, "outcome": outcome, "detail": error.message, **facts}
    return {**result, "outcome": "ok", "detail": f"one granule of {spec.nbytes} bytes"}


def main() -> int:
    from egmctl import seams

    seams.load()
    print(json.dumps(attempt(sys.argv[1], int(sys.argv[2]))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
