"""Starts, watches and replaces the Transfer Engine child, which serves stock clients over TCP (see `te_child`).

Nothing here waits for the child without a limit, and its death is only ever reported. A replacement takes the same
addresses and the same data port, because running stock clients ask for a port once and keep it.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from egmctl.errors import CleanupPendingError, FailedError
from egmctl.memory.base import Chunk
from egmctl.mooncake.te_child import MAX_DESCRIPTORS, MAX_PACKET
from egmctl.steps import step

__all__ = ["TransferEngineChild", "TransferEngineError", "TransferEngineStuckError"]

DEFAULT_PORTS = (15000, 17000)
"""Where the engine listens unless MC_MIN_RPC_PORT and MC_MAX_RPC_PORT say otherwise."""

LAST_PORT = 31999
"""An engine that is given a range from 33000 up falls back to its default, so no port up there can be had again."""


MAX_FAILURES = 4
"""Processes started for one child when what fails is not the port."""


class TransferEngineError(FailedError):
    """The Transfer Engine child cannot be started, or not in time."""

    code = "transfer-engine"


class TransferEngineStuckError(CleanupPendingError):
    """The child does not end, so the memory it maps must stay."""

    code = "transfer-engine-stuck"


class TransferEngineChild:
    """One child at a time over the same chunks. ``host`` is the name its engine goes by, which nobody is told.

    ``log_fd`` takes what it and the engine print (none: dropped). ``on_death`` is called on a thread of its own with a
    sentence when a child that was serving has died unasked; `restart` may be called from it. Methods may be called
    from any thread; `stop` interrupts a `start` under way.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        log_fd: int | None = None,
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        self._host = host
        self._log_fd = log_fd
        self._on_death = on_death
        self._chunks: Sequence[Chunk] = ()
        self._port: int | None = None
        self._current: _Process | None = None
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._stopped = False

    @property
    def data_port(self) -> int | None:
        """Where stock clients connect; the same for every replacement. None before the first start."""
        return self._port

    @property
    def pid(self) -> int | None:
        """Of the child that serves or starts, else None."""
        current = self._current
        return current.pid if current is not None and current.running() else None

    def alive(self) -> bool:
        """Whether a child serves. A child that was stopped by a signal still counts; see `responds`."""
        current = self._current
        return current is not None and current.serving and current.running()

    def responds(self, timeout: float = 1.0) -> bool:
        """Whether the child's main thread answers in time."""
        current = self._current
        if current is None or not current.serving:
            return False
        try:
            current.request({"op": "ping"}, time.monotonic() + timeout)
        except (TransferEngineError, _TryAgain):
            return False
        return True

    def start(self, chunks: Sequence[Chunk], *, timeout: float = 60.0) -> int:
        """Serve these chunks at their own addresses; the data port. Raises `TransferEngineError`."""
        self._chunks = tuple(chunks)
        self._stopped = False
        return self._start(timeout)

    def restart(self, *, timeout: float = 60.0) -> int:
        """Replace the child, whatever state it is in, over the same chunks and on the same data port.

        Raises `TransferEngineError` when the port cannot be had again in time: then running stock clients cannot be
        served any more under this endpoint. A further call tries on.
        """
        if self._stopped:
            raise TransferEngineError("the child was stopped for good", where="Transfer Engine child")
        with step("te.restart", port=self._port):
            try:
                return self._start(timeout)
            except TransferEngineError as error:
                if self._stopped or self._port is None:
                    raise
                raise TransferEngineError(
                    f"no child serves data port {self._port} again after {timeout:g} s: {error.message}",
                    where=error.where,
                    hint=f"see who listens on port {self._port} (ss -tlnp); clients that run keep asking there",
                ) from error

    def stop(self, *, timeout: float = 10.0) -> None:
        """End the child: ask, then SIGKILL. Twice is success.

        Raises `TransferEngineStuckError` when not even that ends it in time.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            self._stopped = True
            current = self._current
        if current is not None:
            with step("te.stop", pid=current.pid):
                current.end(timeout)
                # A start under way ends what it may have begun meanwhile, and begins nothing more.
                if self._starting.acquire(timeout=max(0.0, deadline - time.monotonic())):
                    self._starting.release()

    def _start(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        if not self._starting.acquire(timeout=timeout):
            raise TransferEngineError("another start is still under way", where="Transfer Engine child")
        try:
            old = self._current
            if old is not None:
                old.end(max(1.0, timeout / 4))
            attempt = failures = 0
            while True:
                try:
                    return self._attempt(attempt, deadline)
                except _TryAgain as again:
                    attempt += 1
                    failures += not again.port_missed
                    pause = min(0.02 * attempt, 0.5)
                    if failures >= MAX_FAILURES or time.monotonic() + pause >= deadline:
                        raise again.error from again
                    time.sleep(pause)
        finally:
            self._starting.release()

    def _attempt(self, attempt: int, deadline: float) -> int:
        with self._lock:
            if self._stopped:
                raise TransferEngineError("stopped while it was starting", where="Transfer Engine child")
            self._current = process = _Process(self._host, self._log_fd, self._died)
        try:
            process.spawn(self._ports(attempt), self._port, deadline)
            port = process.hello(deadline)
            if port > LAST_PORT:
                raise _TryAgain(_trouble(f"data port {port} is above {LAST_PORT} and could not be had again"))
            for first in range(0, len(self._chunks), MAX_DESCRIPTORS):
                process.register(self._chunks[first : first + MAX_DESCRIPTORS], deadline)
            process.serve()
        except BaseException as error:
            process.end(5.0)
            if isinstance(error, TransferEngineError) and self._stopped:
                raise TransferEngineError("stopped while it was starting", where="Transfer Engine child") from error
            raise
        self._port = port
        return port

    def _ports(self, attempt: int) -> tuple[int, int]:
        """The range given to an engine: it takes two random ports of it, one of them for data."""
        if self._port is None:
            return _environment_ports()
        # A narrow range hits the port soon; moving and widening it gets round strangers on the ports beside it.
        width = 2 + attempt // 6
        first = min(max(1024, self._port - attempt % (width + 1)), LAST_PORT - width)
        return first, first + width

    def _died(self, process: _Process, ending: str) -> None:
        if self._current is process and not self._stopped and self._on_death is not None:
            self._on_death(ending)


class _TryAgain(Exception):
    """Another process may do better: at hitting the port (worth any number of tries), or at what else failed."""

    def __init__(self, error: TransferEngineError, *, port_missed: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.port_missed = port_missed


class _Process:
    """One run of the child, with a thread that starts and outlives it.

    The kernel's parent-death signal is sent when the *thread* that started a process ends, hence a thread that does
    nothing else and waits for the end.
    """

    def __init__(self, host: str, log_fd: int | None, died: Callable[[_Process, str], None]) -> None:
        self._host = host
        self._log_fd = log_fd
        self._died = died
        self._popen: subprocess.Popen[bytes] | None = None
        self._failure: BaseException | None = None
        self._spawned = threading.Event()
        self._ended = threading.Event()
        self._reaping = threading.Lock()
        self._talking = threading.Lock()
        self._requests = 0
        self._ending = False
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.serving = False

    @property
    def pid(self) -> int | None:
        return self._popen.pid if self._popen is not None else None

    def running(self) -> bool:
        return self._popen is not None and not self._ended.is_set()

    def spawn(self, ports: tuple[int, int], wanted: int | None, deadline: float) -> None:
        try:
            threading.Thread(target=self._keep, args=(ports, wanted), name="te-keeper", daemon=True).start()
        except RuntimeError as error:
            self._theirs.close()
            raise _trouble(f"no thread to start the child: {error}") from error
        if not self._spawned.wait(max(0.0, deadline - time.monotonic())):
            raise _trouble("the child was not started in time")
        if self._failure is not None:
            raise self._failure

    def _keep(self, ports: tuple[int, int], wanted: int | None) -> None:
        command = [sys.executable, "-m", "egmctl.mooncake.te_child"]
        command += [str(self._theirs.fileno()), str(os.getpid()), self._host]
        output = subprocess.DEVNULL if self._log_fd is None else self._log_fd
        try:
            with step("te.spawn", ports=ports):
                self._popen = popen = subprocess.Popen(
                    command if wanted is None else [*command, str(wanted)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=_environment(ports),
                    pass_fds=(self._theirs.fileno(),),
                )
        except OSError as error:
            self._failure = _trouble(f"cannot start {sys.executable}: {error.strerror}")
        except BaseException as error:  # from a watcher of steps: it belongs to whoever called spawn
            self._failure = error
        finally:
            self._theirs.close()
            if self._popen is None:
                self._ended.set()
            self._spawned.set()
        if self._popen is None:
            return
        # The zombie is kept until the lock is held, so that its pid is nobody else's while a signal is being sent.
        with contextlib.suppress(ChildProcessError):  # somebody else in this process reaped it
            os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
        with self._reaping:
            code = popen.wait()
            self._ended.set()
        if self.serving and not self._ending:
            self._died(self, f"the Transfer Engine child (pid {popen.pid}) ended with {_ending(code)}")

    def hello(self, deadline: float) -> int:
        with step("te.hello", pid=self.pid):
            answer = self._answer(0, deadline)
        port = answer.get("data_port")
        if not isinstance(port, int):
            raise _trouble("the child sent no data port")
        return port

    def register(self, chunks: Sequence[Chunk], deadline: float) -> None:
        described: list[dict[str, Any]] = []
        descriptors: list[int] = []
        try:
            for chunk in chunks:
                share = chunk.share()
                if share.fd is None:
                    raise TransferEngineError(
                        f"chunks of kind {share.kind} cannot be shared with a Transfer Engine child",
                        where=f"chunk {chunk.spec.index}",
                    )
                descriptors.append(share.fd)
                described.append(
                    {
                        "kind": share.kind,
                        "numa_node": share.numa_node,
                        "nbytes": share.nbytes,
                        "address": chunk.address,
                    }
                )
            with step("te.register", chunks=[chunk.spec.index for chunk in chunks]):
                self.request({"op": "chunks", "chunks": described}, deadline, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def serve(self) -> None:
        """From now on an end is a death. Raises when it has come already."""
        self.serving = True
        if self._ended.is_set():
            self._ending = True
            raise _TryAgain(_trouble("the child ended right after it had registered the chunks"))

    def request(self, message: dict[str, Any], deadline: float, descriptors: Sequence[int] = ()) -> dict[str, Any]:
        if not self._talking.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise _trouble("the child is busy with another request")
        try:
            self._requests += 1
            number = self._requests
            data = json.dumps({"n": number, **message}).encode()
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            try:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                self._socket.sendmsg([data], rights)
            except TimeoutError:
                raise _trouble("the child takes no requests") from None
            except OSError as error:
                raise _TryAgain(_trouble(f"the child is gone ({error.strerror or error})")) from error
            return self._answer(number, deadline)
        finally:
            self._talking.release()

    def _answer(self, number: int, deadline: float) -> dict[str, Any]:
        while True:
            try:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                data = self._socket.recv(MAX_PACKET)
            except TimeoutError:
                raise _trouble("the child did not answer in time") from None
            except OSError as error:
                raise _TryAgain(_trouble(f"the child is gone ({error.strerror or error})")) from error
            if not data:
                raise _TryAgain(_trouble("the child ended before it answered"))
            answer: dict[str, Any] = json.loads(data)
            if answer["n"] != number:  # to a request that was given up
                continue
            if answer["ok"]:
                return answer
            told = TransferEngineError(
                str(answer["message"]),
                where=answer.get("where") or "Transfer Engine child",
                hint=answer.get("hint") or "see the agent's log for what the engine printed",
            )
            raise _TryAgain(told, port_missed=answer["again"] == "port") if answer.get("again") else told

    def end(self, timeout: float) -> None:
        """Close the socket, which ends it; kill it when that does not."""
        self._ending = True
        deadline = time.monotonic() + timeout
        with contextlib.suppress(OSError):  # wakes whoever waits for an answer
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if not self._spawned.is_set():  # if it still comes to life, it finds its socket at an end
            return
        if self._ended.wait(min(1.0, timeout / 2)):
            return
        with step("te.kill", pid=self.pid), self._reaping:
            if not self._ended.is_set() and self._popen is not None:
                self._popen.send_signal(signal.SIGKILL)
        if not self._ended.wait(max(0.1, deadline - time.monotonic())):
            raise TransferEngineStuckError(
                f"pid {self.pid} does not end, not even by SIGKILL; the chunks it maps are kept",
                where="Transfer Engine child",
                hint="run teardown again once it is gone",
            )


def _trouble(what: str) -> TransferEngineError:
    return TransferEngineError(
        what, where="Transfer Engine child", hint="see the agent's log for what the engine printed"
    )


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def _environment_ports() -> tuple[int, int]:
    try:
        first, last = (int(os.environ[f"MC_{end}_RPC_PORT"]) for end in ("MIN", "MAX"))
    except (KeyError, ValueError):
        return DEFAULT_PORTS
    return (first, last) if 1024 <= first < last <= LAST_PORT else DEFAULT_PORTS


def _environment(ports: tuple[int, int]) -> dict[str, str]:
    environment = dict(os.environ)
    # Set at all, the first two change the transport; the old spellings of the ports would contradict ours.
    for name in ("MC_FORCE_MNNVL", "MC_USE_NVLINK_IPC", "MC_MIN_PRC_PORT", "MC_MAX_PRC_PORT"):
        environment.pop(name, None)
    environment.setdefault("MC_LOG_LEVEL", "WARNING")
    environment["MC_MIN_RPC_PORT"], environment["MC_MAX_RPC_PORT"] = map(str, ports)
    return environment
