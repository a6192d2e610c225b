"""The folders of an installation, private from the start."""

from __future__ import annotations

import stat
from pathlib import Path

from egmctl.errors import PreflightError
from egmctl.paths import Paths, make_private_dir
from egmctl.steps import step

__all__ = ["check_passable", "network_file_system", "own_folders", "prepare"]

_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "ceph",
    "gluster",
    "lustre",
    "gpfs",
    "beegfs",
    "afs",
    "9p",
    "fuse.sshfs",
    "ocfs2",
    "gfs2",
)


def prepare(paths: Paths) -> None:
    """Make the state and runtime folders. Raises `PreflightError` when one cannot be had, or is not ours alone."""
    with step("provider.folders"):
        make_private_dir(paths.state)
        # In /tmp anybody could have made the upper one before us, and would own what lies in it.
        for folder in own_folders(paths.runtime):
            make_private_dir(folder)


def own_folders(runtime: Path) -> tuple[Path, ...]:
    """Those that sockets lie in and that are egmctl's own, the upper one first."""
    return (runtime.parent, runtime) if runtime.parent.name.startswith("egmctl") else (runtime,)


def check_passable(runtime: Path, group: str, gid: int) -> None:
    """See that ``group`` gets as far as egmctl's own folders, by the permission bits of those above.

    Raises `PreflightError` naming the folder in the way: one's own under ``XDG_RUNTIME_DIR`` is nobody else's.
    """
    top = own_folders(runtime)[0]
    for folder in dict.fromkeys((*top.parents, *top.resolve().parents)):
        status = folder.stat()
        if not status.st_mode & (stat.S_IXGRP if status.st_gid == gid else stat.S_IXOTH):
            raise PreflightError(
                f"group {group!r} cannot reach the control socket: {folder} is closed to it "
                f"(mode {stat.S_IMODE(status.st_mode):04o})",
                where=f"the spec's group, {runtime}",
                hint="run every egmctl command with XDG_RUNTIME_DIR unset (sockets then lie in /tmp/egmctl-UID), run "
                "egmctl as root (/run/egmctl), or leave group out of the spec",
            )


def network_file_system(path: Path, mounts: str | None = None) -> str | None:
    """The type of the file system that holds ``path`` when it is one of the network, where locks and syncs may not
    mean what they say; else None. ``mounts`` is the text of ``/proc/self/mountinfo``."""
    try:
        text = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
        wanted = path.resolve()
    except OSError:
        return None
    best, kind = -1, ""
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        point = fields[4].replace("\\040", " ")
        # Of two mounts at one place the later hides the earlier.
        if (wanted == Path(point) or Path(point) in wanted.parents) and len(point) >= best:
            best, kind = len(point), right.split()[0]
    return kind if kind.startswith(_NETWORK) else None
