"""JSON lines between an agent and whoever asks it: bounded, one object a line, errors as ``egmctl/error/1``."""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any

from egmctl.errors import (
    BusyError,
    CleanupPendingError,
    EgmError,
    FailedError,
    PreflightError,
    StalePlanError,
    UsageError,
    VerificationError,
)

__all__ = ["MAX_LINE", "LineReader", "error_from_document", "hung_up", "line"]

MAX_LINE = 1 << 20

_BY_EXIT: dict[int, type[EgmError]] = {
    kind.exit_code: kind
    for kind in (
        FailedError,
        UsageError,
        PreflightError,
        CleanupPendingError,
        BusyError,
        StalePlanError,
        VerificationError,
    )
}


def line(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def error_from_document(document: Any) -> EgmError:
    """The error that another process met, to be raised here."""
    if not isinstance(document, dict):
        return FailedError("the agent reported an error without saying which", hint="see the agent's log")
    code = document.get("exit")
    kind = _BY_EXIT.get(code, FailedError) if isinstance(code, int) else FailedError
    facts = document.get("facts")
    error = kind(
        str(document.get("message") or "no message"),
        where=str(document.get("where", "")),
        hint=str(document.get("hint", "")),
        facts=facts if isinstance(facts, dict) else None,
    )
    error.code = str(document.get("code") or error.code)
    return error


def hung_up(sock: socket.socket) -> bool:
    """Whether the peer has closed its end of sending. Does not wait, whatever the socket's own time limit."""
    try:
        poller = select.poll()  # unlike select(), for any number of descriptor
        poller.register(sock, select.POLLIN)
        return bool(poller.poll(0)) and not sock.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):
        return True


class LineReader:
    """Reads objects from a stream socket. Raises `ValueError` for a line that is too long or no JSON object."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def read(self, timeout: float | None) -> dict[str, Any] | None:
        """The next object, None at the end of the stream. Raises `TimeoutError` when the whole takes longer."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            end = self._buffer.find(b"\n")
            if end >= 0:
                text = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                try:
                    document = json.loads(text)
                except RecursionError as error:
                    raise ValueError("nested too deeply") from error
                if not isinstance(document, dict):
                    raise ValueError("not a JSON object")
                return document
            if len(self._buffer) > MAX_LINE:
                raise ValueError(f"a line of more than {MAX_LINE} bytes")
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("timed out")
                self._sock.settimeout(left)
            else:
                self._sock.settimeout(None)
            data = self._sock.recv(1 << 16)
            if not data:
                return None
            self._buffer += data
