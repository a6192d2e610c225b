"""One TCP connection to a Master and the answers expected on it: coro_rpc frames, matched by number.

Nobody reads while nobody waits. The first thread that waits reads, for itself and for all others, and hands the
reading on when it has its own answer: a lone call costs no change of threads. Only an answer that somebody wants to
be told of, or that came too late for its caller, is waited for by a thread of its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, TypeVar

from egmctl.mooncake.codec import decode
from egmctl.mooncake.errors import CodecError, MasterLost, MasterRpcError, MasterUnreachable
from egmctl.mooncake.reply import Reply

__all__ = ["MAX_BODY", "MAX_IN_FLIGHT", "Link", "NotSent", "function_id"]

T = TypeVar("T")

MAX_BODY: Final = 64 << 20  # an answer to 70,000 keys has some 8 MB
MAX_IN_FLIGHT: Final = 4096
_MAGIC: Final = 21
_REQUEST: Final = struct.Struct("<BBBBIIII")
_ANSWER: Final = struct.Struct("<BBBBIII")
_READ: Final = 1 << 18
_LOOK: Final = 100e-6 if len(os.sched_getaffinity(0)) >= 4 else 0.0
"""Seconds for which an answer is looked for again and again before this thread sleeps: a Master nearby has answered by
then, and being woken takes as long as the answer does. Where CPUs are few, the Master needs this one."""

_log = logging.getLogger(__name__)


@lru_cache(maxsize=256)
def function_id(function: str) -> int:
    """coro_rpc's number of a method of the Master: the start of MD5 of its full C++ name."""
    name = f"mooncake::WrappedMasterService::{function}".encode()
    return int.from_bytes(hashlib.md5(name, usedforsecurity=False).digest()[:4], "big")


class NotSent(Exception):
    """The connection was gone before the request was handed over whole."""


