"""The agent's control socket: who may connect, what may be asked, and answers that never wait for each other."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from egmctl.errors import BusyError, EgmError, FailedError, PreflightError, UsageError
from egmctl.ledger import is_running, start_time
from egmctl.provider import messages
from egmctl.provider.access import Peer, peer_of
from egmctl.provider.folders import own_folders
from egmctl.provider.operator import Job, Operator
from egmctl.provider.pool import Pool
from egmctl.provider.progress import ProgressEvent
from egmctl.provider.report import check_report, live_report
from egmctl.provider.task import Task
from egmctl.steps import step

__all__ = ["ALIVE_SECONDS", "ControlServer"]

MAX_CLIENTS = 256
RESERVED = 64
"""Of these, places that neither watchers nor other users take: whoever has to tear the pool down gets in."""

IDLE_SECONDS = 60.0
SEND_SECONDS = 5.0
ALIVE_SECONDS = 2.0
"""How often a client whose command is at work hears that it is: silence means that the agent stands still."""

FDS_A_MESSAGE = 64
_OWNERS_ONLY = frozenset({"mount", "teardown"})


class ControlServer:
    """Serves one pool at ``path``. ``group`` may use it too, though not mount or tear down."""

    def __init__(self, path: Path, pool: Pool, operator: Operator, group: int | None) -> None:
        self.path = path
        self._pool = pool
        self._operator = operator
        self._group = group
        self._listener: socket.socket | None = None
        self._mutex = threading.Lock()
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._guests: set[socket.socket] = set()  # of the clients, watchers and other users
        self._watchers: dict[socket.socket, threading.Lock] = {}

    @property
    def accepting(self) -> bool:
        """Whether anybody can ask this agent for anything."""
        return self._listener is not None

    # The door, as the pool's stages see it

    def open(self) -> None:
        if self._listener is not None:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with step("provider.control.bind", path=str(self.path)):
                # We hold the pool's lock, so a file that is there belongs to an agent that is gone.
                self.path.unlink(missing_ok=True)
                before = os.umask(0o177)
                try:
                    listener.bind(str(self.path))
                finally:
                    os.umask(before)
            if self._group is not None:
                with step("provider.control.share", group=self._group):
                    os.chown(self.path, -1, self._group)
                    os.chmod(self.path, 0o660)
                    for folder in own_folders(self.path.parent):
                        os.chmod(folder, 0o711)  # noqa: S103 - to be passed through, not listed
            with step("provider.control.listen"):
                listener.listen(128)
        except OSError as error:
            listener.close()
            raise PreflightError(
                f"cannot open the control socket: {error.strerror or error}",
                where=str(self.path),
                hint="see who owns the folder; a socket's path holds at most 107 bytes",
            ) from error
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="control", daemon=True).start()

    def close(self) -> None:
        listener = self._listener
        if listener is not None:
            with step("provider.control.close"):
                self._listener = None
                with suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)
                listener.close()

    def withdraw(self, chunks: list[int]) -> int:
        message = messages.line({"event": "withdrawn", "chunks": chunks})
        told = 0
        with self._mutex:
            watchers = list(self._watchers.items())
        for sock, gate in watchers:
            with suppress(OSError), gate:
                sock.settimeout(SEND_SECONDS)
                sock.sendall(message)
                told += 1
        return told

    def drain(self, timeout: float) -> None:
        """Let answers go out, then hang up on everybody: the end of an agent."""
        with self._mutex:
            threads = [thread for sock, thread in self._clients.items() if sock not in self._watchers]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout / max(1, len(threads)))
        with self._mutex:
            for sock in self._clients:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    # Clients

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                sock, _ = listener.accept()
                peer = peer_of(sock)
            except OSError:
                if self._listener is not listener:
                    return
                threading.Event().wait(0.1)  # out of descriptors: leave the backlog alone for a moment
                continue
            with self._mutex:
                if len(self._clients) >= MAX_CLIENTS or not (peer.owner or self._room_for_guests()):
                    sock.close()
                    continue
                if not peer.owner:
                    self._guests.add(sock)
                thread = threading.Thread(target=self._serve, args=(sock, peer), name="control-client", daemon=True)
                self._clients[sock] = thread
            try:
                thread.start()
            except RuntimeError:
                self._forget(sock)

    def _room_for_guests(self) -> bool:
        return len(self._guests) < MAX_CLIENTS - RESERVED

    def _forget(self, sock: socket.socket) -> None:
        with self._mutex:
            self._clients.pop(sock, None)
            self._guests.discard(sock)
            self._watchers.pop(sock, None)
        sock.close()

    def _serve(self, sock: socket.socket, peer: Peer) -> None:
        try:
            if not peer.owner and not peer.in_group(self._group):
                self._refuse(sock, UsageError(f"uid {peer.uid} may not use this pool", where=f"pool {self._pool.name}"))
                return
            reader = messages.LineReader(sock)
            while True:
                request = reader.read(IDLE_SECONDS)
                if request is None:
                    return
                self._answer(sock, reader, request, peer)
        except ValueError as error:
            self._refuse(sock, UsageError(f"not a request: {error}", where="control socket"))
        except OSError:
            pass  # the client is gone, or has said nothing for too long
        finally:
            self._forget(sock)

    def _refuse(self, sock: socket.socket, error: EgmError) -> None:
        with suppress(OSError):
            self._send(sock, {"ok": False, "error": error.document()})

    @staticmethod
    def _send(sock: socket.socket, document: dict[str, Any], fds: list[int] | None = None) -> None:
        sock.settimeout(SEND_SECONDS)
        data = messages.line(document)
        if fds:
            sent = socket.send_fds(sock, [data], fds)
            data = data[sent:]
        if data:
            sock.sendall(data)

    def _answer(self, sock: socket.socket, reader: messages.LineReader, request: dict[str, Any], peer: Peer) -> None:
        operation = request.get("op")
        handlers: dict[str, Callable[[], dict[str, Any] | None]] = {
            "status": lambda: live_report(self._pool, self._operator.current()),
            "check": lambda: check_report(self._pool),
            "export": lambda: self._export(sock, request, peer.pid),
            "watch": lambda: self._watch(sock),
            "mount": lambda: self._mount(sock, request, str(peer)),
            "teardown": lambda: self._teardown(sock, request, str(peer)),
        }
        handler = handlers.get(operation) if isinstance(operation, str) else None
        try:
            if handler is None:
                raise UsageError(f"unknown operation {str(operation)[:40]!r}", where="control socket")
            if operation in _OWNERS_ONLY and not peer.owner:
                raise UsageError(f"{operation} is for the pool's owner", where=f"pool {self._pool.name}")
            result = handler()
        except EgmError as error:
            self._send(sock, {"ok": False, "error": error.document()})
            return
        except OSError:
            raise
        except Exception as error:  # a bad request must not end the thread without an answer
            self._refuse(sock, FailedError(f"{operation}: {type(error).__name__}: {error}", where="control socket"))
            return
        if result is not None:
            self._send(sock, {"ok": True, "result": result})
        if operation == "watch":
            with suppress(ValueError, TimeoutError):
                while reader.read(None) is not None:
                    pass  # nothing is asked of a watcher; its end is all that counts
            raise OSError("the watcher left")

    # Operations

    def _export(self, sock: socket.socket, request: dict[str, Any], pid: int) -> None:
        parts = self._pool.parts
        wanted = request.get("chunks", sorted(parts.chunks))
        if not isinstance(wanted, list) or not all(type(index) is int for index in wanted) or len(wanted) > 1 << 16:
            raise UsageError("chunks is not a list of numbers", where="control socket")
        nonce = self._pool.record_now().nonce
        rows: list[dict[str, Any]] = []
        # No more descriptors are open at once than one message carries, however many are asked for.
        for first in range(0, max(1, len(wanted)), FDS_A_MESSAGE):
            batch = wanted[first : first + FDS_A_MESSAGE]
            fds: list[int] = []
            try:
                rows += [self._share(index, fds) for index in batch]
                self._remember(pid, batch)
                if first + FDS_A_MESSAGE < len(wanted):
                    self._send(sock, {"event": "descriptors", "count": len(fds)}, fds)
                else:
                    self._send(sock, {"ok": True, "result": {"nonce": nonce, "chunks": rows}}, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def _share(self, index: int, fds: list[int]) -> dict[str, Any]:
        """What is said of a chunk; its descriptor is added to ``fds``."""
        parts = self._pool.parts
        chunk = parts.chunks.get(index)
        if chunk is None or not parts.sharing:
            raise FailedError(f"there is no chunk {index} to share", where=f"pool {self._pool.name}")
        share = chunk.share()
        if share.fd is None:
            raise UsageError(
                f"{share.kind} chunks are imported by the handle in the descriptor", where="control socket"
            )
        fds.append(share.fd)
        return {
            "index": index,
            "numa_node": share.numa_node,
            "address": chunk.address,
            "nbytes": share.nbytes,
            "kind": share.kind,
        }

    def _remember(self, pid: int, indices: list[int]) -> None:
        """Who is given chunks: what does not come back after the release, one of these holds."""
        with self._mutex:
            given = self._pool.parts.importers
            for key in [key for key in given if not is_running(*key)]:
                del given[key]
            given.setdefault((pid, start_time(pid) or 0), set()).update(indices)

    def _watch(self, sock: socket.socket) -> None:
        gate = threading.Lock()
        result = {"nonce": self._pool.record_now().nonce, "pool": self._pool.name}
        with gate:  # whoever withdraws waits for the answer to be out first
            with self._mutex:
                if sock not in self._guests and not self._room_for_guests():
                    raise BusyError(
                        f"{len(self._guests)} watchers and other users are connected already",
                        where=f"pool {self._pool.name}",
                        hint="end some of them, or try again later",
                    )
                self._guests.add(sock)
                self._watchers[sock] = gate
            self._send(sock, {"ok": True, "result": result})

    def _mount(self, sock: socket.socket, request: dict[str, Any], who: str) -> dict[str, Any]:
        master = request.get("master")
        if master is not None and not isinstance(master, str):
            raise UsageError("master is not a string", where="control socket")

        target = master or self._pool.plan.mooncake.master_server_addr
        if self._pool.state == "ready" and self._pool.record_now().master == target:
            return {**live_report(self._pool, self._operator.current()), "already": True}

        def run(task: Task) -> dict[str, Any]:
            already = self._pool.state == "ready"
            self._pool.mount(task, master)
            return {**live_report(self._pool, None), "already": already}

        return self._carry_out(sock, "mount", who, run)

    def _teardown(self, sock: socket.socket, request: dict[str, Any], who: str) -> dict[str, Any]:
        grace = request.get("grace", 0.0)
        if not isinstance(grace, (int, float)) or isinstance(grace, bool) or not 0 <= grace <= 86400:
            raise UsageError("grace is not a number of seconds", where="control socket")

        def run(task: Task) -> dict[str, Any]:
            left = self._pool.teardown(task, float(grace), abandon=request.get("abandon") is True)
            return {"name": self._pool.name, "state": self._pool.state, "left": left, "warnings": self._pool.warnings}

        return self._carry_out(sock, "teardown", who, run)

    def _carry_out(
        self, sock: socket.socket, name: str, who: str, run: Callable[[Task], dict[str, Any]]
    ) -> dict[str, Any]:
        """Run a command, sending its progress; it is stopped when the client hangs up (or its end of sending)."""
        left = threading.Event()
        gate = threading.Lock()

        def progress(event: ProgressEvent) -> None:
            with gate:
                self._send(sock, event.document())

        job = self._operator.submit(Job(Task(name, who, progress, left.is_set), run))
        told = time.monotonic()
        while not job.done(0.05):
            if time.monotonic() >= told + ALIVE_SECONDS:
                told = time.monotonic()
                with suppress(OSError), gate:
                    self._send(sock, {"event": "alive"})
            if not left.is_set() and messages.hung_up(sock):
                left.set()
        with gate:
            return job.wait()
