"""A little server for small questions: one thread answers all peers, each once, and blocks on none.

Each peer has a deadline for the whole, peers and what is held of their half-sent requests are bounded, and the peer
that has been there longest gives way when a new one comes.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from egmctl.errors import FailedError

__all__ = ["AnsweringServer"]

_RECEIVE = 16 << 10


@dataclass
class _Peer:
    sock: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    reply: memoryview | None = None
    finishing: bool = False


class AnsweringServer:
    """Serves a listener that does not block, its own from now on; a subclass says what is answered (`answer`).

    ``name`` is the thread's, ``what`` and ``where`` say in an error what is served. ``timeout`` is in seconds a peer,
    ``max_buffered`` in bytes of all requests together: beyond it the longest is dropped. Raises `FailedError` when no
    thread is to be had, with the listener closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        name: str,
        what: str,
        where: str,
        timeout: float,
        max_peers: int,
        max_buffered: int,
    ) -> None:
        self._listener = listener
        self._timeout = timeout
        self._max_peers = max_peers
        self._max_buffered = max_buffered
        self._buffered = 0
        self._peers: OrderedDict[int, _Peer] = OrderedDict()
        self._stopping = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            for each in (self._selector, listener, self._wake_read, self._wake_write):
                each.close()
            raise FailedError(
                f"no thread for the {what}: {error}",
                where=where,
                hint="raise the limit of processes (ulimit -u, or the container's pids limit)",
            ) from error

    def answer(self, received: bytearray) -> bytes | None:
        """The reply to a request, b"" to hang up without one, None while the request is not complete. Called on the
        server's thread; must neither block nor raise."""
        raise NotImplementedError

    def stop(self, patience: float | None = None) -> None:
        """Stop listening, drop the peers, end the thread (waiting ``patience`` seconds at most). Twice is success."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")
        self._thread.join(patience)
        self._wake_write.close()

    def _run(self) -> None:
        try:
            while not self._stopping:
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
            self._wake_read.close()

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
            self._peers[sock.fileno()] = _Peer(sock, time.monotonic() + self._timeout)
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
        if peer.finishing:  # what comes after the request is read and forgotten
            return
        peer.received += data
        self._buffered += len(data)
        reply = self.answer(peer.received)
        if reply:
            self._buffered -= len(peer.received)
            peer.received = bytearray()
            peer.reply = memoryview(reply)
            self._send(peer)
        elif reply is not None:
            self._drop(peer)
        elif self._buffered > self._max_buffered:
            self._drop(max(self._peers.values(), key=lambda each: len(each.received)))

    def _send(self, peer: _Peer) -> None:
        reply = peer.reply
        if reply is None:
            return
        with contextlib.suppress(BlockingIOError):
            peer.reply = reply = reply[peer.sock.send(reply) :]
        if reply:
            self._selector.modify(peer.sock, selectors.EVENT_WRITE)
            return
        peer.reply = None
        peer.finishing = True
        # Now the asker closes: with anything of its request unread, our close could reset the answer away. The deadline
        # bounds the wait.
        peer.sock.shutdown(socket.SHUT_WR)
        self._selector.modify(peer.sock, selectors.EVENT_READ)
