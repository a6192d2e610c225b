"""A proxy between an agent and its Master that sees single requests and answers, and may lose, hold or repeat any.

Frames are told apart by their headers: 20 bytes before a request (number, function, length), 16 before an answer. A
request that is held is passed on later even when whoever sent it has long closed the connection: what a network, or
a busy Master, may do to a request that was handed over.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from egmctl.mooncake.link import function_id

__all__ = ["CALLS", "Passed", "Proxy", "Verdict"]

_REQUEST = struct.Struct("<BBBBIIII")
_ANSWER = struct.Struct("<BBBBIII")
CALLS = (
    "ServiceReady",
    "Ping",
    "MountSegment",
    "ReMountSegment",
    "UnmountSegment",
    "GracefulUnmountSegment",
    "QuerySegmentStatusById",
    "QuerySegmentStatus",
    "FetchTasks",
    "PutStart",
    "PutEnd",
    "PutRevoke",
    "GetReplicaList",
    "Remove",
)
_NAMES = {function_id(name): name for name in CALLS}


@dataclass(frozen=True)
class Verdict:
    """What becomes of one request: ``hold`` seconds before it is passed on, whether it is at all, whether its answer
    is, how often the answer comes, and whether the connection is cut once the Master has the request (``cut``) or as
    soon as the request was sent, which goes its way all the same (``orphan``)."""

    hold: float = 0.0
    deliver: bool = True
    answer: bool = True
    copies: int = 1
    cut: bool = False
    orphan: bool = False


@dataclass
class Passed:
    """One request as it went by. Times are monotonic seconds; None: not yet, or never. ``coming``: the Master does not
    have it, and will."""

    call: str
    connection: int
    body: bytes
    seen: float
    delivered: float | None = None
    answered: float | None = None
    coming: bool = False


@dataclass(eq=False)
class _Pair:
    number: int
    near: socket.socket
    far: socket.socket
    waiting: dict[int, tuple[Passed, Verdict]] = field(default_factory=dict)
    mutex: threading.Lock = field(default_factory=threading.Lock)


class Proxy:
    """``with Proxy(master.address) as proxy:`` - listening at ``proxy.address``. ``judge(call, nth)`` gives the
    `Verdict` on the ``nth`` request of that name (from 1); one at a time."""

    def __init__(self, target: str, judge: Callable[[str, int], Verdict] | None = None) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.judge = judge or (lambda call, nth: Verdict())
        self.log: list[Passed] = []
        self.counts: dict[str, int] = {}
        self._mutex = threading.Lock()
        self._pairs: list[_Pair] = []
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def __enter__(self) -> Proxy:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._start(self._accept)
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._mutex:
            pairs = list(self._pairs)
        for pair in pairs:
            for sock in (pair.near, pair.far):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(5)
        for pair in pairs:
            pair.near.close()
            pair.far.close()

    def of(self, call: str) -> list[Passed]:
        with self._mutex:
            return [one for one in self.log if one.call == call]

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        with self._mutex:
            self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=5)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            with self._mutex:
                pair = _Pair(len(self._pairs), near, far)
                self._pairs.append(pair)
            self._start(self._requests, pair)
            self._start(self._answers, pair)

    def _requests(self, pair: _Pair) -> None:
        with suppress(OSError):
            while (head := _read(pair.near, _REQUEST.size)) is not None:
                _, _, _, _, seq, function, length, attachment = _REQUEST.unpack(head)
                body = _read(pair.near, length + attachment)
                if body is None:
                    break
                self._request(pair, seq, _NAMES.get(function, str(function)), head, body)
        # The sender has gone; what it handed over may still be on its way, and so the far side stays as it is.

    def _request(self, pair: _Pair, seq: int, call: str, head: bytes, body: bytes) -> None:
        with self._mutex:
            nth = self.counts[call] = self.counts.get(call, 0) + 1
            passed = Passed(call, pair.number, body, time.monotonic())
            self.log.append(passed)
            verdict = self.judge(call, nth)
            passed.coming = verdict.deliver
        if verdict.orphan:
            with suppress(OSError):
                pair.near.shutdown(socket.SHUT_RDWR)
        if verdict.hold:
            self._closing.wait(verdict.hold)  # and with it whatever comes after on this connection
        if not verdict.deliver:
            return
        with pair.mutex:
            pair.waiting[seq] = (passed, verdict)
        passed.delivered = time.monotonic()
        pair.far.sendall(head + body)

    def _answers(self, pair: _Pair) -> None:
        with suppress(OSError):
            while (head := _read(pair.far, _ANSWER.size)) is not None:
                seq, length, attachment = _ANSWER.unpack(head)[4:]
                body = _read(pair.far, length + attachment)
                if body is None:
                    break
                with pair.mutex:
                    passed, verdict = pair.waiting.pop(seq, (None, Verdict()))
                if passed is not None:
                    passed.answered = time.monotonic()
                    passed.coming = False
                if verdict.cut:
                    with suppress(OSError):
                        pair.near.shutdown(socket.SHUT_RDWR)
                elif verdict.answer:
                    with suppress(OSError):
                        pair.near.sendall((head + body) * verdict.copies)
        with suppress(OSError):
            pair.near.shutdown(socket.SHUT_RDWR)  # the Master is gone


def _read(sock: socket.socket, nbytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < nbytes:
        piece = sock.recv(nbytes - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)
