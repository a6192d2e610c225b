"""Allocations of the model: files in the folder that stands for the machine's memory.

An importer opens the file, so it keeps the bytes whatever becomes of the exporter. A lock that only the exporter holds
says whether it still lives: a fabric handle of a dead process leads nowhere, as the real one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
from pathlib import Path

from egmctl.memory import linux

__all__ = ["Backing"]

_NAME = re.compile(r"alloc-([0-9a-f]{32})-(\d+)-(-?\d+)-([0-9]+)-([\w.-]+)")


class Backing:
    """Memory of one allocation as this process holds it; ``alias`` is the model's own view of the bytes."""

    def __init__(self, path: Path, fd: int, name: re.Match[str], owner_fd: int | None) -> None:
        self.path = path
        self.fd = fd
        self.ident = name[1]
        self.nbytes = int(name[2])
        self.node = int(name[3])
        self.handle_type = int(name[4])
        self.host = name[5]
        self._owner_fd = owner_fd
        self.alias = linux.map_file(fd, self.nbytes)
        self.references = 0

    @property
    def owned(self) -> bool:
        return self._owner_fd is not None

    @classmethod
    def create(cls, folder: Path, nbytes: int, node: int, handle_type: int, host: str, ident: str | None) -> Backing:
        ident = ident or secrets.token_hex(16)
        path = folder / f"alloc-{ident}-{nbytes}-{node}-{handle_type}-{host}"
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, nbytes)
        owner_fd = os.open(f"{path}.owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(owner_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        name = _NAME.fullmatch(path.name)
        if name is None:
            raise ValueError(path.name)
        return cls(path, fd, name, owner_fd)

    @classmethod
    def from_fd(cls, fd: int) -> Backing | None:
        """What a descriptor leads to, None when it is no allocation."""
        try:
            target = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
        except OSError:
            return None
        name = _NAME.fullmatch(os.path.basename(target))
        if name is None:
            return None
        return cls(Path(target), os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), name, None)

    @classmethod
    def from_fabric(cls, folder: Path, handle: bytes) -> Backing | None:
        """What a fabric handle leads to, None when it is forged, or its exporter has released it or is dead."""
        ident = handle[:16].hex()
        if len(handle) != 64 or _fabric(ident) != handle:
            return None
        for path in folder.glob(f"alloc-{ident}-*"):
            name = _NAME.fullmatch(path.name)
            if name is None or not _owner_lives(path):
                continue
            return cls(path, os.open(path, os.O_RDWR | os.O_CLOEXEC), name, None)
        return None

    def fabric(self) -> bytes:
        return _fabric(self.ident)

    def close(self) -> None:
        """The last reference of this process is gone."""
        linux.unmap(self.alias, self.nbytes)
        os.close(self.fd)
        if self._owner_fd is not None:
            self.path.unlink(missing_ok=True)
            Path(f"{self.path}.owner").unlink(missing_ok=True)
            os.close(self._owner_fd)
            self._owner_fd = None


def _fabric(ident: str) -> bytes:
    raw = bytes.fromhex(ident)
    return raw + hashlib.sha384(raw).digest()


def _owner_lives(path: Path) -> bool:
    try:
        fd = os.open(f"{path}.owner", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return True
        raise
    finally:
        os.close(fd)
    return False
