"""struct_pack, the form of every message to and from the Master: types from literals, values to bytes and back.

A body is a type hash (u32), a meta byte, a total length when there are compatible tails, the type literal with a NUL,
then the payload. Because each message carries its literal, answers are decoded by the type that came, not by the one
that was expected: fields a newer Master appends are skipped, never misread.

Values: a struct is a tuple, a string is a `str` (bytes that are not UTF-8 survive as surrogates; `bytes` may be given
as well), a vector, array or set a list, a map a list of pairs, an optional its value or None, a variant the pair
(index, value), an expected its value or a `Failure`, void None.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

from egmctl.mooncake.errors import CodecError

__all__ = [
    "Array",
    "CodecError",
    "Expected",
    "Failure",
    "Map",
    "Message",
    "Optional",
    "Scalar",
    "Sequence",
    "Struct",
    "Text",
    "Type",
    "Variant",
    "Void",
    "build",
    "decode",
    "encode",
    "parse_literal",
    "read_frame",
    "type_hash",
    "write_message",
]

# Bounds on what a peer may send as a type. Mooncake's longest literal has under 200 bytes and nests 8 deep.
MAX_LITERAL: Final = 2048
MAX_DEPTH: Final = 24
MAX_ARRAY: Final = 65536
MAX_ALTERNATIVES: Final = 64

_LENGTHS: Final = tuple(struct.Struct(code) for code in ("<B", "<H", "<I", "<Q"))
_LENGTH_LIMITS: Final = (1 << 8, 1 << 16, 1 << 32, 1 << 64)


@dataclass(frozen=True)
class Failure:
    """The error side of an expected: ``code`` is Mooncake's error number."""

    code: int


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


@lru_cache(maxsize=256)
def type_hash(literal: bytes) -> int:
    """The hash of a type, bit 0 clear: half of MD5's first four bytes, as struct_pack takes it."""
    return int.from_bytes(hashlib.md5(literal, usedforsecurity=False).digest()[:4], "big") & 0xFFFFFFFE


class Message(NamedTuple):
    """A body taken apart. ``width`` is that of every length in it: 0 one byte, 1 two, 2 four, 3 eight."""

    literal: bytes
    value: Any
    width: int = 0
    # Bytes of the total-length field as an exponent like ``width``, None without one; then ``tail`` is what follows.
    total_width: int | None = None
    tail: bytes = b""


class Frame(NamedTuple):
    """Where the payload of a body lies, before it is decoded."""

    literal: bytes
    width: int
    total_width: int | None
    start: int
    end: int


def read_frame(body: bytes, literal: bytes = b"") -> Frame:
    """Check hash, meta byte and lengths of ``body``.

    ``literal`` stands in for one that the body leaves out (struct_pack's short form), and is not compared otherwise.
    Raises `CodecError`.
    """
    if len(body) < 4:
        raise CodecError(f"a message of {len(body)} bytes is too short")
    (number,) = _LENGTHS[2].unpack_from(body)
    at, end, width, total_width = 4, len(body), 0, None
    if number & 1:
        if len(body) < 5:
            raise CodecError("a message ends before its meta byte")
        meta = body[4]
        at = 5
        if meta & 0xE0:
            raise CodecError(f"a message has the unknown meta byte 0x{meta:02x}")
        width = meta >> 3 & 3
        if meta & 3:
            total_width = meta & 3
            size = _LENGTHS[total_width]
            if len(body) < at + size.size:
                raise CodecError("a message ends in its total length")
            (end,) = size.unpack_from(body, at)
            at += size.size
            if not at <= end <= len(body):
                raise CodecError(f"a message of {len(body)} bytes says it has {end}")
        if meta & 4:
            stop = body.find(0, at, min(end, at + MAX_LITERAL + 1))
            if stop < 0:
                raise CodecError("a message has a type literal without an end")
            literal = body[at:stop]
            at = stop + 1
    if type_hash(literal) != number & 0xFFFFFFFE:
        raise CodecError("a message's type hash is not that of its type literal", where=literal.hex()[:400])
    return Frame(literal, width, total_width, at, end)


