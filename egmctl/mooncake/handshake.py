"""The endpoint of a pool: answers whoever asks for the segment descriptor, in Mooncake's P2P handshake.

A message is its length (u64, little-endian, the type byte counted), a type byte, and JSON. One thread serves all peers
without blocking on any: each has a deadline, messages and peers are bounded, and the peer that has been there longest
gives way when a new one comes. Nothing a peer sends is kept.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from egmctl.errors import FailedError
from egmctl.mooncake.descriptor import MAX_DESCRIPTOR_BYTES, DescriptorError, SegmentDescriptor, parse_descriptor
from egmctl.mooncake.listening import format_endpoint, listen, split_endpoint
from egmctl.steps import step

__all__ = ["EndpointUnreachable", "HandshakeServer", "fetch_descriptor", "format_endpoint", "split_endpoint"]

CONNECTION, METADATA, NOTIFY, PROBE = 0, 1, 2, 3
_HEADER = struct.Struct("<Q")
_EMPTY_CONNECTION = (
    b'{"local_gid":"","local_lid":0,"local_nic_path":"","payload":"","peer_nic_path":"","qp_num":[],"reply_msg":""}'
)
_FIXED_ANSWERS = {
    CONNECTION: (CONNECTION, _EMPTY_CONNECTION),
    NOTIFY: (NOTIFY, b'{"name":"","notify_msg":"success"}'),
    PROBE: (PROBE, b'{"status":"success"}'),
}
_RECEIVE = 64 << 10


class EndpointUnreachable(FailedError):
    """Nobody answers a handshake at an endpoint, or not in time."""

    code = "endpoint-unreachable"


@dataclass
class _Peer:
    sock: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    reply: memoryview | None = None
    finishing: bool = False


class HandshakeServer:
    """Serves ``provide()``, the descriptor as it is now (bytes; empty while there is none), at ``host:port``.

    The socket listens when the constructor returns; ``port`` 0 takes a free one. ``host`` is what consumers are told;
    it has to be an address or a name of this machine. ``provide`` is called on the server's thread and must not block.
    Raises `PreflightError` when the port is taken, naming the holder, or the host is not this machine's.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        provide: Callable[[], bytes] = bytes,
        *,
        peer_timeout: float = 10.0,
        max_peers: int = 1024,
        max_buffered: int = 64 << 20,
    ) -> None:
        self._provide = provide
        self._peer_timeout = peer_timeout
        self._max_peers = max_peers
        self._max_buffered = max_buffered
        self._buffered = 0
        self._peers: OrderedDict[int, _Peer] = OrderedDict()
        self._closing = False
        self._closed = False
        self.answered = 0
        """Descriptors sent, for status and tests."""
        self._listener = listen(host, port)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self.endpoint = format_endpoint(host, self.port)
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"handshake-{self.port}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            for each in (self._selector, self._listener, self._wake_read, self._wake_write):
                each.close()
            raise FailedError(
                f"no thread for the endpoint: {error}",
                where=self.endpoint,
                hint="raise the limit of processes (ulimit -u, or the container's pids limit)",
            ) from error

    def __enter__(self) -> HandshakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, drop the peers, end the thread. Twice is success."""
        if self._closed:
            return
        with step("handshake.close", port=self.port):
            self._closing = True
            with contextlib.suppress(OSError):
                self._wake_write.send(b"x")
            self._thread.join()
            self._wake_write.close()
            self._wake_read.close()
            self._closed = True

    def _run(self) -> None:
        try:
            while not self._closing:
                self._expire()
                accepting = True
                for key, _ in self._selector.select(self._patience()):
                    if key.fileobj is self._listener:
                        accepting = self._accept()
                    elif key.fileobj is not self._wake_read:
                        peer = self._peers.get(key.fd)
                        if peer is not None and peer.sock is key.fileobj:
                            self._serve(peer)
                if not accepting:  # out of descriptors: leave the backlog alone for a moment instead of spinning
                    time.sleep(0.05)
        finally:
            for peer in list(self._peers.values()):
                self._drop(peer)
            self._selector.close()
            self._listener.close()

    def _patience(self) -> float | None:
        oldest = next(iter(self._peers.values()), None)
        return None if oldest is None else max(0.0, oldest.deadline - time.monotonic())

    def _expire(self) -> None:
        now = time.monotonic()
        while self._peers:
            oldest = next(iter(self._peers.values()))
            if oldest.deadline > now:
                return
            self._drop(oldest)

    def _accept(self) -> bool:
        for _ in range(64):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return True
            except OSError:
                return False
            sock.setblocking(False)
            while len(self._peers) >= self._max_peers:
                self._drop(next(iter(self._peers.values())))
            # Every peer has the same time, so insertion order is the order of deadlines.
            self._peers[sock.fileno()] = _Peer(sock, time.monotonic() + self._peer_timeout)
            self._selector.register(sock, selectors.EVENT_READ)
        return True

    def _drop(self, peer: _Peer) -> None:
        self._peers.pop(peer.sock.fileno(), None)
        self._buffered -= len(peer.received)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.sock)
        peer.sock.close()

    def _serve(self, peer: _Peer) -> None:
        try:
            if peer.reply is not None:
                self._send(peer)
            elif peer.finishing:
                if not peer.sock.recv(_RECEIVE):
                    self._drop(peer)
            else:
                self._receive(peer)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)

    def _receive(self, peer: _Peer) -> None:
        data = peer.sock.recv(_RECEIVE)
        if not data:
            self._drop(peer)
            return
        peer.received += data
        self._buffered += len(data)
        if len(peer.received) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(peer.received)
            if not 1 <= length <= MAX_DESCRIPTOR_BYTES:
                self._drop(peer)
                return
            if len(peer.received) >= _HEADER.size + length:
                self._answer(peer, length)
                return
        if self._buffered > self._max_buffered:
            self._drop(max(self._peers.values(), key=lambda each: len(each.received)))

    def _answer(self, peer: _Peer, length: int) -> None:
        kind = peer.received[_HEADER.size]
        body = bytes(peer.received[_HEADER.size + 1 : _HEADER.size + length])
        self._buffered -= len(peer.received)
        peer.received = bytearray()
        try:
            json.loads(body)
        except (ValueError, RecursionError):
            self._drop(peer)
            return
        if kind == METADATA:
            try:
                answer = self._provide()
            except Exception:  # whatever the owner's function does, the endpoint stays up for the next peer
                answer = b""
            if not answer:
                self._drop(peer)
                return
            self.answered += 1
        else:
            kind, answer = _FIXED_ANSWERS.get(kind, _FIXED_ANSWERS[CONNECTION])
        if not answer.endswith(b"\n"):
            answer += b"\n"
        peer.reply = memoryview(_HEADER.pack(len(answer) + 1) + bytes((kind,)) + answer)
        self._send(peer)

    def _send(self, peer: _Peer) -> None:
        reply = peer.reply
        if reply is None:
            return
        try:
            peer.reply = reply = reply[peer.sock.send(reply) :]
        except BlockingIOError:
            pass
        if reply:
            self._selector.modify(peer.sock, selectors.EVENT_WRITE)
            return
        peer.reply = None
        peer.finishing = True
        # Now the asker closes; closing first could reset the connection under an answer not read yet. The deadline
        # bounds the wait.
        peer.sock.shutdown(socket.SHUT_WR)
        self._selector.modify(peer.sock, selectors.EVENT_READ)


def fetch_descriptor(endpoint: str, timeout: float = 5.0) -> SegmentDescriptor:
    """Ask ``host:port`` for its descriptor, as a stock consumer would. ``timeout`` bounds the whole exchange, but for
    the look-up of a name.

    Raises `EndpointUnreachable`, `DescriptorError`, or `UsageError` for what is no endpoint.
    """
    host, port = split_endpoint(endpoint)
    deadline = time.monotonic() + timeout
    try:
        with _connect(host, port, deadline) as sock:
            request = b"{}\n"
            sock.sendall(_HEADER.pack(len(request) + 1) + bytes((METADATA,)) + request)
            header = _read(sock, _HEADER.size + 1, deadline)
            (length,) = _HEADER.unpack_from(header)
            if not 1 <= length <= MAX_DESCRIPTOR_BYTES:
                raise DescriptorError(
                    f"the answer to a handshake claims {length} bytes; {MAX_DESCRIPTOR_BYTES} are allowed",
                    where=endpoint,
                    hint="see what listens there: it does not look like a Mooncake endpoint",
                )
            if header[-1] != METADATA:
                raise DescriptorError(
                    f"the answer to a handshake has type {header[-1]}, not {METADATA}",
                    where=endpoint,
                    hint="see what listens there: it does not look like a Mooncake endpoint",
                )
            data = _read(sock, length - 1, deadline)
    except (OSError, EOFError, UnicodeError) as error:
        reason = "not in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        raise EndpointUnreachable(
            f"no segment descriptor: {reason}",
            where=endpoint,
            hint="see whether its provider is alive (egmctl status there) and reachable from here",
        ) from error
    return parse_descriptor(data, where=endpoint)


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    failure: OSError = TimeoutError()
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(address)
            return sock
        except OSError as error:
            sock.close()
            failure = error
    raise failure


def _read(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        piece = sock.recv(min(nbytes - len(data), _RECEIVE))
        if not piece:
            raise EOFError("the connection was closed without an answer")
        data += piece
    return bytes(data)
