"""From what a caller asks to what reads and writes are made of, with everything checked that needs no Master."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from operator import add, index
from typing import Any, NamedTuple, Protocol

from egmctl.consumer.buffers import Buffer, Buffers
from egmctl.consumer.engine import Part
from egmctl.consumer.errors import InvalidBuffer, InvalidRequest, ObjectExists
from egmctl.consumer.host_copy import Completion
from egmctl.consumer.pins import Target

__all__ = [
    "BufferList",
    "Plain",
    "ReadList",
    "ReadRequest",
    "ReadRequests",
    "Reads",
    "WriteRequest",
    "WriteRequests",
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


Layout = Callable[[int], tuple[int, Sequence[Part]]]
"""From an object's size to (the result to return, which part of it goes where). Raises what is wrong with it."""


class ReadRequest(NamedTuple):
    """One object to be read: all of it into ``parts``, or as ``layout`` says where that is given."""

    key: str
    parts: Sequence[Part] = ()
    layout: Layout | None = None

    def laid_out(self, size: int) -> tuple[int, Sequence[Part]]:
        if self.layout is not None:
            return self.layout(size)
        parts = self.parts
        if len(parts) == 1 and parts[0].nbytes == size:  # mostly
            return size, parts
        capacity = sum(part.nbytes for part in parts)
        if capacity < size:
            raise InvalidBuffer(
                f"has {size} bytes and the buffer given for it {capacity}",
                where=f"object {self.key!r}",
                hint="give a larger buffer, or get a range",
            )
        used = []
        for part in parts:
            if part.offset >= size:
                break
            used.append(part._replace(nbytes=min(part.nbytes, size - part.offset)))
        return size, used


class Plain(NamedTuple):
    """Requests of which each is one part of the same buffer, with nothing wrong about them."""

    keys: Sequence[str]
    sizes: Sequence[int]
    addresses: Sequence[int]
    buffer: Buffer

    def only(self, at: Sequence[int]) -> Plain:
        """Those at these positions."""
        if len(at) == len(self.keys):
            return self
        keys, sizes, addresses = self.keys, self.sizes, self.addresses
        return Plain([keys[n] for n in at], [sizes[n] for n in at], [addresses[n] for n in at], self.buffer)


class ReadRequests(Protocol):
    """Requests by number. Asking for one may raise what is wrong with it, an `EgmError`."""

    def __len__(self) -> int: ...
    def __getitem__(self, at: int, /) -> ReadRequest: ...
    def keys(self, numbers: Sequence[int], /) -> list[str]: ...
    def plain(self, numbers: Sequence[int], /) -> Plain | None:
        """Neighbours all at once, where each is one part of the same buffer; None: ask for each."""


class ReadList:
    """Requests that are made already."""

    def __init__(self, requests: Sequence[ReadRequest]) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, at: int) -> ReadRequest:
        return self._requests[at]

    def keys(self, numbers: Sequence[int]) -> list[str]:
        return [self._requests[number].key for number in numbers]

    def plain(self, numbers: Sequence[int]) -> Plain | None:
        return None


class WriteRequest(NamedTuple):
    """One object to be written: from ``parts``, or by ``custom`` (targets of all replicas, stream) where given."""

    key: str
    nbytes: int
    parts: Sequence[Part] = ()
    custom: Callable[[Sequence[Target], int | None], Completion] | None = None


class WriteRequests(Protocol):
    """Requests by number. Asking for one may raise what is wrong with it, an `EgmError`."""

    def __len__(self) -> int: ...
    def __getitem__(self, at: int, /) -> WriteRequest: ...


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
        self._keys = list(keys)
        self._lists = _own(lists)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, at: int) -> ReadRequest:
        made: ReadRequest = _make(ReadRequest, (self._keys[at], parts_of(self._buffers, self._lists[at]), None))
        return made

    def keys(self, numbers: Sequence[int]) -> list[str]:
        """Of these requests; nothing else of them is looked at."""
        keys = self._keys
        return [keys[number] for number in numbers]

    def plain(self, numbers: Sequence[int]) -> Plain | None:
        return _plain(self._buffers, self._keys, self._lists, numbers)


class Writes:
    """Puts of whole objects laid together from their parts, likewise.

    Asking for one raises `InvalidBuffer`, `InvalidRequest`, and `ObjectExists` for a key that was there before.
    """

    def __init__(self, buffers: Buffers, keys: Sequence[str], lists: Sequence[BufferList]) -> None:
        self._buffers = buffers
        self._keys = list(keys)
        self._lists = _own(lists)
        self._first: dict[str, int] = {}
        self.every_key = set(self._keys)
        if len(self.every_key) < len(self._keys):
            for at, key in enumerate(self._keys):
                self._first.setdefault(key, at)

    def __len__(self) -> int:
        return len(self._keys)

    def plain(self, numbers: Sequence[int]) -> Plain | None:
        """As of `ReadRequests`."""
        return None if self._first else _plain(self._buffers, self._keys, self._lists, numbers)

    def __getitem__(self, at: int) -> WriteRequest:
        key = self._keys[at]
        if self._first and self._first[key] != at:
            raise ObjectExists("is put twice in this batch", where=f"object {key!r}")
        parts = parts_of(self._buffers, self._lists[at])
        total = sum([part.nbytes for part in parts])
        if not key or total == 0:
            raise InvalidRequest("keys are not empty, and objects have at least one byte", where=f"object {key!r}")
        made: WriteRequest = _make(WriteRequest, (key, total, parts, None))
        return made


def _plain(buffers: Buffers, keys: Sequence[str], lists: Sequence[BufferList], numbers: Sequence[int]) -> Plain | None:
    if not numbers or not isinstance(lists, _Singles) or not isinstance(numbers, range) or numbers.step != 1:
        return None
    these = slice(numbers.start, numbers.stop)
    keys, addresses, sizes = keys[these], lists.addresses[these], lists.sizes[these]
    if not all(keys) or min(sizes) <= 0:
        return None
    try:
        buffer = buffers.find(min(addresses), 1)
    except InvalidBuffer:
        return None
    return Plain(keys, sizes, addresses, buffer) if max(map(add, addresses, sizes)) <= buffer.end else None


class _Singles(Sequence[BufferList]):
    """Made one by one: a list of hundreds would be made before the first of them is asked for."""

    def __init__(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        self.addresses = _integers(addresses)
        self.sizes = _integers(sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, at: Any) -> Any:
        return ((self.addresses[at], self.sizes[at]),)


def _integers(numbers: Iterable[int]) -> list[int]:
    """Our own, of whatever kind they are: a caller may change its lists while a put is under way."""
    try:
        return list(map(index, numbers))
    except TypeError as error:
        raise InvalidRequest(f"addresses and sizes are integers: {error}") from error


def _own(lists: Sequence[BufferList]) -> Sequence[BufferList]:
    return lists if isinstance(lists, _Singles) else [[tuple(_integers(pair)) for pair in pairs] for pairs in lists]  # type: ignore[misc]


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
