"""When the ledger cannot be written any more: what is owned goes into a file and onto the terminal."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from egmctl.ledger import PoolRecord

__all__ = ["rescue", "rescue_path"]


def rescue_path(runtime: Path, pool: str) -> Path:
    return runtime / f"{pool}.rescue.json"


def rescue(runtime: Path, record: PoolRecord | None, extra: dict[str, Any]) -> Path | None:
    """Write what is known; the path, or None when not even that could be written. Shouts on stderr in both cases."""
    document: dict[str, Any] = {"schema": "egmctl/rescue/1", "at": time.time(), "pid": os.getpid(), **extra}
    name = str(extra.get("pool", "pool"))
    if record is not None:
        document |= {
            "state": record.state,
            "endpoint": record.endpoint,
            "socket": record.socket,
            "client": list(record.client),
            "chunks": [[c.index, c.numa_node, c.nbytes, c.address, c.state] for c in record.live_chunks],
            "segments": [
                {"id": f"{s.id[0]}-{s.id[1]}", "chunk": s.chunk, "master": s.master, "name": s.name, "state": s.state}
                for s in record.live_segments
            ],
            "resources": [[r.kind, r.name] for r in record.resources if r.state in ("intended", "present")],
        }
    text = json.dumps(document)
    path: Path | None = rescue_path(runtime, name)
    try:
        fd = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, 0o600)
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path = None
    print(f"egmctl: THE LEDGER OF POOL {name} CANNOT BE WRITTEN. What it owns: {text}", file=sys.stderr, flush=True)
    return path
