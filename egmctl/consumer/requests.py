"""From what a caller asks to what reads and writes are made of, with everything checked that needs no Master."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from egmctl.consumer.buffers import Buffer, Buffers
from egmctl.consumer.engine import Part
from egmctl.consumer.errors import InvalidBuffer, InvalidRequest, ObjectExists
from egmctl.consumer.reader import ReadRequest
from egmctl.consumer.writer import WriteRequest

__all__ = [
    "BufferList",
    "Reads",
    "Writes",
    "check_range",
    "loose",
    "part_of_bytes",
    "parts_of",
    "singles",
]

_make: Any = tuple.__new__  # a named tuple's own constructor takes twice as long

BufferList = Sequence[tuple[int, int]]
"""(address, bytes) of each part of one object, in order."""


def parts_of(buffers: Buffers, pieces: BufferList) -> list[Part]:
    """Raises `InvalidBuffer` for what is not registered."""
    parts = []
    offset = 0
    for address, nbytes in pieces:
        parts.append(_make(Part, (offset, address, nbytes, buffers.find(address, nbytes))))
        offset += nbytes
    return parts


class Reads:
    """Gets of whole objects, spread over their parts: each is looked at when its turn comes, while others are copied.

    Asking for one raises `InvalidBuffer`.
    """

    def __init__(self, buffers: Buffers, keys: Sequence[str], lists: Sequence[BufferList]) -> None:
        self._buffers = buffers
        self._keys = keys
        self._lists = lists

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, at: int) -> ReadRequest:
        made: ReadRequest = _make(ReadRequest, (self._keys[at], parts_of(self._buffers, self._lists[at]), None))
        return made

    def keys(self, numbers: Sequence[int]) -> list[str]:
        """Of these requests; nothing else of them is looked at."""
        keys = self._keys
        return [keys[number] for number in numbers]

    def whole(self, at: int) -> Part | None:
        """Where it goes, if that is one place."""
        pieces = self._lists[at]
        if len(pieces) != 1:
            return None
        address, nbytes = pieces[0]
        made: Part = _make(Part, (0, address, nbytes, self._buffers.find(address, nbytes)))
        return made


class Writes:
    """Puts of whole objects laid together from their parts, likewise.

    Asking for one raises `InvalidBuffer`, `InvalidRequest`, and `ObjectExists` for a key that was there before.
    """

    def __init__(self, buffers: Buffers, keys: Sequence[str], lists: Sequence[BufferList]) -> None:
        self._buffers = buffers
        self._keys = keys
        self._lists = lists
        self._first: dict[str, int] = {}
        if len(set(keys)) < len(keys):
            for at, key in enumerate(keys):
                self._first.setdefault(key, at)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, at: int) -> WriteRequest:
        key = self._keys[at]
        if self._first and self._first[key] != at:
            raise ObjectExists("is put twice in this batch", where=f"object {key!r}")
        parts = parts_of(self._buffers, self._lists[at])
        total = parts[0].nbytes if len(parts) == 1 else sum([part.nbytes for part in parts])
        if not key or total == 0:
            raise InvalidRequest("keys are not empty, and objects have at least one byte", where=f"object {key!r}")
        made: WriteRequest = _make(WriteRequest, (key, total, parts, None))
        return made


class _Singles(Sequence[BufferList]):
    """Made one by one: a list of hundreds would be made before the first of them is asked for."""

    def __init__(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        self._addresses = addresses
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, at: Any) -> Any:
        return ((self._addresses[at], self._sizes[at]),)


def singles(addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[BufferList]:
    """One part for each object."""
    return _Singles(addresses, sizes)


def check_range(key: str, size: int, offset: int, length: int) -> None:
    """Raises `InvalidRequest` unless an object of ``size`` bytes has ``[offset, offset + length)``."""
    if offset < 0 or length < 0 or offset + length > size:
        raise InvalidRequest(f"{length} bytes at {offset} are not inside its {size} bytes", where=f"object {key!r}")


def loose(address: int, nbytes: int) -> Part:
    return Part(0, address, nbytes, Buffer(address, nbytes, "pageable", None))


def part_of_bytes(key: str, data: bytes | bytearray | memoryview) -> tuple[Part, object]:
    """What a bytes-like object holds, and what has to be kept as long as it is used. Raises `InvalidBuffer`."""
    try:
        view = memoryview(data).cast("B")
    except TypeError as error:
        raise InvalidBuffer(
            f"{type(data).__name__}: {error}",
            where=f"object {key!r}",
            hint="give bytes, or a buffer that is one contiguous piece of memory",
        ) from error
    if view.nbytes == 0:
        raise InvalidRequest("an object has at least one byte", where=f"object {key!r}")
    if view.readonly:
        # The characters of a bytes object lie still; ctypes gives their address without a copy.
        kept: object = data if isinstance(data, bytes) else view.tobytes()
        address = ctypes.cast(ctypes.c_char_p(kept), ctypes.c_void_p).value or 0  # type: ignore[arg-type]
    else:
        kept = (ctypes.c_char * view.nbytes).from_buffer(view)
        address = ctypes.addressof(kept)
    return loose(address, view.nbytes), kept
