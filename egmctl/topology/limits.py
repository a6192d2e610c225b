"""How much memory this process may still take: the kernel's estimate and every cgroup above it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from egmctl.topology.lists import parse_list, read_int, read_text
from egmctl.topology.sysfs import parse_meminfo

__all__ = ["allowed_nodes", "cgroup_headroom", "memory_available", "memory_headroom"]

_UNLIMITED = 1 << 60  # version 1 says "no limit" as the largest multiple of the page size


def allowed_nodes(proc: Path) -> tuple[int, ...] | None:
    """The nodes this process's cpuset allows (``Mems_allowed_list``); None when the kernel does not say."""
    for line in (read_text(proc / "self/status") or "").splitlines():
        if line.startswith("Mems_allowed_list:"):
            try:
                return parse_list(line.partition(":")[2])
            except ValueError:
                return None
    return None


def memory_available(proc: Path) -> int | None:
    """``MemAvailable`` of the whole machine, in bytes."""
    return parse_meminfo(read_text(proc / "meminfo") or "").get("MemAvailable")


def memory_headroom(proc: Path) -> int | None:
    """The smallest of what the machine has available and what each cgroup up the hierarchy leaves, in bytes."""
    known = [value for value in (memory_available(proc), cgroup_headroom(proc)) if value is not None]
    return min(known, default=None)


def cgroup_headroom(proc: Path) -> int | None:
    """The least that any limited memory cgroup above this process leaves; None when none is limited.

    Both versions count, since a hybrid machine mounts both. Page cache of the group can be reclaimed and counts as
    free, shared memory cannot.
    """
    found: list[int] = []
    for version, folder in _folders(proc):
        left = _left_v2(folder) if version == 2 else _left_v1(folder)
        if left is not None:
            found.append(max(0, left))
    return min(found, default=None)


def _folders(proc: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of every memory cgroup from this process's own up to the mount point."""
    paths: dict[int, str] = {}
    for line in (read_text(proc / "self/cgroup") or "").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    for line in (read_text(proc / "self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            version = 2
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            version = 1
        else:
            continue
        if version not in paths:
            continue
        top = Path(_unescape(fields[4]))
        inside = _inside(paths[version], _unescape(fields[3]))
        folder = top / inside if inside else top
        while True:
            yield version, folder
            if folder == top:
                break
            folder = folder.parent


def _inside(path: str, root: str) -> str:
    """The part of a cgroup path below what is mounted; a path outside of it (another namespace) is the mount itself."""
    try:
        relative = PurePosixPath(path).relative_to(root)
    except ValueError:
        return ""
    return "" if ".." in relative.parts or str(relative) == "." else str(relative)


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def _stat(folder: Path) -> dict[str, int]:
    pairs = (line.split() for line in (read_text(folder / "memory.stat") or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _left_v2(folder: Path) -> int | None:
    # memory.high is no hard limit, but what exceeds it is throttled to a standstill: pool memory is never reclaimed.
    limits = [value for name in ("memory.max", "memory.high") if (value := read_int(folder / name)) is not None]
    used = read_int(folder / "memory.current")
    if not limits or used is None:
        return None
    stat = _stat(folder)
    reclaimable = stat.get("inactive_file", 0) + stat.get("active_file", 0) + stat.get("slab_reclaimable", 0)
    return min(limits) - max(0, used - reclaimable)


def _left_v1(folder: Path) -> int | None:
    limit, used = read_int(folder / "memory.limit_in_bytes"), read_int(folder / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= _UNLIMITED:
        return None
    stat = _stat(folder)
    return limit - max(0, used - stat.get("total_inactive_file", 0) - stat.get("total_active_file", 0))