class Link:
    """One TCP connection, from connect to its end. ``lock`` guards everything but the two directions themselves."""

    def __init__(self, sock: socket.socket, where: str, epoch: int) -> None:
        self.sock = sock
        self.where = where
        self.epoch = epoch
        self.lock = threading.Lock()
        self.sending = threading.Lock()
        self.pending: dict[int, Reply[Any]] = {}
        self.followers: list[threading.Lock] = []
        self.reading = False
        self.watcher = False
        self.dead: str | None = None
        self.closed = False
        self.next_seq = 0
        self.scratch = bytearray(_READ)  # kept: a fresh buffer for each read costs more than the read
        self.rest = bytearray()
        self.fd = sock.fileno()
        self.input = select.poll()
        self.input.register(self.fd, select.POLLIN)
        self.ends = select.poll()
        self.ends.register(self.fd, select.POLLRDHUP | select.POLLHUP | select.POLLERR)

    # -- sending

    def send(self, function: str, body: bytes, deadline: float, convert: Callable[[bytes], T]) -> Reply[T]:
        with self.lock:
            if self.dead is not None:
                raise NotSent(self.dead)
            if len(self.pending) >= MAX_IN_FLIGHT:
                raise MasterUnreachable(
                    f"{function}: {MAX_IN_FLIGHT} requests wait for an answer; this one was not sent", where=self.where
                )
            seq = self.next_seq = (self.next_seq + 1) & 0xFFFFFFFF
            reply = Reply(self, function, seq, deadline, convert, body)
            self.pending[seq] = reply
        frame = _REQUEST.pack(_MAGIC, 0, 0, 0, seq, function_id(function), len(body), 0) + body
        sent = 0
        # Another thread may be stuck in a long send: waiting for it counts against the deadline too.
        if self.sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
            try:
                if self.dead is None:
                    sent = self._push(frame, deadline)
            except OSError as error:
                self.fail(_reason(error))
            except BaseException:
                self.fail("sending was interrupted")
                raise
            finally:
                self.sending.release()
                self._tidy()
        if sent == len(frame):
            return reply
        if sent:
            self.fail("a request was cut short")  # the stream is out of step: nothing more can be said on it
        with self.lock:
            self.pending.pop(seq, None)
        if self.dead is not None:
            raise NotSent(self.dead)  # a request of which a part is missing is never carried out
        raise MasterUnreachable(
            f"{function}: the Master took too long to accept the request; it was not handed over",
            where=self.where,
            hint="check that the Master runs and is not overloaded",
        )

    def _push(self, frame: bytes, deadline: float) -> int:
        """Hand the frame to the kernel; how much of it went."""
        try:
            sent = self.sock.send(frame)
        except BlockingIOError:
            sent = 0
        if sent == len(frame):
            return sent
        view = memoryview(frame)
        output = select.poll()
        output.register(self.fd, select.POLLOUT)
        while sent < len(frame) and time.monotonic() < deadline and self.dead is None:
            # The Master may be stuck writing answers that nobody reads, and so not read us: read them meanwhile.
            if self._take_reading():
                try:
                    self._read_some(0.0)
                finally:
                    self._leave_reading()
            output.poll(20)
            try:
                sent += self.sock.send(view[sent:])
            except BlockingIOError:
                continue
            except OSError as error:
                self.fail(_reason(error))
        return sent

    # -- reading

    def wait(self, reply: Reply[Any], deadline: float) -> bool:
        """Until the reply is finished (True) or the deadline has passed, reading for everybody if nobody does."""
        while not reply.finished:
            gate = None
            with self.lock:
                if reply.finished:
                    break
                if self.reading:
                    gate = threading.Lock()
                    gate.acquire()
                    reply._gates.append(gate)
                    self.followers.append(gate)
                else:
                    self.reading = True
            left = deadline - time.monotonic()
            if gate is not None:
                woken = gate.acquire(timeout=max(0.0, left))
                with self.lock:
                    reply._gates.remove(gate)
                    if gate in self.followers:
                        self.followers.remove(gate)
                    elif not reply.finished and not woken:
                        woken = True  # picked as the next reader at the last moment: somebody has to take it over
                if not woken and not reply.finished:
                    return False
                if not reply.finished and deadline <= time.monotonic():
                    self._wake_follower()
                    return False
                continue
            try:
                self._read_some(max(0.0, left))
                while not reply.finished and (left := deadline - time.monotonic()) > 0:
                    self._read_some(left)
            finally:
                self._leave_reading()
            if not reply.finished:
                return False
        return True

    def watch(self) -> None:
        """Have a thread wait for answers that nobody waits for, until there are none outstanding."""
        with self.lock:
            if self.watcher or self.dead is not None or not self.pending:
                return
            self.watcher = True
        threading.Thread(target=self._watch, name=f"egmctl-rpc-{self.epoch}", daemon=True).start()

    def _watch(self) -> None:
        while True:
            gate = None
            with self.lock:
                if self.dead is not None or not self.pending:
                    self.watcher = False
                    return
                if self.reading:
                    gate = threading.Lock()
                    gate.acquire()
                    self.followers.append(gate)
                else:
                    self.reading = True
            if gate is not None:
                gate.acquire()
                continue
            try:
                self._read_some(60.0)
            finally:
                self._leave_reading()

    def _take_reading(self) -> bool:
        with self.lock:
            if self.reading or self.dead is not None:
                return False
            self.reading = True
            return True

    def _leave_reading(self) -> None:
        with self.lock:
            self.reading = False
        self._wake_follower()
        self._tidy()

    def _wake_follower(self) -> None:
        with self.lock:
            if self.followers and not self.reading:
                self.followers.pop(0).release()

    def _read_some(self, timeout: float) -> None:
        """Wait for bytes up to ``timeout`` seconds, and finish what they answer. Only for whoever holds ``reading``."""
        if self.dead is not None:
            return
        try:
            if not self._readable(timeout):
                return
            count = self.sock.recv_into(self.scratch)
        except BlockingIOError:
            return
        except OSError as error:
            self.fail(_reason(error))
            return
        except BaseException:
            self.fail("reading was interrupted")  # bytes may be lost: the stream cannot be read on
            raise
        if not count:
            self.fail("the Master closed the connection")
            return
        try:
            self._take(count)
        except CodecError as error:
            self.fail(error.message)

    def _readable(self, timeout: float) -> bool:
        poll = self.input.poll
        until = time.monotonic() + min(_LOOK, timeout)
        while not poll(0):
            if time.monotonic() >= until:
                return timeout > 0 and bool(poll(timeout * 1000))
        return True

    def _take(self, count: int) -> None:
        """Finish every request whose answer is whole now; ``count`` new bytes are in ``scratch``."""
        # Nearly always these are whole answers and can be cut from where they are.
        source = self.scratch
        at, total = 0, count
        if self.rest:
            self.rest += memoryview(source)[:count]
            source, total = self.rest, len(self.rest)
        while total - at >= 16:
            magic, _version, err, _kind, seq, length, attachment = _ANSWER.unpack_from(source, at)
            if magic != _MAGIC:
                raise CodecError(f"this is no Mooncake Master: an answer begins with 0x{magic:02x}")
            if length > MAX_BODY or attachment > MAX_BODY:
                raise CodecError(f"an answer of {length} and {attachment} bytes is more than {MAX_BODY}")
            stop = at + 16 + length
            if stop + attachment > total:
                break
            self._finish(seq, err, bytes(memoryview(source)[at + 16 : stop]))
            at = stop + attachment
        if source is self.rest:
            del self.rest[:at]
        elif at < total:
            self.rest += memoryview(source)[at:total]

    def _finish(self, seq: int, err: int, body: bytes) -> None:
        with self.lock:
            reply = self.pending.pop(seq, None)
            if reply is None:
                return
            if err:
                reply._error = _rpc_error(reply.function, err, body, self.where)
            else:
                reply._value = body
            self._settle(reply)
        self._tell(reply)

    def _settle(self, reply: Reply[Any]) -> None:
        """Mark finished and wake its caller; under the lock."""
        reply.finished = True
        for gate in reply._gates:
            if gate in self.followers:
                self.followers.remove(gate)
                gate.release()

    def _tell(self, reply: Reply[Any]) -> None:
        for callback in reply._callbacks or ():
            try:
                callback(reply)
            except Exception:
                _log.exception("what was to be done on a late answer of %s failed", reply.function)

    # -- the end

    def fail(self, reason: str) -> None:
        """The connection is over: every request on it is lost. Safe to call from anywhere, more than once."""
        with self.lock:
            if self.dead is not None:
                return
            self.dead = reason
            lost = list(self.pending.values())
            self.pending.clear()
            for reply in lost:
                reply._error = MasterLost(reason)
                self._settle(reply)
            for gate in self.followers:
                gate.release()
            self.followers.clear()
        try:
            self.sock.shutdown(socket.SHUT_RDWR)  # wakes whoever polls it
        except OSError:
            pass
        self._tidy()
        for reply in lost:
            self._tell(reply)

    def _tidy(self) -> None:
        """Close the descriptor once it is dead and no thread is in a call on it (its number would be reused)."""
        if self.dead is None:
            return
        with self.lock:
            if self.closed or self.reading or not self.sending.acquire(blocking=False):
                return
            self.closed = True
            self.sending.release()
        self.sock.close()

    def after_fork(self) -> None:
        """In a forked child: let go of the parent's connection without ending it, and of its locks."""
        self.lock, self.sending = threading.Lock(), threading.Lock()
        self.followers.clear()
        self.reading = self.watcher = False
        self.dead = "it belongs to the parent process"
        for reply in self.pending.values():
            reply._error = MasterLost(self.dead)
            reply.finished = True
        self.pending.clear()
        if not self.closed:
            self.closed = True
            self.sock.close()

    def alive(self) -> bool:
        """Whether the peer has not closed, without waiting. Unread answers do not hide an end behind them."""
        with self.lock:
            if self.dead is not None:
                return False
            return not self.ends.poll(0)


def _reason(error: OSError) -> str:
    return f"the connection broke: {error.strerror or error}"


def _rpc_error(function: str, number: int, body: bytes, where: str) -> MasterRpcError:
    try:
        text = decode(body).value
    except CodecError:
        text = ""
    text = text if isinstance(text, str) else ""
    printable = "".join(c if c.isprintable() else "?" for c in text[:300])
    return MasterRpcError(function, number, printable, where=where)
