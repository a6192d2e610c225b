"""The folders of an installation, private from the start."""

from __future__ import annotations

from pathlib import Path

from egmctl.paths import Paths, make_private_dir
from egmctl.steps import step

__all__ = ["network_file_system", "prepare"]

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
        if paths.runtime.parent.name.startswith("egmctl"):
            # In /tmp anybody could have made the folder above before us, and would own what lies in it.
            make_private_dir(paths.runtime.parent)
        make_private_dir(paths.runtime)


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
