"""``python -m egmctl.memory.probe KIND NODE``: one granule through its whole life, and one line of JSON about it.

It runs in a child of `egmctl.memory.preflight.probe`, because it may not survive.
"""

from __future__ import annotations

import json
import sys
from typing import Any

__all__ = ["main"]

_OUTCOMES = {-1: "no-driver", 2: "out-of-memory", 100: "no-driver", 101: "not-supported", 800: "not-permitted"}
_OUTCOMES[801] = "not-supported"


def attempt(kind: str, node: int) -> dict[str, Any]:
    """The result's fields, see `egmctl.memory.preflight.ProbeResult`."""
    from egmctl.errors import EgmError
    from egmctl.memory.base import ChunkSpec
    from egmctl.memory.cuda import CudaProvider

    result: dict[str, Any] = {"kind": kind, "numa_node": node}
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
