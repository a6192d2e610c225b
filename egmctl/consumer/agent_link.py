"""The consumer's side of an agent's control socket: is the peer who it should be, does it live, and give me a chunk."""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from egmctl.consumer.errors import ProviderGone, StaleAllocation, Unreachable
from egmctl.memory.base import Share

__all__ = ["Watch", "check_peer", "export"]

_ROOT = 0
_MAX_LINE = 1 << 20
_MAX_FDS = 64  # the agent sends at most so many with one message


def _connect(path: str, timeout: float) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + timeout
    try:
        link.settimeout(timeout)
        while True:
            try:
                link.connect(path)
                break
            except BlockingIOError:  # the agent's backlog is full: with a time limit set, the kernel does not wait
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.02)
        check_peer(link, path)
    except PermissionError as error:
        link.close()
        raise Unreachable(
            "the agent's control socket may not be opened by this user",
            where=path,
            hint='run as the pool\'s user, or name a group of yours in the spec (group = "...")',
        ) from error
    except OSError as error:
        link.close()
        raise ProviderGone(
            f"the agent does not answer on its control socket: {error.strerror or error}",
            where=path,
            hint="see `egmctl status`; a pool whose agent died needs `egmctl teardown`",
        ) from error
    except BaseException:
        link.close()
        raise
    return link


def check_peer(link: socket.socket, path: str) -> None:
    """Refuse (`Unreachable`) a peer that is neither root, nor this user, nor the owner of the socket's folder: anybody
    could listen at a path that a descriptor names."""
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    if uid in (_ROOT, os.geteuid()):
        return
    with suppress(OSError):
        if os.stat(os.path.dirname(path)).st_uid == uid:
            return
    raise Unreachable(
        f"whoever listens there (uid {uid}) is neither root, nor this user, nor the owner of the folder",
        where=path,
        hint="find out who made this socket before using the pool",
    )


def _ask(link: socket.socket, request: dict[str, Any], timeout: float) -> tuple[dict[str, Any], list[int], bytes]:
    """One request; its result, the descriptors that came with it (the caller's to close) and what followed the line."""
    path = link.getpeername()
    until = time.monotonic() + timeout
    fds: list[int] = []
    received = b""
    try:
        link.sendall(json.dumps(request).encode() + b"\n")
        while True:
            while b"\n" not in received:
                left = until - time.monotonic()
                if left <= 0 or len(received) > _MAX_LINE:
                    raise TimeoutError("timed out" if left <= 0 else "the answer is too long")
                link.settimeout(left)
                data, ancillary, flags, _ = link.recvmsg(
                    1 << 16, socket.CMSG_SPACE(_MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
                )
                for level, kind, payload in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        numbers = array.array("i")
                        numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                        fds.extend(numbers)
                if flags & socket.MSG_CTRUNC:
                    raise OSError("descriptors were lost (is the limit of open files reached?)")
                if not data:
                    raise ConnectionError("it hung up")
                received += data
            line, _, received = received.partition(b"\n")
            answer = json.loads(line)
            if not isinstance(answer, dict):
                raise ValueError("not an object")
            if "event" in answer and "ok" not in answer:
                continue
            break
    except (OSError, ValueError, RecursionError) as error:
        _close(fds)
        raise ProviderGone(
            f"the agent gave no usable answer to {request['op']!r}: {error}",
            where=str(path),
            hint="see `egmctl status` and the agent's log",
        ) from error
    except BaseException:
        _close(fds)
        raise
    if answer.get("ok") is not True or not isinstance(answer.get("result"), dict):
        _close(fds)
        error_document = answer.get("error")
        told = error_document if isinstance(error_document, dict) else {}
        # "usage" is what it says to a user whom the pool does not let in; all else may be different the next time.
        refusal = Unreachable if told.get("code") == "usage" else StaleAllocation
        raise refusal(
            f"the agent refused {request['op']!r}: {told.get('message', 'no reason given')}",
            where=str(path),
            hint=str(told.get("hint", "")),
        )
    return answer["result"], fds, received


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)


def export(path: str, index: int, nonce: str, address: int, nbytes: int, timeout: float) -> Share:
    """The share of one chunk of the incarnation ``nonce``, published as ``nbytes`` at ``address``; its descriptor is
    the caller's to close.

    Raises `StaleAllocation` when another incarnation answers or the chunk is gone, `ProviderGone` when nobody does.
    """
    link = _connect(path, timeout)
    try:
        result, fds, _ = _ask(link, {"op": "export", "chunks": [index]}, timeout)
    finally:
        link.close()
    try:
        if result.get("nonce") != nonce:
            raise StaleAllocation(
                "another incarnation of the agent answers", where=path, hint="locate the object again"
            )
        rows = result.get("chunks")
        if not isinstance(rows, list) or len(rows) != 1 or len(fds) != 1 or not isinstance(rows[0], dict):
            raise ProviderGone(f"the answer to 'export' does not hold exactly one chunk ({len(fds)} fds)", where=path)
        row = rows[0]
        kind, node = row.get("kind"), row.get("numa_node")
        found = (row.get("index"), row.get("address"), row.get("nbytes"))
        if kind not in ("shm", "cuda-posix") or found != (index, address, nbytes):
            raise StaleAllocation(
                f"chunk {index} is not what was published", where=path, hint="locate the object again"
            )
        return Share(kind, int(node or 0), nbytes, fd=fds.pop())
    finally:
        _close(fds)


class Watch:
    """An open connection to one incarnation of an agent: it ends when the agent does, which the kernel says at once.

    ``nonce`` is that incarnation's. `alive` never waits.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self._link = _connect(path, timeout)
        self._lock = threading.Lock()
        self.withdrawn: set[int] = set()
        try:
            result, fds, self._pending = _ask(self._link, {"op": "watch"}, timeout)
            _close(fds)
            self.nonce = str(result.get("nonce", ""))
            self._link.setblocking(False)
        except BaseException:
            self._link.close()
            raise
        self._alive = self._take()

    def alive(self) -> bool:
        """False for good once the agent has closed its end; also takes in what it has said of withdrawn chunks."""
        with self._lock:
            return self._look()

    def _look(self) -> bool:
        if not self._alive:
            return False
        try:
            while True:
                data = self._link.recv(1 << 16)
                if not data:
                    break
                self._pending += data
                if not self._take():
                    break
        except BlockingIOError:
            return self._alive
        except OSError:
            pass
        self._alive = False
        return False

    def _take(self) -> bool:
        *lines, self._pending = self._pending.split(b"\n")
        if len(self._pending) > _MAX_LINE:
            return False
        for line in lines:
            try:
                event = json.loads(line)
                if isinstance(event, dict) and event.get("event") == "withdrawn":
                    self.withdrawn.update(int(index) for index in event["chunks"])
            except (ValueError, KeyError, TypeError, RecursionError):
                return False
        return True

    def fileno(self) -> int:
        return self._link.fileno()

    def close(self) -> None:
        with self._lock:
            self._alive = False
            self._link.close()
