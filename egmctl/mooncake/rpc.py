"""A connection to a Master: made when first needed, made again after it broke, shared by any number of threads.

A request is never sent twice. It is written on a new connection only when the old one provably did not take it whole.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from egmctl.errors import UsageError
from egmctl.mooncake.errors import MasterUnreachable
from egmctl.mooncake.link import MAX_BODY, Link, NotSent, function_id
from egmctl.mooncake.reply import Reply
from egmctl.steps import step

__all__ = ["Reply", "RpcConnection", "function_id", "parse_address"]

T = TypeVar("T")


def parse_address(address: str, *, name: str = "master_server_addr") -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[IPv6]:port``. Raises `UsageError`, also for addresses of HA back ends."""
    if "://" in address:
        scheme = address.split("://", 1)[0]
        raise UsageError(
            f'{name} = "{address[:200]}": finding the Master through {scheme} is not supported',
            hint="give the leading Master's own host:port",
        )
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    inner = host[1:-1] if bracketed else host
    good = bool(colon and inner) and bracketed == (":" in inner) and not set(inner) & set("[]/ \t\n\0")
    if not good or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 65536 or len(address) > 300:
        raise UsageError(
            f'{name} = "{address[:200]}" is not host:port', hint='write "10.0.0.1:50051", or "[fd00::1]:50051" for IPv6'
        )
    return inner, int(port)


def _as_is(body: bytes) -> Any:
    return body


_all: weakref.WeakSet[RpcConnection] = weakref.WeakSet()


def _forget_in_child() -> None:
    for connection in list(_all):
        connection._after_fork()


os.register_at_fork(after_in_child=_forget_in_child)


class RpcConnection:
    """A connection to one Master, made when first needed and made again after it broke. Safe for many threads."""

    def __init__(self, address: str, *, timeout: float = 5.0) -> None:
        self.host, self.port = parse_address(address)
        self.address = address
        self.timeout = timeout
        self._epoch = 0
        self._link: Link | None = None
        self._closed = False
        self._connecting = threading.Lock()
        _all.add(self)

    def __enter__(self) -> RpcConnection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def epoch(self) -> int:
        """0 before the first connection; one more each time it was made (anew)."""
        return self._epoch

    def connected(self) -> bool:
        """Whether there is a connection and the peer has not closed it. Does not wait and does not connect."""
        link = self._link
        return link is not None and link.alive()

    def call(self, function: str, body: bytes = b"", timeout: float | None = None) -> bytes:
        """The body of the answer. Errors as of `submit` and `Reply.result`."""
        return self.submit(function, body, timeout).result()

    def submit(
        self,
        function: str,
        body: bytes = b"",
        timeout: float | None = None,
        convert: Callable[[bytes], T] = _as_is,
    ) -> Reply[T]:
        """Send a request, do not wait for its answer. ``timeout`` counts from now and covers connecting.

        ``convert`` makes the result of the answer's body, in the thread that asks for it.
        Raises `MasterUnreachable` when the request was not handed over, and so has no effect.
        """
        if len(body) > MAX_BODY:
            raise UsageError(
                f"{function}: a request of {len(body)} bytes is more than {MAX_BODY}", hint="split the batch"
            )
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        problem = ""
        for _ in range(3):
            link = self._usable(deadline)
            try:
                return link.send(function, body, deadline, convert)
            except NotSent as error:
                problem = str(error)
                if self._closed or time.monotonic() >= deadline:
                    break
        raise self._unreachable(f"{function}: {problem}; it was not handed over")

    def ask_again(self, reply: Reply[T], timeout: float | None = None) -> Reply[T]:
        """Send the request of ``reply`` once more. For questions; what changes something is never sent twice."""
        return self.submit(reply.function, reply.request, timeout, reply._convert)

    def close(self) -> None:
        """End the connection and wake everybody who waits; nothing can be sent afterwards."""
        self._closed = True
        link = self._link
        if link is not None:
            link.fail("the connection was closed here")

    def _usable(self, deadline: float) -> Link:
        link = self._link
        if link is not None and link.alive() and not self._closed:
            return link
        if not self._connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._unreachable("could not connect in time")
        try:
            if self._closed:
                raise self._unreachable("the connection was closed here")
            link = self._link
            if link is not None:
                if link.alive():
                    return link
                link.fail("the Master closed the connection")
            sock: socket.socket | None = None
            try:
                with step("mooncake.rpc.connect", address=self.address):
                    sock = self._connect(deadline)
            except BaseException:
                if sock is not None:
                    sock.close()
                raise
            self._epoch += 1
            link = self._link = Link(sock, self.address, self._epoch)
        finally:
            self._connecting.release()
        if self._closed:
            link.fail("the connection was closed here")
            raise self._unreachable("the connection was closed here")
        return link

    def _connect(self, deadline: float) -> socket.socket:
        try:
            targets = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise self._unreachable(
                f"cannot resolve {self.host}: {getattr(error, 'strerror', None) or error}"
            ) from error
        problem = "no address to connect to"
        for family, kind, protocol, _, target in targets:
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(max(0.01, deadline - time.monotonic()))
                sock.connect(target)
                # A loopback port that nobody listens on can answer itself when the kernel picks it as our own.
                if sock.getsockname() == sock.getpeername():
                    raise ConnectionRefusedError(111, "Connection refused")
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
                sock.setblocking(False)
                return sock
            except OSError as error:
                sock.close()
                problem = "no answer in time" if isinstance(error, TimeoutError) else str(error.strerror or error)
            except BaseException:
                sock.close()
                raise
            if time.monotonic() >= deadline:
                break
        raise self._unreachable(f"cannot connect to the Master: {problem}")

    def _unreachable(self, message: str) -> MasterUnreachable:
        return MasterUnreachable(
            message,
            where=self.address,
            hint="check that mooncake_master runs there and that its RPC port can be reached from this host",
        )

    def _after_fork(self) -> None:
        """In a forked child: the parent's connection is the parent's. Ours is made when needed; locks start anew."""
        link, self._link = self._link, None
        self._connecting = threading.Lock()
        if link is not None:
            link.after_fork()
