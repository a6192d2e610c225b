"""A small Master that speaks the real wire protocol, for what a real one cannot be made to do.

It keeps segments, clients and one-replica objects in memory, and can be told, call by call, to refuse with a number,
to say nothing, to answer garbage, or to answer as a later version would, with fields that nobody knows yet.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from egmctl.mooncake import calls
from egmctl.mooncake.codec import Failure, Message, decode, encode, type_hash, write_message
from egmctl.mooncake.link import function_id
from tests.support.master import free_port

__all__ = ["FakeMaster"]

_REQUEST = struct.Struct("<BBBBIIII")
_ANSWER = struct.Struct("<BBBBIII")

# Answer types by call, and the same as a later Master may have them: each struct with a field more, each list of
# alternatives longer. Built by hand from the literals; 0b is a bool, 04 a u64, 800c a string.
_REPLICA = calls.REPLICAS_ANSWER[2:-1]
_NEWER_REPLICA = _REPLICA[:-1] + b"\x0b\xff"
_ANSWERS: dict[str, tuple[bytes, bytes]] = {
    "ServiceReady": (calls.STRING_ANSWER, calls.STRING_ANSWER),
    "Ping": (calls.PING_ANSWER, bytes.fromhex("87fd0301800c04ff01")),
    "MountSegment": (calls.VOID_ANSWER, calls.VOID_ANSWER),
    "ReMountSegment": (calls.VOID_ANSWER, calls.VOID_ANSWER),
    "UnmountSegment": (calls.VOID_ANSWER, calls.VOID_ANSWER),
    "GracefulUnmountSegment": (calls.VOID_ANSWER, calls.VOID_ANSWER),
    "QuerySegmentStatus": (calls.INT_ANSWER, calls.INT_ANSWER),
    "QuerySegmentStatusById": (calls.INT_ANSWER, calls.INT_ANSWER),
    "FetchTasks": (calls.TASKS_ANSWER, bytes.fromhex("8784fdfd04048989ff01800c0302800cff01")),
    "MarkTaskToComplete": (calls.VOID_ANSWER, calls.VOID_ANSWER),
    "PutStart": (calls.REPLICAS_ANSWER, b"\x87\x84" + _NEWER_REPLICA + b"\x01"),
    "PutEnd": (calls.VOID_ANSWER, calls.VOID_ANSWER),
    "PutRevoke": (calls.VOID_ANSWER, calls.VOID_ANSWER),
    "GetReplicaList": (calls.LOCATED_ANSWER, b"\x87\xfd\x84" + _NEWER_REPLICA + bytes.fromhex("048504800cff01")),
    "Remove": (calls.VOID_ANSWER, calls.VOID_ANSWER),
}
_BY_ID = {function_id(name): name for name in _ANSWERS}


class FakeMaster:
    """``with FakeMaster() as master:`` - listening when entered. Settings may be changed at any time.

    ``refuse`` maps a call to the number it is refused with; ``silent`` are calls that are received, carried out and
    never answered (``deaf``: not carried out either); ``garbage`` maps a call to the bytes that its answer is made of,
    the frame around them included when it is a callable; ``newer`` makes all answers those of a later version.
    ``expiry`` is how long a client that does not ping is kept. ``log`` has (call, arguments) in order of arrival.
    """

    def __init__(self, *, expiry: float = 3.0) -> None:
        self.expiry = expiry
        self.refuse: dict[str, int] = {}
        self.silent: set[str] = set()
        self.deaf: set[str] = set()
        self.garbage: dict[str, bytes | Callable[[int], bytes]] = {}
        self.newer = False
        self.tasks: list[tuple[Any, ...]] = []
        self.completed: list[tuple[Any, ...]] = []
        self.log: list[tuple[str, Any]] = []
        self.segments: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.owners: dict[tuple[int, int], tuple[int, int]] = {}
        self.settled: set[tuple[int, int]] = set()
        self.pinged: dict[tuple[int, int], float] = {}
        self.objects: dict[str, list[Any]] = {}
        self._mutex = threading.Lock()
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self.port = free_port()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    admin_address = None

    # Its life

    def __enter__(self) -> FakeMaster:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        with self._mutex:
            for sock in self._connections:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """As if restarted empty, or as if every client had expired."""
        with self._mutex:
            self.segments.clear()
            self.owners.clear()
            self.settled.clear()
            self.objects.clear()

    def calls(self, name: str) -> list[Any]:
        with self._mutex:
            return [arguments for call, arguments in self.log if call == name]

    # Its connections

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with self._mutex:
                self._connections.add(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock, sock.makefile("rb") as stream:
                while len(head := stream.read(_REQUEST.size)) == _REQUEST.size:
                    _, _, _, _, seq, number, length, attachment = _REQUEST.unpack(head)
                    body = stream.read(length)
                    stream.read(attachment)
                    answer = self._answer(_BY_ID.get(number, ""), seq, body)
                    if answer:
                        sock.sendall(answer)
        except OSError:
            pass
        finally:
            with self._mutex:
                self._connections.discard(sock)

    def _answer(self, call: str, seq: int, body: bytes) -> bytes:
        if not call:
            text = write_message(Message(b"\x80\x0c", "the rpc function not registered"))
            return _ANSWER.pack(21, 0, 11, 0, seq, len(text), 0) + text
        arguments = decode(body).value if body else None
        with self._mutex:
            self.log.append((call, arguments))
            self._expire()
            if call in self.deaf:
                return b""
            number = self.refuse.get(call)
            value = Failure(number) if number is not None else getattr(self, f"_do_{call}")(arguments)
        if call in self.silent:
            return b""
        garbage = self.garbage.get(call)
        if callable(garbage):
            return garbage(seq)
        data = self._encode(call, value) if garbage is None else garbage
        return _ANSWER.pack(21, 0, 0, 0, seq, len(data), 0) + data

    def refused(self, call: str, number: int, seq: int) -> bytes:
        """The whole frame of a refusal."""
        data = self._encode(call, Failure(number))
        return _ANSWER.pack(21, 0, 0, 0, seq, len(data), 0) + data

    def _encode(self, call: str, value: Any) -> bytes:
        old, new = _ANSWERS[call]
        if not self.newer:
            return write_message(Message(old, value))
        # Later fields, in the type; and compatible ones, behind the payload, that no type mentions.
        tail = os.urandom(7)
        payload, width = encode(new, _extended(call, value))
        rest = new + b"\0" + payload + tail
        total = struct.pack("<H", 7 + len(rest))
        return struct.pack("<I", type_hash(new) | 1) + bytes((5 | width << 3,)) + total + rest

    # What the calls do

    def _expire(self) -> None:
        now = time.monotonic()
        for client in [c for c, at in self.pinged.items() if now - at > self.expiry]:
            del self.pinged[client]
            self.settled.discard(client)
            for segment in [s for s, owner in self.owners.items() if owner == client]:
                del self.owners[segment], self.segments[segment]

    def _do_ServiceReady(self, _: Any) -> str:
        return "2.0.0"

    def _do_Ping(self, client: Any) -> tuple[int, int]:
        client = tuple(client)
        self.pinged[client] = time.monotonic()
        return 0, 1 if client in self.settled else 2

    def _do_MountSegment(self, arguments: Any) -> None:
        segment, client = arguments
        self.segments[tuple(segment[0])] = segment
        self.owners[tuple(segment[0])] = tuple(client)
        self.pinged.setdefault(tuple(client), time.monotonic())

    def _do_ReMountSegment(self, arguments: Any) -> None:
        segments, client = arguments
        for segment in segments:
            self._do_MountSegment((segment, client))
        self.settled.add(tuple(client))

    def _do_UnmountSegment(self, arguments: Any) -> None:
        self.segments.pop(tuple(arguments[0]), None)
        self.owners.pop(tuple(arguments[0]), None)

    def _do_GracefulUnmountSegment(self, arguments: Any) -> Failure | None:
        return None if tuple(arguments[0]) in self.segments else Failure(-600)

    def _do_QuerySegmentStatus(self, name: Any) -> Any:
        return 1 if any(s[1] == name for s in self.segments.values()) else Failure(-101)

    def _do_QuerySegmentStatusById(self, segment: Any) -> Any:
        return 1 if tuple(segment) in self.segments else Failure(-101)

    def _do_FetchTasks(self, arguments: Any) -> list[Any]:
        tasks, self.tasks = self.tasks, []
        return tasks

    def _do_MarkTaskToComplete(self, arguments: Any) -> None:
        self.completed.append(arguments[1])

    def _do_PutStart(self, arguments: Any) -> Any:
        _, key, size, config, _ = arguments
        segments = sorted(self.segments.values(), key=lambda s: s[1] not in config[6])
        if not segments:
            return Failure(-200)
        segment = segments[0]
        replica = (1, (0, ((size, segment[2], segment[5], segment[4]),)), 2)
        self.objects[key] = [replica]
        return [replica]

    def _do_PutEnd(self, arguments: Any) -> Any:
        key = arguments[1][0]
        if key not in self.objects:
            return Failure(-704)
        self.objects[key] = [(*replica[:2], 3) for replica in self.objects[key]]
        return None

    def _do_PutRevoke(self, arguments: Any) -> Any:
        return None if self.objects.pop(arguments[1], None) else Failure(-704)

    def _do_GetReplicaList(self, arguments: Any) -> Any:
        replicas = self.objects.get(arguments[0])
        return (replicas, 1000, None) if replicas else Failure(-704)

    def _do_Remove(self, arguments: Any) -> Any:
        return None if self.objects.pop(arguments[0], None) else Failure(-704)


def _extended(call: str, value: Any) -> Any:
    """``value`` with what a later version adds."""
    if isinstance(value, Failure):
        return value
    if call == "Ping":
        return *value, "region", 7
    if call == "FetchTasks":
        return [(*task, "later") for task in value]
    if call == "PutStart":
        return [(*replica, True) for replica in value]
    if call == "GetReplicaList":
        return [(*replica, True) for replica in value[0]], *value[1:], "later"
    return value
