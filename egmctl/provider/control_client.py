"""Asking an agent, from another process of its host."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

from egmctl.errors import BusyError, FailedError
from egmctl.provider import messages
from egmctl.provider.progress import Progress, ProgressEvent, silent
from egmctl.steps import step

__all__ = ["SILENCE", "AgentGone", "AgentSilent", "ControlClient"]

SILENCE = 20.0
"""Seconds without a sign of life after which an agent at work counts as standing still; it gives one every other
second."""


class AgentGone(FailedError):
    """Nobody answers on the control socket, or the answer never came: the agent is dead or dying."""

    code = "agent-gone"


class AgentSilent(BusyError):
    """The agent has taken the request and says nothing any more: it stands still, and owns the pool all the same."""

    code = "agent-silent"


class ControlClient:
    """One connection to an agent's control socket."""

    def __init__(self, path: Path, *, timeout: float = 5.0) -> None:
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(timeout)
        try:
            with step("provider.control.connect"):
                self._connect(timeout)
        except OSError as error:
            self._sock.close()
            raise AgentGone(
                f"the agent does not answer: {error.strerror or error}", where=str(path), hint="see `egmctl status`"
            ) from error
        except BaseException:
            self._sock.close()
            raise
        self._reader = messages.LineReader(self._sock)

    def _connect(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._sock.connect(str(self.path))
                return
            except BlockingIOError:  # the agent's backlog is full: with a time limit set, the kernel does not wait
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.02)

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._sock.close()

    def ask(
        self, operation: str, *, progress: Progress = silent, timeout: float = 30.0, **arguments: Any
    ) -> dict[str, Any]:
        """The result. Raises what the agent met, `AgentGone`, or `AgentSilent` after ``timeout`` seconds of silence.

        The first Ctrl-C asks the agent to stop and undo and goes on listening; the second leaves at once.
        """
        asked_to_stop = False
        try:
            try:
                with step("provider.control.ask", op=operation):
                    self._sock.sendall(messages.line({"op": operation, **arguments}))
            except KeyboardInterrupt:  # it is on its way by now, or the agent ends the connection without it
                asked_to_stop = True
                self._sock.shutdown(socket.SHUT_WR)
            while True:
                try:
                    answer = self._reader.read(timeout)
                    if answer is not None and answer.get("event") == "progress":
                        progress(ProgressEvent.from_document(answer))
                        continue
                    if answer is not None and answer.get("event") == "alive":
                        continue
                except KeyboardInterrupt:
                    if asked_to_stop:
                        raise
                    asked_to_stop = True
                    self._sock.shutdown(socket.SHUT_WR)
                    continue
                if answer is None:
                    raise AgentGone(f"the agent ended during {operation}", where=str(self.path), hint="see its log")
                if answer.get("ok") is True:
                    result = answer.get("result")
                    return result if isinstance(result, dict) else {}
                if "ok" in answer:
                    raise messages.error_from_document(answer.get("error"))
        except TimeoutError as error:
            raise AgentSilent(
                f"the agent has said nothing for {timeout:g} s ({operation})",
                where=str(self.path),
                hint="it stands still, or is stopped: see its log; the request may still be carried out. After "
                "`kill -KILL` of the agent, teardown works from the ledger",
            ) from error
        except (OSError, ValueError) as error:
            raise AgentGone(f"no usable answer to {operation}: {error}", where=str(self.path)) from error
