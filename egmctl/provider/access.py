"""Who is at the other end of a local socket, and whether a spec lets them in."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from egmctl.errors import PreflightError

__all__ = ["Peer", "group_id", "peer_of"]

_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Peer:
    """A process as it was when it connected: the kernel's word, not its own."""

    pid: int
    uid: int
    gid: int

    def __str__(self) -> str:
        return f"pid {self.pid} (uid {self.uid})"

    @property
    def owner(self) -> bool:
        """Whether it may do all that this process may."""
        return self.uid in (0, os.geteuid())

    def in_group(self, group: int | None) -> bool:
        """Whether its user is in a group (None: nobody is)."""
        import pwd

        if group is None or self.gid == group:
            return group is not None
        try:
            user = pwd.getpwuid(self.uid)
            return group in os.getgrouplist(user.pw_name, user.pw_gid)
        except KeyError:
            return False


def peer_of(sock: socket.socket) -> Peer:
    """Whoever connected to a Unix socket."""
    return Peer(*_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)))


def group_id(name: str | None) -> int | None:
    """The number of the group that a spec lets in. Raises `PreflightError` for one that does not exist."""
    if name is None:
        return None
    import grp

    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise PreflightError(f"there is no group {name!r}", where="group", hint="see /etc/group") from None
