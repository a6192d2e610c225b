"""One owner of a pool at a time: a file lock that the kernel drops with its holder, with a text that says who."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from egmctl.errors import BusyError, PreflightError
from egmctl.ledger.processes import start_time
from egmctl.steps import step

__all__ = ["Holder", "OwnerLock", "holder_of"]


@dataclass(frozen=True)
class Holder:
    """Who owns a pool: ``since`` is seconds since the epoch, ``started`` the process's start in clock ticks."""

    pid: int
    started: int
    command: str
    since: float
    doing: str

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} ({self.command}), since {when}, {self.doing}"


def _read(fd: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(fd, 4096, 0)))
    except (OSError, ValueError, TypeError):
        return None


def holder_of(path: Path) -> Holder | None:
    """Who holds the lock now, None when nobody does. Takes nothing and changes nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _read(fd) or Holder(0, 0, "unknown", os.fstat(fd).st_mtime, "starting")
    finally:
        os.close(fd)
    return None


class OwnerLock:
    """Held from `acquire` to `release` or the end of the process, whichever comes first."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def acquire(cls, path: Path, pool: str, doing: str, *, patience: float = 0.0) -> OwnerLock:
        """Take the lock; a dead process's is free. Raises `BusyError` naming the holder after ``patience`` seconds."""
        deadline = time.monotonic() + patience
        while True:
            lock = cls._try(path)
            if lock is not None:
                lock.describe(doing)
                return lock
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        holder = holder_of(path)
        raise BusyError(
            f"is owned by {holder}" if holder else "is owned by another process",
            where=f"pool {pool}",
            hint="wait for it, or see `egmctl status`",
            facts={"pid": holder.pid, "since": holder.since, "doing": holder.doing} if holder else {},
        )

    @classmethod
    def _try(cls, path: Path) -> OwnerLock | None:
        try:
            with step("ledger.lock.open", path=str(path)):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise PreflightError(
                f"cannot open the pool's lock: {error.strerror}",
                where=str(path),
                hint="make the state folder writable for this user, or give another with --state-dir",
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have removed the file between our open and our lock: then this one locks nothing.
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return cls(path, fd)
        except OSError:
            pass
        os.close(fd)
        return None

    def describe(self, doing: str) -> None:
        """Say in the file what the holder is doing now."""
        pid = os.getpid()
        command = " ".join(part if "/" not in part else Path(part).name for part in sys.argv)[:200] or "python"
        holder = Holder(pid, start_time(pid) or 0, command, time.time(), doing)
        text = json.dumps(asdict(holder)).encode()
        try:
            with step("ledger.lock.describe", doing=doing):
                os.pwrite(self._fd, text.ljust(1024) + b"\n", 0)
        except OSError:
            pass  # the text is for people; the lock itself holds

    def release(self) -> None:
        """Remove the file while it is still ours, then let go. Twice is success."""
        if self._fd < 0:
            return
        try:
            with step("ledger.lock.release"):
                self.path.unlink()
        except KeyboardInterrupt:  # it may have come before: nobody else would remove the file
            self.path.unlink(missing_ok=True)
            raise
        except OSError:
            pass  # an empty lock that nobody holds is free
        finally:
            os.close(self._fd)
            self._fd = -1
