"""A plain recursive decoder, as obvious as can be: what the compiled one is compared with."""

from __future__ import annotations

import struct
from typing import Any

from egmctl.mooncake.codec import Failure
from egmctl.mooncake.literals import (
    Array,
    Expected,
    Map,
    Optional,
    Scalar,
    Sequence,
    Struct,
    Text,
    Type,
    Variant,
    Void,
    minimum_size,
)

__all__ = ["Damaged", "literal_of", "reference_decode"]


class Damaged(Exception):
    pass


class _Reader:
    def __init__(self, data: bytes, width: int) -> None:
        self.data = data
        self.at = 0
        self.width = width

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise Damaged
        self.at += count
        return self.data[self.at - count : self.at]

    def length(self) -> int:
        return int.from_bytes(self.take(1 << self.width), "little")

    def flag(self) -> bool:
        byte = self.take(1)[0]
        if byte > 1:
            raise Damaged
        return bool(byte)

    def value(self, kind: Type) -> Any:
        if isinstance(kind, Scalar):
            if kind.format == "?":
                return self.flag()
            size = struct.calcsize("<" + kind.format)
            return struct.unpack("<" + kind.format, self.take(size))[0]
        if isinstance(kind, Text):
            return self.take(self.length()).decode("utf-8", "surrogateescape")
        if isinstance(kind, Void):
            return None
        if isinstance(kind, Struct):
            return tuple(self.value(member) for member in kind.members)
        if isinstance(kind, Array):
            return [self.value(kind.element) for _ in range(kind.count)]
        if isinstance(kind, (Sequence, Map)):
            element = kind.element if isinstance(kind, Sequence) else Struct((kind.key, kind.value))
            count = self.length()
            if count * max(1, minimum_size(element)) > len(self.data) - self.at:
                raise Damaged
            return [self.value(element) for _ in range(count)]
        if isinstance(kind, Optional):
            return self.value(kind.value) if self.flag() else None
        if isinstance(kind, Expected):
            return self.value(kind.value) if self.flag() else Failure(self.value(kind.error))
        assert isinstance(kind, Variant)
        index = self.take(1)[0]
        if index >= len(kind.alternatives):
            raise Damaged
        return index, self.value(kind.alternatives[index])


def reference_decode(kind: Type, payload: bytes, width: int) -> tuple[Any, int]:
    """The value, and how many bytes of ``payload`` it took. Raises `Damaged`."""
    reader = _Reader(payload, width)
    return reader.value(kind), reader.at


_CODES = {
    "i": 0x01,
    "I": 0x02,
    "q": 0x03,
    "Q": 0x04,
    "b": 0x05,
    "B": 0x06,
    "h": 0x07,
    "H": 0x08,
    "?": 0x0B,
    "c": 0x0C,
    "f": 0x11,
    "d": 0x12,
}


def _size(count: int) -> bytes:
    digits = []
    while count >= 127:
        digits.append(count % 127 + 1)
        count //= 127
    return bytes([*digits, count + 129])


def literal_of(kind: Type) -> bytes:
    """The literal of a type; sets are written as vectors, and structs without the alignments of plain ones."""
    if isinstance(kind, Scalar):
        return bytes((_CODES[kind.format],))
    if isinstance(kind, Text):
        return b"\x80\x0c"
    if isinstance(kind, Void):
        return b"\xfa"
    if isinstance(kind, Struct):
        return b"\xfd" + b"".join(map(literal_of, kind.members)) + b"\xff"
    if isinstance(kind, Array):
        return b"\x81" + literal_of(kind.element) + _size(kind.count)
    if isinstance(kind, Sequence):
        return b"\x84" + literal_of(kind.element)
    if isinstance(kind, Map):
        return b"\x82" + literal_of(kind.key) + literal_of(kind.value)
    if isinstance(kind, Optional):
        return b"\x85" + literal_of(kind.value)
    if isinstance(kind, Expected):
        return b"\x87" + literal_of(kind.value) + literal_of(kind.error)
    assert isinstance(kind, Variant)
    return b"\x86" + b"".join(map(literal_of, kind.alternatives)) + b"\xff"
