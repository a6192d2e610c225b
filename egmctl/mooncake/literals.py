"""struct_pack's types: the tree behind a type literal, the byte string that every message carries.

A literal is one byte a type (0x01 int32, 0x04 uint64, 0x80 string, 0x84 vector, 0xfd struct ... 0xff and so on), the
inner types after it. `parse_literal` reads it, with bounds, since a literal is something a peer sends.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

from egmctl.mooncake.errors import CodecError

__all__ = [
    "MAX_LITERAL",
    "Array",
    "Expected",
    "Map",
    "Optional",
    "Scalar",
    "Sequence",
    "Struct",
    "Text",
    "Type",
    "Variant",
    "Void",
    "minimum_size",
    "parse_literal",
]

# Bounds on what a peer may send as a type. Mooncake's longest literal has under 200 bytes and nests 8 deep.
MAX_LITERAL: Final = 2048
MAX_DEPTH: Final = 24
MAX_ARRAY: Final = 65536
MAX_ALTERNATIVES: Final = 64


@dataclass(frozen=True)
class Scalar:
    """A fixed-size number; ``format`` is its `struct` character. A bool is one byte that is 0 or 1."""

    format: str


@dataclass(frozen=True)
class Text:
    pass


@dataclass(frozen=True)
class Void:
    pass


@dataclass(frozen=True)
class Array:
    element: Type
    count: int


@dataclass(frozen=True)
class Sequence:
    """A vector or a set: a length, then the elements."""

    element: Type


@dataclass(frozen=True)
class Map:
    key: Type
    value: Type


@dataclass(frozen=True)
class Optional:
    value: Type


@dataclass(frozen=True)
class Variant:
    alternatives: tuple[Type, ...]


@dataclass(frozen=True)
class Expected:
    value: Type
    error: Type


@dataclass(frozen=True)
class Struct:
    members: tuple[Type, ...]


Type: TypeAlias = "Scalar | Text | Void | Array | Sequence | Map | Optional | Variant | Expected | Struct"

_SCALARS: Final = {
    0x01: Scalar("i"),
    0x02: Scalar("I"),
    0x03: Scalar("q"),
    0x04: Scalar("Q"),
    0x05: Scalar("b"),
    0x06: Scalar("B"),
    0x07: Scalar("h"),
    0x08: Scalar("H"),
    0x0B: Scalar("?"),
    0x0C: Scalar("c"),
    0x11: Scalar("f"),
    0x12: Scalar("d"),
}
_STRING, _ARRAY, _MAP, _SET, _VECTOR, _OPTIONAL, _VARIANT, _EXPECTED = range(0x80, 0x88)
_VOID, _STRUCT, _END = 0xFA, 0xFD, 0xFF
_ALIGNMENTS = frozenset(129 + alignment for alignment in (1, 2, 4, 8, 16))


@lru_cache(maxsize=1024)
def minimum_size(kind: Type) -> int:
    """The fewest payload bytes a value of this type can have (a length counted as one byte)."""
    if isinstance(kind, Scalar):
        return struct.calcsize("<" + kind.format)
    if isinstance(kind, Struct):
        return sum(map(minimum_size, kind.members))
    if isinstance(kind, Array):
        return kind.count * minimum_size(kind.element)
    if isinstance(kind, Variant):
        return 1 + min(map(minimum_size, kind.alternatives))
    if isinstance(kind, Expected):
        return 1 + min(minimum_size(kind.value), minimum_size(kind.error))
    return 0 if isinstance(kind, Void) else 1


class _Parser:
    def __init__(self, literal: bytes) -> None:
        self.literal = literal
        self.at = 0

    def byte(self) -> int:
        if self.at >= len(self.literal):
            raise CodecError("a type literal ends too early", where=self.literal.hex()[:400])
        self.at += 1
        return self.literal[self.at - 1]

    def size(self) -> int:
        """A size literal: base 127, low digit first, each digit + 1; the last one has 128 added."""
        total, factor = 0, 1
        while (digit := self.byte()) < 0x80:
            if digit == 0 or factor > 127**4:
                raise CodecError("a type literal has a size that makes no sense", where=self.literal.hex()[:400])
            total += (digit - 1) * factor
            factor *= 127
        return total + (digit - 129) * factor

    def until_end(self, depth: int) -> tuple[Type, ...]:
        members: list[Type] = []
        while True:
            rest = self.literal[self.at : self.at + 3]
            if rest[:1] == b"\xff":
                self.at += 1
                return tuple(members)
            # A struct without padding ends in its two alignments (size literals of 1 to 16). As types these five codes
            # would need something behind them, which the end is not.
            if len(rest) == 3 and rest[2] == _END and rest[0] in _ALIGNMENTS and rest[1] in _ALIGNMENTS:
                self.at += 3
                return tuple(members)
            members.append(self.type(depth + 1))

    def type(self, depth: int) -> Type:
        if depth > MAX_DEPTH:
            raise CodecError(f"a type literal nests deeper than {MAX_DEPTH}", where=self.literal.hex()[:400])
        code = self.byte()
        scalar = _SCALARS.get(code)
        if scalar is not None:
            return scalar
        if code == _STRING:
            if self.byte() != 0x0C:
                raise CodecError("a type literal has a string of wide characters", where=self.literal.hex()[:400])
            return Text()
        if code == _ARRAY:
            element = self.type(depth + 1)
            count = self.size()
            if not 0 < count <= MAX_ARRAY or minimum_size(element) == 0:
                raise CodecError(f"a type literal has an array of {count}", where=self.literal.hex()[:400])
            return Array(element, count)
        if code == _MAP:
            return Map(self.type(depth + 1), self.type(depth + 1))
        if code in (_SET, _VECTOR):
            return Sequence(self.type(depth + 1))
        if code == _OPTIONAL:
            return Optional(self.type(depth + 1))
        if code == _VARIANT:
            alternatives = self.until_end(depth)
            if not 0 < len(alternatives) <= MAX_ALTERNATIVES:
                raise CodecError(f"a type literal has a variant of {len(alternatives)}", where=self.literal.hex()[:400])
            return Variant(alternatives)
        if code == _EXPECTED:
            return Expected(self.type(depth + 1), self.type(depth + 1))
        if code == _STRUCT:
            return Struct(self.until_end(depth))
        if code == _VOID:
            return Void()
        raise CodecError(f"a type literal has the unknown code 0x{code:02x}", where=self.literal.hex()[:400])


@lru_cache(maxsize=256)
def parse_literal(literal: bytes) -> Type:
    """The type a literal (without its NUL) describes. Raises `CodecError`."""
    if len(literal) > MAX_LITERAL:
        raise CodecError(f"a type literal of {len(literal)} bytes is longer than {MAX_LITERAL}")
    parser = _Parser(literal)
    parsed = parser.type(0)
    if parser.at != len(literal):
        raise CodecError("a type literal goes on after its end", where=literal.hex()[:400])
    return parsed
