"""What memory came back and who still holds the rest: an importer keeps a chunk alive after its owner has let go."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from egmctl.memory import Chunk

__all__ = ["file_inodes", "has_let_go", "mappers", "node_free", "process_name", "wait_for_release"]

TOLERANCE = 64 << 20
"""Bytes by which a node's free memory may miss what was released before anybody is told: other processes go on."""


def node_free(nodes: Iterable[int]) -> dict[int, int]:
    """Free bytes of each node, as far as sysfs tells."""
    free: dict[int, int] = {}
    for node in nodes:
        try:
            for line in Path(f"/sys/devices/system/node/node{node}/meminfo").read_text().splitlines():
                words = line.split()
                if words[2] == "MemFree:":
                    free[node] = int(words[3]) * 1024
        except (OSError, ValueError, IndexError):
            continue
    return free


def file_inodes(chunks: Iterable[Chunk]) -> dict[int, int]:
    """Inode to chunk index of chunks that are files (``shm``)."""
    inodes: dict[int, int] = {}
    for chunk in chunks:
        share = chunk.share()
        if share.fd is not None:
            try:
                if share.kind == "shm":  # every descriptor of the driver's leads to the same device file
                    inodes[os.fstat(share.fd).st_ino] = chunk.spec.index
            finally:
                os.close(share.fd)
    return inodes


def mappers(inodes: Mapping[int, int], *, but: Iterable[int] = ()) -> dict[int, set[int]]:
    """Processes (other than this one and ``but``) that map one of the files, and which chunks, as far as this user may
    look into them."""
    found: dict[int, set[int]] = {}
    skip = {os.getpid(), *but}
    if not inodes:
        return found
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in skip:
            continue
        try:
            with open(f"/proc/{entry}/maps", errors="replace") as maps:
                for line in maps:
                    if "/memfd:egm-" not in line:
                        continue
                    inode = int(line.split(None, 5)[4])
                    if inode in inodes:
                        found.setdefault(int(entry), set()).add(inodes[inode])
        except (OSError, ValueError, IndexError):
            continue
    return found


def has_let_go(pid: int, inodes: Mapping[int, int]) -> bool:
    """Whether it is certain that process ``pid`` neither maps nor holds open any of these files."""
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as maps:
            for line in maps:
                if "/memfd:egm-" in line and int(line.split(None, 5)[4]) in inodes:
                    return False
        with os.scandir(f"/proc/{pid}/fd") as fds:
            return not any(os.stat(fd.path).st_ino in inodes for fd in fds if _is_chunk(fd.path))
    except (OSError, ValueError, IndexError):
        return False


def _is_chunk(fd: str) -> bool:
    try:
        return os.readlink(fd).startswith("/memfd:egm-")
    except FileNotFoundError:  # closed meanwhile
        return False


def process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended"


def wait_for_release(
    before: Mapping[int, int], released: Mapping[int, int], *, patience: float = 1.0
) -> dict[int, int]:
    """Bytes of each node that did not come back within ``patience`` seconds, where that is more than noise."""
    deadline = time.monotonic() + patience
    while True:
        after = node_free(released)
        missing = {
            node: nbytes - (after[node] - before[node])
            for node, nbytes in released.items()
            if node in after and node in before
        }
        missing = {node: lack for node, lack in missing.items() if lack > max(TOLERANCE, released[node] // 8)}
        if not missing or time.monotonic() >= deadline:
            return missing
        time.sleep(0.05)
