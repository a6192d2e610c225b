"""What an agent says, when nobody can take it down any more: a full disk under its log, a terminal that was closed.

An agent owns memory that others use. Nothing that it merely says may end it, or one of its threads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

__all__ = ["lasting_streams"]


class _Lasting:
    """A text stream that drops what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):  # no room, a broken pipe; or closed
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Standard output and error drop what cannot be written, until the end of this."""
    before = sys.stdout, sys.stderr
    out, err = (stream if stream is None else _Lasting(stream) for stream in before)
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
