"""What every memory kind needs of the host: a place for the ledger, NUMA nodes, a wheel for stock clients."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from egmctl.checks.base import CheckResult
from egmctl.checks.machine import Machine
from egmctl.errors import EgmError
from egmctl.memory.base import ChunkSpec
from egmctl.topology.lists import read_text
from egmctl.units import MIB, format_size

__all__ = ["NumaNodes", "ShmGranule", "StateFolder", "TransferEngine"]

# Their locks and syncs are not those of this host. Names from /proc/mounts; "fuse." and what follows for user space.
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "beegfs", "gpfs", "afs", "wekafs"}
    | {f"fuse.{name}" for name in ("sshfs", "glusterfs", "ceph", "juicefs", "s3fs", "gcsfuse", "rclone")}
)
ROOM = 64 * MIB
"""Free bytes below which a ledger, which is small but must never fail, is warned about."""


class StateFolder:
    """The ledger's folder can be written, has room, and is on this host's own disk."""

    id: ClassVar[str] = "state-folder"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        if facts.paths is None:
            yield CheckResult(self.id, "skip", "no state folder was asked about")
            return
        folder = facts.paths.state
        existing = folder
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if not os.access(existing, os.W_OK | os.X_OK):
            yield CheckResult(
                self.id,
                "fail",
                f"{existing} cannot be written by uid {os.geteuid()}{_why(existing)}",
                "a folder for the ledger that this user can write",
                "give another with --state-dir",
            )
            return
        kind = file_system(existing, facts.roots.proc)
        if kind in NETWORK_FILE_SYSTEMS:
            yield CheckResult(
                self.id,
                "warn",
                f"the state folder {folder} is on a network file system ({kind})",
                "a local file system",
                "a ledger belongs to one host: give a local folder with --state-dir",
            )
            return
        room = os.statvfs(existing)
        free = room.f_bavail * room.f_frsize
        if free < ROOM:
            yield CheckResult(
                self.id,
                "warn",
                f"only {format_size(free)} are free where the state folder {folder} is",
                f"{format_size(ROOM)} free",
                "make room: a record that cannot be written stops the pool",
            )
            return
        yield CheckResult(self.id, "pass", f"{folder} ({kind or 'file system unknown'})")


def _why(folder: Path) -> str:
    try:
        read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    except OSError:
        return ""
    return ": its file system is mounted read-only" if read_only else ""


def file_system(path: Path, proc: Path) -> str:
    """The type of the file system that holds ``path``, as the mount table names it; "" when it does not say."""
    where = path.resolve()
    best, kind = Path(), ""
    for line in (read_text(proc / "self/mounts") or "").splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1]))
        # Of several mounts on one point the last is on top.
        if where.is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, kind = point, fields[2]
    return kind


class NumaNodes:
    """At least one node a pool can use."""

    id: ClassVar[str] = "numa-nodes"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        eligible = {node.id: node for node in facts.topology.eligible()}
        roles = ", ".join(f"{node.id} {node.role}" for node in facts.topology.nodes)
        missing = [node for node in facts.nodes if node not in eligible]
        if missing or not eligible:
            yield CheckResult(
                self.id,
                "fail",
                f"nodes by role: {roles or 'none'}",
                f"nodes {missing} usable" if missing else "one node with CPUs and memory that the cpuset allows",
                "see `egmctl topology`; a container's cpuset may hide nodes",
            )
            return
        free = ", ".join(f"node {n}: {format_size(eligible[n].memory_free)} free" for n in facts.nodes)
        yield CheckResult(self.id, "pass", f"{free} ({roles})")


class ShmGranule:
    """A small chunk of shared memory is really created, bound and checked on every node."""

    id: ClassVar[str] = "shm-chunk"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        from egmctl.memory import provider_memory

        for node in facts.nodes:
            where = f"{self.id}/node{node}"
            memory = provider_memory("shm", total_bytes=2 << 20)
            try:
                chunk = memory.create(ChunkSpec(0, node, 2 << 20), lambda _: None)
                memory.release(chunk)
            except EgmError as error:
                yield CheckResult(where, "fail", str(error), "a bound, sealed memfd of 2 MiB", error.hint)
                continue
            finally:
                memory.close()
            warnings = getattr(memory, "warnings", ())
            if warnings:
                yield CheckResult(where, "warn", "; ".join(warnings), "memory bound to its node")
            else:
                yield CheckResult(where, "pass", "2 MiB created, bound, placed on the node and released")


class TransferEngine:
    """Stock clients of the tcp kinds are served by the Transfer Engine of a Mooncake wheel."""

    id: ClassVar[str] = "transfer-engine"

    def run(self, facts: Machine) -> Iterator[CheckResult]:
        from egmctl.mooncake.wheel import wheel_info

        info = wheel_info()
        if info.importable:
            yield CheckResult(
                self.id,
                "pass",
                f"{info.distribution} {info.version}; it listens on all interfaces, whatever it is told",
            )
            return
        yield CheckResult(
            self.id,
            "warn",
            info.error,
            "a Mooncake wheel that can be imported; provision works without, mount over tcp does not",
            info.hint,
        )
