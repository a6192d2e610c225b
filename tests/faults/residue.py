"""What of a pool that is said to be gone can still be found: at the Master, at the metadata server, on this host."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

from egmctl.ledger import holder_of
from egmctl.mooncake.metadata import MetadataClient
from tests.faults.world import POOL, Run

__all__ = ["residue"]


def residue(run: Run) -> list[str]:
    """Sentences; none when it is clean. Processes that are ending get a moment to do so."""
    deadline = time.monotonic() + 1.0
    while run.processes() and time.monotonic() < deadline:
        time.sleep(0.02)
    events = run.events()
    found = [f"process {pid}: {_command(pid)}" for pid in run.processes()]
    found += [f"the Master lists {name}" for name in run.listed()]
    found += _keys(run, events)
    found += _files(run)
    found += _memory(run)
    found += _ledger(run)
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "ended"


def _keys(run: Run, events: list[dict[str, Any]]) -> list[str]:
    keys = sorted({line["detail"]["key"] for line in events if line["site"] == "metadata.put"})
    left = []
    for master in run.world.running():
        client = MetadataClient(master.metadata_url)
        left += [f"the metadata server has {key}" for key in keys if client.get(key) is not None]
    return left


def _files(run: Run) -> list[str]:
    left = []
    if run.paths.runtime.exists():
        left += [f"file {path}" for path in run.paths.runtime.iterdir()]
    holder = holder_of(run.paths.lock(POOL))
    if holder is not None:
        left.append(f"the lock is held by {holder}")
    elif run.paths.lock(POOL).exists() and not _lock_was_spoiled(run):
        left.append("the lock file")
    return left


def _lock_was_spoiled(run: Run) -> bool:
    """A lock's file that nobody holds is in nobody's way; it stays only where its removal could not be tried again."""
    hit = run.hit()
    return hit is not None and (hit["site"].startswith("ledger.lock.") or hit["mode"].startswith("kill"))


def _memory(run: Run) -> list[str]:
    """Memory lives as long as a process that maps it; of this run none does, so what is left to ask are the processes
    that the run's own could have shared it with: this one, and (for the model of the driver) holders of its files."""
    left = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if "memfd:egm" in os.readlink(f"/proc/self/fd/{name}"):
                left.append(f"descriptor {name} of a chunk in the harness")
        except OSError:
            continue
    if "memfd:egm" in Path("/proc/self/maps").read_text():
        left.append("a chunk is mapped in the harness")
    for path in run.model.glob("*.owner") if run.model.exists() else ():
        fd = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            left.append(f"an allocation of the driver's model: {path.name}")
        finally:
            os.close(fd)
    leaks = run.folder / "leaks"
    if leaks.exists():
        import json

        for line in leaks.read_text().splitlines():
            report = json.loads(line)
            if report["total"]:
                left.append(f"pid {report['pid']} ended with {report['leaks']} at the driver")
    return left


def _ledger(run: Run) -> list[str]:
    record = run.record()
    if record is None:
        return []
    left = [] if record.state == "gone" else [f"the ledger says {record.state}: {record.reason}"]
    left += [f"the ledger has segment {row.name} {row.state}" for row in record.live_segments]
    left += [f"the ledger has chunk {row.index} {row.state}" for row in record.live_chunks]
    left += [
        f"the ledger has {r.kind} {r.name} {r.state}" for r in record.resources if r.state in ("intended", "present")
    ]
    return left
