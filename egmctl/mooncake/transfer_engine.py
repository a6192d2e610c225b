"""Starts, watches and replaces the Transfer Engine child, which serves stock clients over TCP (see `te_child`).

Nothing here waits for the child without a limit, and its death is only ever reported. A replacement takes the same
addresses and the same data port, because running stock clients ask for a port once and keep it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from egmctl.memory.base import Chunk
from egmctl.mooncake.te_child import MAX_DESCRIPTORS
from egmctl.mooncake.te_process import ChildProcess, TransferEngineError, TransferEngineStuckError, TryAgain, trouble
from egmctl.steps import step

__all__ = ["TransferEngineChild", "TransferEngineError", "TransferEngineStuckError"]

DEFAULT_PORTS = (15000, 17000)
"""Where the engine listens unless MC_MIN_RPC_PORT and MC_MAX_RPC_PORT say otherwise."""

LAST_PORT = 31999
"""An engine that is given a range from 33000 up falls back to its default, so no port up there can be had again."""


MAX_FAILURES = 4
"""Processes started for one child when what fails is not the port."""


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
        self._current: ChildProcess | None = None
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
        except (TransferEngineError, TryAgain):
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
                except TryAgain as again:
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
            self._current = process = ChildProcess(self._host, self._log_fd, self._died)
        try:
            process.spawn(self._ports(attempt), self._port, deadline)
            port = process.hello(deadline)
            if port > LAST_PORT:
                raise TryAgain(trouble(f"data port {port} is above {LAST_PORT} and could not be had again"))
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

    def _died(self, process: ChildProcess, ending: str) -> None:
        if self._current is process and not self._stopped and self._on_death is not None:
            self._on_death(ending)


def _environment_ports() -> tuple[int, int]:
    try:
        first, last = (int(os.environ[f"MC_{end}_RPC_PORT"]) for end in ("MIN", "MAX"))
    except (KeyError, ValueError):
        return DEFAULT_PORTS
    return (first, last) if 1024 <= first < last <= LAST_PORT else DEFAULT_PORTS
