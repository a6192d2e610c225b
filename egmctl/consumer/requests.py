"""From what a caller asks to what reads and writes are made of, with everything checked that needs no Master."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from egmctl.consumer.buffers import Buffer, Buffers
from egmctl.consumer.engine import Part
from egmctl.consumer.errors import InvalidRequest, ObjectExists
from egmctl.consumer.reader import ReadRequest
from egmctl.consumer.writer import WriteRequest
from egmctl.errors import EgmError

__all__ = [
    "Batch",
    "BufferList",
    "check_range",
    "loose",
    "part_of_bytes",
    "parts_of",
    "read_batch",
    "write_batch",
]

_make: Any = tuple.__new__  # a named tuple's own constructor takes twice as long

BufferList = Sequence[tuple[int, int]]
"""(address, bytes) of each part of one object, in order."""


class Batch:
    """Answers in the caller's order, some of which are known before anything is asked."""

    def __init__(self, count: int) -> None:
        self._results: list[int | EgmError] = [0] * count
        self._places: list[int] = []

    def refuse(self, at: int, error: EgmError) -> None:
        self._results[at] = error

    def ask(self, at: int) -> None:
        """The next of the results given to `merge` is the caller's number ``at``."""
        self._places.append(at)

    def merge(self, found: Sequence[int | EgmError]) -> list[int | EgmError]:
        for at, result in zip(self._places, found, strict=True):
            self._results[at] = result
        return self._results


def parts_of(buffers: Buffers, pieces: BufferList) -> list[Part]:
    """Raises `InvalidBuffer` for what is not registered."""
    parts = []
    offset = 0
    for address, nbytes in pieces:
        parts.append(_make(Part, (offset, address, nbytes, buffers.find(address, nbytes))))
        offset += nbytes
    return parts


def write_batch(buffers: Buffers, keys: Sequence[str], lists: Sequence[BufferList]) -> tuple[Batch, list[WriteRequest]]:
    """Puts of whole objects laid together from their parts."""
    batch = Batch(len(keys))
    requests: list[WriteRequest] = []
    seen: set[str] = set()
    for at, (key, pieces) in enumerate(zip(keys, lists, strict=True)):
        try:
            if key in seen:
                raise ObjectExists("is put twice in this batch", where=f"object {key!r}")
            parts = parts_of(buffers, pieces)
            total = parts[0].nbytes if len(parts) == 1 else sum(part.nbytes for part in parts)
            if not key or total == 0:
                raise InvalidRequest("keys are not empty, and objects have at least one byte", where=f"object {key!r}")
        except EgmError as error:
            batch.refuse(at, error)
            continue
        seen.add(key)
        requests.append(_make(WriteRequest, (key, total, parts, None)))
        batch.ask(at)
    return batch, requests


def read_batch(buffers: Buffers, keys: Sequence[str], lists: Sequence[BufferList]) -> tuple[Batch, list[ReadRequest]]:
    """Gets of whole objects, spread over their parts."""
    batch = Batch(len(keys))
    requests: list[ReadRequest] = []
    for at, (key, pieces) in enumerate(zip(keys, lists, strict=True)):
        try:
            parts = parts_of(buffers, pieces)
        except EgmError as error:
            batch.refuse(at, error)
            continue
        requests.append(_make(ReadRequest, (key, parts, None)))
        batch.ask(at)
    return batch, requests


def check_range(key: str, size: int, offset: int, length: int) -> None:
    """Raises `InvalidRequest` unless an object of ``size`` bytes has ``[offset, offset + length)``."""
    if offset < 0 or length < 0 or offset + length > size:
        raise InvalidRequest(f"{length} bytes at {offset} are not inside its {size} bytes", where=f"object {key!r}")


def loose(address: int, nbytes: int) -> Part:
    return Part(0, address, nbytes, Buffer(address, nbytes, "pageable", None))


def part_of_bytes(key: str, data: bytes | bytearray | memoryview) -> tuple[Part, object]:
    """What a bytes-like object holds, without a copy, and what has to be kept as long as it is used."""
    view = memoryview(data).cast("B")
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