def decode(body: bytes, literal: bytes = b"") -> Message:
    """Take a whole body apart, driven by the type literal that came with it. Raises `CodecError`, and nothing else."""
    from egmctl.mooncake.decoder import decoder

    frame = read_frame(body, literal)
    value, stop = decoder(frame.literal, frame.width)(body, frame.start, frame.end)
    if stop != frame.end and frame.total_width is None:
        raise CodecError(f"a message has {frame.end - stop} bytes after its payload")
    return Message(frame.literal, value, frame.width, frame.total_width, body[stop : frame.end])


class _TooLong(Exception):
    pass


def _length(count: int, width: int) -> bytes:
    if count >= _LENGTH_LIMITS[width]:
        raise _TooLong
    return _LENGTHS[width].pack(count)


def _write(kind: Type, value: Any, width: int, out: list[bytes]) -> None:
    if isinstance(kind, Text):
        raw = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
        out += (_length(len(raw), width), raw)
    elif isinstance(kind, Scalar):
        out.append(struct.pack("<" + kind.format, value))
    elif isinstance(kind, Struct):
        for member, item in zip(kind.members, value, strict=True):
            _write(member, item, width, out)
    elif isinstance(kind, (Sequence, Array)):
        if isinstance(kind, Sequence):
            out.append(_length(len(value), width))
        elif len(value) != kind.count:
            raise ValueError(f"{len(value)} elements for an array of {kind.count}")
        if isinstance(kind.element, Scalar):
            out.append(struct.pack(f"<{len(value)}{kind.element.format}", *value))
        else:
            for item in value:
                _write(kind.element, item, width, out)
    elif isinstance(kind, Optional):
        out.append(b"\0" if value is None else b"\1")
        if value is not None:
            _write(kind.value, value, width, out)
    elif isinstance(kind, Map):
        out.append(_length(len(value), width))
        for pair in value:
            _write(kind.key, pair[0], width, out)
            _write(kind.value, pair[1], width, out)
    elif isinstance(kind, Variant):
        index, item = value
        if not 0 <= index < len(kind.alternatives):
            raise ValueError(f"alternative {index} of {len(kind.alternatives)}")
        out.append(bytes((index,)))
        _write(kind.alternatives[index], item, width, out)
    elif isinstance(kind, Expected):
        failed = isinstance(value, Failure)
        out.append(b"\0" if failed else b"\1")
        _write(kind.error if failed else kind.value, value.code if failed else value, width, out)


def encode(literal: bytes, value: Any, *, width: int = 0) -> tuple[bytes, int]:
    """The payload of ``value``, and the width it took: ``width``, or wider when a length in it needs that."""
    kind = parse_literal(literal)
    try:
        while True:
            out: list[bytes] = []
            try:
                _write(kind, value, width, out)
                return b"".join(out), width
            except _TooLong:
                width += 1
    except (struct.error, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CodecError(f"a value does not fit its type: {error}", where=literal.hex()[:400]) from error


def build(literal: bytes, value: Any) -> bytes:
    """A request body as an 0.3.13 client writes it: no total length, every length as narrow as the longest allows."""
    payload, width = encode(literal, value)
    return b"".join((_LENGTHS[2].pack(type_hash(literal) | 1), bytes((4 | width << 3,)), literal, b"\0", payload))


def write_message(message: Message) -> bytes:
    """The body `decode` made ``message`` of, byte for byte; a tail is copied as it is."""
    payload, width = encode(message.literal, message.value, width=message.width)
    head = _LENGTHS[2].pack(type_hash(message.literal) | 1)
    rest = b"".join((message.literal, b"\0", payload, message.tail))
    if message.total_width is None:
        return b"".join((head, bytes((4 | width << 3,)), rest))
    size = _LENGTHS[message.total_width]
    total = size.pack(5 + size.size + len(rest))
    return b"".join((head, bytes((4 | width << 3 | message.total_width,)), total, rest))
