"""How a call is made: arguments to a body, the body over the connection, the answer to a value or an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from egmctl.mooncake.calls import Rows, Spots, read_answer, read_spots
from egmctl.mooncake.codec import Failure, build
from egmctl.mooncake.errors import CodecError, MasterRefused
from egmctl.mooncake.reply import Reply
from egmctl.mooncake.rpc import RpcConnection

__all__ = ["BOOL", "I32", "U64", "Caller", "arguments", "nothing", "same", "vector"]

T = TypeVar("T")
S = TypeVar("S", bound="Caller")

U64: Final = b"\x04"
I32: Final = b"\x01"
BOOL: Final = b"\x0b"


def arguments(*literals: bytes) -> bytes:
    return b"\xfd" + b"".join(literals) + b"\xff"


def vector(literal: bytes) -> bytes:
    return b"\x84" + literal


def same(value: Any) -> Any:
    return value


def nothing(value: Any) -> None:
    return None


class Caller:
    """One Master, one connection. ``timeout`` is the default for each call, in seconds."""

    def __init__(self, address: str, *, timeout: float = 5.0, tenant_id: str = "default") -> None:
        self.address = address
        self.tenant_id = tenant_id
        self.rpc = RpcConnection(address, timeout=timeout)

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; calls under way fail with `MasterLost`."""
        self.rpc.close()

    @property
    def epoch(self) -> int:
        """0 before the first connection, and one more each time the connection was made (anew)."""
        return self.rpc.epoch

    def connected(self) -> bool:
        """Whether the connection stands and the Master has not closed it. Does not wait and does not connect."""
        return self.rpc.connected()

    def _submit(
        self,
        call: str,
        literal: bytes,
        value: Any,
        answer: bytes,
        convert: Callable[[Any], T],
        timeout: float | None,
        subject: str | bytes = "",
    ) -> Reply[T]:
        def read(body: bytes) -> T:
            got = self._read(call, answer, body)
            if isinstance(got, Failure):
                raise MasterRefused(call, got.code, where=self.address, subject=_printable(subject))
            return convert(got)

        return self.rpc.submit(call, build(literal, value) if literal else b"", timeout, read)

    def _read(self, call: str, wanted: bytes, body: bytes) -> Any:
        try:
            return read_answer(call, wanted, body)
        except CodecError as error:
            said = error.message if error.message.startswith(call) else f"{call}: {error.message}"
            raise CodecError(
                said,
                where=self.address,
                hint=error.hint or "check that this is a Mooncake Master; the request may have taken effect",
                facts={"call": call, "literal": error.where},
            ) from error

    def _batch(
        self,
        call: str,
        literal: bytes,
        value: Any,
        answer: bytes,
        convert: Callable[[Any], T],
        timeout: float | None,
        keys: Sequence[str | bytes],
    ) -> Callable[[], Reply[list[T | Failure]]]:
        """A request for many keys, with an entry for each in the answer; calling what is returned sends it."""
        count = len(keys)
        wanted = b"\x84" + answer

        def read(body: bytes) -> list[T | Failure]:
            got = self._read(call, wanted, body)
            if len(got) != count:
                raise CodecError(f"{call}: {len(got)} answers to {count} keys", where=self.address)
            if convert is same:
                return got  # type: ignore[no-any-return]
            return [item if isinstance(item, Failure) else convert(item) for item in got]

        return partial(self.rpc.submit, call, build(literal, value), timeout, read)

    def _spots(
        self, call: str, literal: bytes, value: Any, answer: bytes, keys: Sequence[str | bytes]
    ) -> Callable[[], Reply[Rows]]:
        """As `_batch`, where what is mostly answered can be read as columns."""
        count = len(keys)
        wanted = b"\x84" + answer

        def read(body: bytes) -> Rows:
            got: Rows | None = read_spots(wanted, body)
            if got is None:
                got = self._read(call, wanted, body)
            found = len(got.ids if isinstance(got, Spots) else got)
            if found != count:
                raise CodecError(f"{call}: {found} answers to {count} keys", where=self.address)
            return got

        return partial(self.rpc.submit, call, build(literal, value), None, read)


def _printable(subject: str | bytes) -> str:
    """A key as a message may show it: short, on one line, whatever bytes it has."""
    if not subject:
        return ""
    text = subject.decode("utf-8", "backslashreplace") if isinstance(subject, bytes) else subject
    shown = "".join(c if c.isprintable() else "?" for c in text[:80])
    return shown + "..." if len(text) > 80 else shown
