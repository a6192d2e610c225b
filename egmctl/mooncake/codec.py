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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, repeat
from typing import Any, Final, NamedTuple, TypeAlias

from egmctl.mooncake.errors import CodecError
from egmctl.mooncake.literals import (
    MAX_LITERAL,
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
    parse_literal,
)

__all__ = [
    "CodecError",
    "Failure",
    "Frame",
    "Message",
    "build",
    "decode",
    "encode",
    "read_frame",
    "type_hash",
    "write_message",
]

_LENGTHS: Final = tuple(struct.Struct(code) for code in ("<B", "<H", "<I", "<Q"))
_LENGTH_LIMITS: Final = (1 << 8, 1 << 16, 1 << 32, 1 << 64)


@dataclass(frozen=True)
class Failure:
    """The error side of an expected: ``code`` is Mooncake's error number."""

    code: int


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


_Writer: TypeAlias = "Callable[[Any, int, list[bytes]], None]"
"""(value, width of lengths, where its bytes go)."""
_Column: TypeAlias = "Callable[[Any, int], Iterable[bytes]]"
"""(values, width of lengths): the bytes of each, in order."""


def _length(count: int, width: int) -> bytes:
    if count >= _LENGTH_LIMITS[width]:
        raise _TooLong
    return _LENGTHS[width].pack(count)


@lru_cache(maxsize=256)
def _writer(literal: bytes) -> _Writer:
    return _make_writer(parse_literal(literal))


def _make_writer(kind: Type) -> _Writer:
    """A function made for one type: what a value of it needs is decided once, not for each of a batch's hundreds."""
    if isinstance(kind, Text):
        return _write_text
    if isinstance(kind, Scalar):
        pack = struct.Struct("<" + kind.format).pack
        return lambda value, width, out: out.append(pack(value))
    if isinstance(kind, Struct):
        return _struct_writer([_make_writer(member) for member in kind.members])
    if isinstance(kind, (Sequence, Array)):
        return _list_writer(kind)
    if isinstance(kind, Optional):
        inner = _make_writer(kind.value)

        def write_optional(value: Any, width: int, out: list[bytes]) -> None:
            out.append(b"\0" if value is None else b"\1")
            if value is not None:
                inner(value, width, out)

        return write_optional
    if isinstance(kind, Map):
        key, item = _make_writer(kind.key), _make_writer(kind.value)

        def write_map(value: Any, width: int, out: list[bytes]) -> None:
            out.append(_length(len(value), width))
            for pair in value:
                key(pair[0], width, out)
                item(pair[1], width, out)

        return write_map
    if isinstance(kind, Variant):
        alternatives = [_make_writer(each) for each in kind.alternatives]

        def write_variant(value: Any, width: int, out: list[bytes]) -> None:
            index, chosen = value
            if not 0 <= index < len(alternatives):
                raise ValueError(f"alternative {index} of {len(alternatives)}")
            out.append(bytes((index,)))
            alternatives[index](chosen, width, out)

        return write_variant
    if isinstance(kind, Expected):
        good, bad = _make_writer(kind.value), _make_writer(kind.error)

        def write_expected(value: Any, width: int, out: list[bytes]) -> None:
            if isinstance(value, Failure):
                out.append(b"\0")
                bad(value.code, width, out)
            else:
                out.append(b"\1")
                good(value, width, out)

        return write_expected
    return lambda value, width, out: None  # void


def _write_text(value: Any, width: int, out: list[bytes]) -> None:
    raw = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    out += (_length(len(raw), width), raw)


def _struct_writer(members: list[_Writer]) -> _Writer:
    def write_struct(value: Any, width: int, out: list[bytes]) -> None:
        for member, item in zip(members, value, strict=True):
            member(item, width, out)

    return write_struct


def _list_writer(kind: Sequence | Array) -> _Writer:
    count = kind.count if isinstance(kind, Array) else None
    code = kind.element.format if isinstance(kind.element, Scalar) else None
    elements = _make_column(kind.element)

    def write_list(value: Any, width: int, out: list[bytes]) -> None:
        if count is None:
            out.append(_length(len(value), width))
        elif len(value) != count:
            raise ValueError(f"{len(value)} elements for an array of {count}")
        if code is not None:
            out.append(struct.pack(f"<{len(value)}{code}", *value))
        elif len(value):
            out += elements(value, width)

    return write_list


def _make_column(kind: Type) -> _Column:
    """As `_make_writer`, for all elements of a list at once: what is decided for each costs most in a batch."""
    if isinstance(kind, Text):
        return _text_column
    if isinstance(kind, Struct) and all(isinstance(each, (Text, Scalar, Optional)) for each in kind.members):
        members = [_make_column(member) for member in kind.members]  # each makes one piece of a value

        def struct_column(values: Any, width: int) -> Iterable[bytes]:
            columns = list(zip(*values, strict=True))
            return chain.from_iterable(
                zip(*[member(column, width) for member, column in zip(members, columns, strict=True)], strict=True)
            )

        return struct_column
    write = _make_writer(kind)

    def column(values: Any, width: int) -> Iterable[bytes]:
        pieces = []
        for value in values:
            out: list[bytes] = []
            write(value, width, out)
            pieces.append(b"".join(out))
        return pieces

    def optional_column(values: Any, width: int) -> Iterable[bytes]:
        return column(values, width) if any(value is not None for value in values) else repeat(b"\0", len(values))

    return optional_column if isinstance(kind, Optional) else column


def _text_column(values: Any, width: int) -> Iterable[bytes]:
    raws = [each if isinstance(each, bytes) else each.encode("utf-8", "surrogateescape") for each in values]
    lengths = list(map(len, raws))
    if max(lengths) >= _LENGTH_LIMITS[width]:
        raise _TooLong
    return map(bytes.__add__, map(_LENGTHS[width].pack, lengths), raws)


def encode(literal: bytes, value: Any, *, width: int = 0) -> tuple[bytes, int]:
    """The payload of ``value``, and the width it took: ``width``, or wider when a length in it needs that."""
    write = _writer(literal)
    try:
        while True:
            out: list[bytes] = []
            try:
                write(value, width, out)
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
