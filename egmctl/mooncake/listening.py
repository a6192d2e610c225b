"""Endpoints: how they are written, and listening at one, with the refusals a person needs to see."""

from __future__ import annotations

import errno
import socket

from egmctl.errors import EgmError, PreflightError, UsageError
from egmctl.steps import step

__all__ = ["format_endpoint", "listen", "split_endpoint"]


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port``. Raises `UsageError`."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise UsageError(f"{endpoint!r} is not an endpoint", hint="write host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def format_endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at a fixed or (port 0) a free port of this machine's ``host``, without blocking.

    Raises `PreflightError` when the port is taken, naming the holder, or the host is not this machine's.
    """
    where = format_endpoint(host, port)
    try:
        with step("handshake.resolve", host=host):
            found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise PreflightError(
            f"the host name of the endpoint is not known: {error}",
            where=where,
            hint="give local_hostname an address of this machine",
        ) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # A fixed port of an earlier agent may still have connections in TIME_WAIT; that is no reason to refuse it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        with step("handshake.bind", port=port):
            listener.bind(address)
        with step("handshake.listen", port=port):
            listener.listen(1024)
    except OSError as error:
        listener.close()
        raise _cannot_listen(error, where, port) from error
    except BaseException:
        listener.close()
        raise
    return listener


def _cannot_listen(error: OSError, where: str, port: int) -> EgmError:
    if error.errno == errno.EADDRINUSE and port:
        holder = _holder(port)
        return PreflightError(
            f"port {port} is taken by {holder or 'a process of another user'}",
            where=where,
            hint="stop it, or give local_hostname another port, or none for a free one",
            facts={"port": port, "holder": holder},
        )
    if error.errno == errno.EADDRNOTAVAIL:
        hint = "local_hostname must be an address of this machine"
    elif error.errno == errno.EACCES:
        hint = "ports below 1024 need a privilege; choose a higher one"
    else:
        hint = "give local_hostname another address or port"
    name = errno.errorcode.get(error.errno or 0, "?")
    return PreflightError(f"cannot listen: {error.strerror} ({name}, {error.errno})", where=where, hint=hint)


def _holder(port: int) -> str | None:
    """The process that listens on a port, as ``name (pid n)``; None when it cannot be seen."""
    import psutil

    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return None
    for connection in connections:
        if connection.laddr and connection.laddr.port == port and connection.pid and not connection.raddr:
            try:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.Error:
                return f"pid {connection.pid}"
    return None
