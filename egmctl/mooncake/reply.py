"""The answer to one request, now or later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from egmctl.mooncake.errors import MasterLost, MasterTimeout

__all__ = ["Reply"]

T = TypeVar("T")


class Waiting(Protocol):
    """What a reply needs of the connection it is expected on."""

    where: str
    epoch: int
    lock: threading.Lock

    def wait(self, reply: Reply[Any], deadline: float) -> bool: ...

    def watch(self) -> None: ...


class Reply(Generic[T]):
    """The answer to one request, now or later. `result` may be asked again after a `MasterTimeout`."""

    def __init__(
        self,
        link: Waiting,
        function: str,
        seq: int,
        deadline: float,
        convert: Callable[[bytes], T],
        request: bytes = b"",
    ) -> None:
        self._link = link
        self.function = function
        self.request = request
        self.seq = seq
        self.deadline = deadline
        self._convert = convert
        self.finished = False
        self._value: bytes = b""
        self._error: Exception | None = None
        self._gates: list[threading.Lock] = []  # one for each thread that waits while another one reads
        self._callbacks: list[Callable[[Reply[T]], None]] | None = None

    @property
    def epoch(self) -> int:
        """Which connection it was sent on (`RpcConnection.epoch` of then)."""
        return self._link.epoch

    def done(self) -> bool:
        """Whether `result` would answer or fail at once. Looks at the socket, does not wait."""
        if not self.finished:
            self._link.wait(self, time.monotonic())
        return self.finished

    def result(self, timeout: float | None = None) -> T:
        """The answer, waiting up to ``timeout`` seconds from now (None: until the deadline given when it was sent).

        Raises `MasterTimeout` (not answered yet), `MasterLost` (never will be), `MasterRpcError`, `CodecError`, and
        what the call's own conversion raises (`MasterRefused`).
        """
        return self._convert(self._body(timeout))

    def wait(self) -> None:
        """As `result`, without taking the answer apart."""
        self._body(None)

    def same_as(self, earlier: Reply[T]) -> bool:
        """Whether the answer is, byte for byte, the one that ``earlier`` got on the same connection; waits and raises
        as `result`. Nothing is taken apart."""
        return self._body(None) == earlier._value and earlier.finished and self.epoch == earlier.epoch

    def _body(self, timeout: float | None) -> bytes:
        if not self.finished:
            deadline = self.deadline if timeout is None else time.monotonic() + timeout
            if not self._link.wait(self, deadline):
                self._link.watch()
                raise MasterTimeout(
                    f"{self.function}: no answer in time; the request may still take effect",
                    reply=self,
                    where=self._link.where,
                    hint="check that the Master runs and is not overloaded",
                    facts={"call": self.function},
                )
        if self._error is not None:
            if isinstance(self._error, MasterLost):
                raise MasterLost(
                    f"{self.function}: {self._error.message}; the request may have taken effect",
                    reply=self,
                    where=self._link.where,
                    hint="check that the Master runs, then ask it for the state",
                    facts={"call": self.function},
                )
            raise self._error
        return self._value

    def add_done_callback(self, callback: Callable[[Reply[T]], None]) -> None:
        """Call ``callback(self)`` once it is finished, however late, in the thread that read it (now, if it is)."""
        with self._link.lock:
            if not self.finished:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                callback = None  # type: ignore[assignment]
        if callback is not None:
            callback(self)
        else:
            self._link.watch()
