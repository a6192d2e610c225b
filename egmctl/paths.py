"""Where state and sockets live: ``/var/lib/egmctl`` and ``/run/egmctl`` for root, the XDG folders otherwise."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from egmctl.errors import PreflightError

__all__ = ["Paths", "make_private_dir"]


@dataclass(frozen=True)
class Paths:
    """The folders of one egmctl installation. ``state`` is durable, ``runtime`` is gone after a reboot."""

    state: Path
    runtime: Path

    @classmethod
    def resolve(cls, state_dir: str | os.PathLike[str] | None = None) -> Paths:
        """From ``--state-dir``, else ``EGMCTL_STATE_DIR``, else the user's own folders.

        A state dir of one's own has its runtime folder of its own too (named after a digest of it, since a socket
        path holds 107 bytes), so that two of them on one machine never meet.
        """
        chosen = state_dir or os.environ.get("EGMCTL_STATE_DIR")
        if os.geteuid() == 0:
            runtime = Path("/run/egmctl")
        else:
            xdg = os.environ.get("XDG_RUNTIME_DIR")
            runtime = Path(xdg) / "egmctl" if xdg else Path(f"/tmp/egmctl-{os.geteuid()}")  # noqa: S108 - owner checked
        if chosen:
            import hashlib

            state = Path(chosen).expanduser().absolute()
            return cls(state, runtime / hashlib.sha256(os.fsencode(state)).hexdigest()[:12])
        if os.geteuid() == 0:
            return cls(Path("/var/lib/egmctl"), runtime)
        data = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        return cls(Path(data) / "egmctl", runtime)

    def ledger(self, pool: str) -> Path:
        return self.state / f"{pool}.db"

    def lock(self, pool: str) -> Path:
        return self.state / f"{pool}.lock"

    def log(self, pool: str) -> Path:
        return self.state / f"{pool}.log"

    def socket(self, pool: str) -> Path:
        """The control socket of the pool's agent (at most 107 bytes)."""
        import hashlib

        return self.runtime / f"{hashlib.sha256(pool.encode()).hexdigest()[:12]}.sock"


def make_private_dir(path: Path) -> None:
    """Make ``path`` and its parents; ``path`` itself is for its owner only, whatever the umask.

    Raises `PreflightError` when it cannot be made, belongs to somebody else, or is open to others.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir(mode=0o700)
            path.chmod(0o700)
        except FileExistsError:
            pass
        status, link = path.stat(), path.lstat()
    except OSError as error:
        raise PreflightError(
            f"cannot make the folder: {error.strerror or error}",
            where=str(path),
            hint="give another place with --state-dir, or make it writable for this user",
        ) from error
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):  # who can lead it elsewhere at any time
        raise PreflightError(
            f"is a link that belongs to uid {link.st_uid}",
            where=str(path),
            hint="remove it, or give another --state-dir",
        )
    if not stat.S_ISDIR(status.st_mode):
        raise PreflightError("is not a folder", where=str(path), hint="move it away, or give another --state-dir")
    if status.st_uid != os.geteuid():
        raise PreflightError(
            f"belongs to uid {status.st_uid}, not to uid {os.geteuid()}",
            where=str(path),
            hint="run as its owner, or give another --state-dir",
        )
    if status.st_mode & 0o022:
        raise PreflightError("is writable by others", where=str(path), hint=f"chmod 700 {path}")
