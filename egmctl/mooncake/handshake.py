"""The endpoint of a pool: answers whoever asks for the segment descriptor, in Mooncake's P2P handshake.

A message is its length (u64, little-endian, the type byte counted), a type byte, and JSON. Messages are bounded, and
nothing a peer sends is kept.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable

from egmctl.errors import FailedError
from egmctl.mooncake.answering import AnsweringServer
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


class HandshakeServer(AnsweringServer):
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
        self._closed = False
        self.answered = 0
        """Descriptors sent, for status and tests."""
        listener = listen(host, port)
        self.host = host
        self.port: int = listener.getsockname()[1]
        self.endpoint = format_endpoint(host, self.port)
        super().__init__(
            listener,
            name=f"handshake-{self.port}",
            what="endpoint",
            where=self.endpoint,
            timeout=peer_timeout,
            max_peers=max_peers,
            max_buffered=max_buffered,
        )

    def __enter__(self) -> HandshakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, drop the peers, end the thread. Twice is success."""
        if self._closed:
            return
        with step("handshake.close", port=self.port):
            self.stop()
            self._closed = True

    def answer(self, received: bytearray) -> bytes | None:
        if len(received) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(received)
        if not 1 <= length <= MAX_DESCRIPTOR_BYTES:
            return b""
        if len(received) < _HEADER.size + length:
            return None
        kind = received[_HEADER.size]
        try:
            json.loads(bytes(received[_HEADER.size + 1 : _HEADER.size + length]))
        except (ValueError, RecursionError):
            return b""
        if kind == METADATA:
            try:
                reply = self._provide()
            except Exception:  # whatever the owner's function does, the endpoint stays up for the next peer
                reply = b""
            if not reply:
                return b""
            self.answered += 1
        else:
            kind, reply = _FIXED_ANSWERS.get(kind, _FIXED_ANSWERS[CONNECTION])
        if not reply.endswith(b"\n"):
            reply += b"\n"
        return _HEADER.pack(len(reply) + 1) + bytes((kind,)) + reply


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
