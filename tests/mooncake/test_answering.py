"""What the endpoint and the health endpoint share; the rest is shown on them (`test_handshake`, `test_health`)."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import pytest

from egmctl.errors import FailedError
from egmctl.mooncake.answering import AnsweringServer
from egmctl.mooncake.handshake import HandshakeServer
from egmctl.mooncake.listening import listen
from egmctl.provider.health import HealthServer


class Echo(AnsweringServer):
    """Answers a line with itself; hangs up on an empty one."""

    def __init__(self) -> None:
        listener = listen("127.0.0.1", 0)
        self.address = listener.getsockname()
        super().__init__(
            listener, name="echo", what="echo", where="here", timeout=5.0, max_peers=4, max_buffered=1 << 20
        )

    def answer(self, received: bytearray) -> bytes | None:
        line, end, _ = received.partition(b"\n")
        return bytes(line) if end else None


@pytest.mark.parametrize(
    ("pieces", "answer"), [([b"a\n"], b"a"), ([b"a", b"b\n"], b"ab"), ([b"\n"], b""), ([b"a\nmore\n"], b"a")]
)
def test_a_peer_is_answered_once_when_its_request_is_complete(pieces: list[bytes], answer: bytes) -> None:
    server = Echo()
    try:
        with socket.create_connection(server.address, timeout=5) as sock:
            for piece in pieces:
                sock.sendall(piece)
            received = b""
            while data := sock.recv(100):
                received += data
        assert received == answer
    finally:
        server.stop()
        server.stop()
    assert not any(thread.name == "echo" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("what", "make"),
    [
        ("endpoint", lambda: HandshakeServer("127.0.0.1")),
        ("health endpoint", lambda: HealthServer("127.0.0.1:0")),
    ],
)
def test_without_a_thread_it_is_refused_and_nothing_stays_open(
    what: str, make: Callable[[], AnsweringServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FailedError, match=f"no thread for the {what}: can't") as caught:
        make()
    assert "ulimit" in caught.value.hint
    assert "127.0.0.1:" in caught.value.where
    assert len(os.listdir("/proc/self/fd")) == len(before)
