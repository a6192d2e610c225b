"""One run of the Transfer Engine child as its parent holds it: started, spoken to, ended; each within a time limit."""

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
from egmctl.mooncake.te_child import MAX_PACKET
from egmctl.steps import step

__all__ = ["ChildProcess", "TransferEngineError", "TransferEngineStuckError", "TryAgain", "trouble"]


class TransferEngineError(FailedError):
    """The Transfer Engine child cannot be started, or not in time."""

    code = "transfer-engine"


class TransferEngineStuckError(CleanupPendingError):
    """The child does not end, so the memory it maps must stay."""

    code = "transfer-engine-stuck"


class TryAgain(Exception):
    """Another process may do better: at hitting the port (worth any number of tries), or at what else failed."""

    def __init__(self, error: TransferEngineError, *, port_missed: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.port_missed = port_missed


class ChildProcess:
    """One run of the child, with a thread that starts and outlives it.

    The kernel's parent-death signal is sent when the *thread* that started a process ends, hence a thread that does
    nothing else and waits for the end.
    """

    def __init__(self, host: str, log_fd: int | None, died: Callable[[ChildProcess, str], None]) -> None:
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
            raise trouble(f"no thread to start the child: {error}") from error
        if not self._spawned.wait(max(0.0, deadline - time.monotonic())):
            raise trouble("the child was not started in time")
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
            self._failure = trouble(f"cannot start {sys.executable}: {error.strerror}")
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
            raise trouble("the child sent no data port")
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
            raise TryAgain(trouble("the child ended right after it had registered the chunks"))

    def request(self, message: dict[str, Any], deadline: float, descriptors: Sequence[int] = ()) -> dict[str, Any]:
        if not self._talking.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise trouble("the child is busy with another request")
        try:
            self._requests += 1
            number = self._requests
            data = json.dumps({"n": number, **message}).encode()
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            try:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                self._socket.sendmsg([data], rights)
            except TimeoutError:
                raise trouble("the child takes no requests") from None
            except OSError as error:
                raise TryAgain(trouble(f"the child is gone ({error.strerror or error})")) from error
            return self._answer(number, deadline)
        finally:
            self._talking.release()

    def _answer(self, number: int, deadline: float) -> dict[str, Any]:
        while True:
            try:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                data = self._socket.recv(MAX_PACKET)
            except TimeoutError:
                raise trouble("the child did not answer in time") from None
            except OSError as error:
                raise TryAgain(trouble(f"the child is gone ({error.strerror or error})")) from error
            if not data:
                raise TryAgain(trouble("the child ended before it answered"))
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
            raise TryAgain(told, port_missed=answer["again"] == "port") if answer.get("again") else told

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


def trouble(what: str) -> TransferEngineError:
    return TransferEngineError(
        what, where="Transfer Engine child", hint="see the agent's log for what the engine printed"
    )


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def _environment(ports: tuple[int, int]) -> dict[str, str]:
    environment = dict(os.environ)
    # Set at all, the first two change the transport; the old spellings of the ports would contradict ours.
    for name in ("MC_FORCE_MNNVL", "MC_USE_NVLINK_IPC", "MC_MIN_PRC_PORT", "MC_MAX_PRC_PORT"):
        environment.pop(name, None)
    environment.setdefault("MC_LOG_LEVEL", "WARNING")
    environment["MC_MIN_RPC_PORT"], environment["MC_MAX_RPC_PORT"] = map(str, ports)
    return environment
