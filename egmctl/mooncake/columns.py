"""A list whose elements are all built alike, read column by column.

The answers to a batch mostly differ in a few numbers only: each object has one replica, in memory, at a provider whose
name is as long as the others'. Then every element has the same length, and one `struct` format takes all of them apart
in C, several times as fast as even a decoder that was compiled for their type. What is not of that kind is left to
that decoder: here it is "no columns", never an error.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as AbstractSequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from egmctl.mooncake.codec import Frame
from egmctl.mooncake.errors import CodecError
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
    parse_literal,
)

__all__ = ["Column", "Columns", "read_columns"]

_LENGTHS: Final = tuple(struct.Struct(code) for code in ("<B", "<H", "<I", "<Q"))
_MAX_FIELDS: Final = 64


class Column(int):
    """The number of a column."""


class Columns(NamedTuple):
    """``element`` is what the decoder makes of each, with a `Column` in place of every number and text. ``values`` has
    the columns by number, each as long as the list; texts are ``bytes`` there."""

    element: Any
    values: AbstractSequence[tuple[Any, ...]]


class _Layout(NamedTuple):
    """How one element lies. ``fixed`` are the fields that must be the same in each: counts, flags, alternatives,
    lengths of texts."""

    element: Any
    form: struct.Struct
    fixed: tuple[tuple[int, bytes], ...]
    columns: tuple[int, ...]


class _Apart(Exception):
    """The elements are not, or may not be, of one build."""


class _Survey:
    """Walks one element and notes where its fields lie. Reading past the end raises `struct.error` or IndexError."""

    def __init__(self, body: bytes, at: int, width: int) -> None:
        self._body = body
        self._start = self.at = at
        self._width = _LENGTHS[width]
        self._forms: list[str] = []
        self._fixed: list[tuple[int, int, int]] = []  # (number of the field, from, to)
        self._columns: list[int] = []

    def layout(self, kind: Type) -> _Layout:
        element = self._value(kind)
        fixed = [(number, self._body[begin:end]) for number, begin, end in self._fixed]
        return _Layout(element, struct.Struct("<" + "".join(self._forms)), tuple(fixed), tuple(self._columns))

    def _same(self, nbytes: int) -> None:
        """The next bytes are the same in each element."""
        begin, self.at = self.at, self.at + nbytes
        if self._fixed and self._fixed[-1][0] == len(self._forms) - 1:
            number, before, _ = self._fixed.pop()
            begin = before
            self._forms.pop()
        else:
            number = len(self._forms)
        self._fixed.append((number, begin, self.at))
        self._forms.append(f"{self.at - begin}s")
        self._check()

    def _check(self) -> None:
        """A type may ask for far more than the message holds."""
        if len(self._forms) > _MAX_FIELDS or self.at > len(self._body):
            raise _Apart

    def _column(self, form: str, nbytes: int) -> Column:
        self.at += nbytes
        self._check()
        self._columns.append(len(self._forms))
        self._forms.append(form)
        return Column(len(self._columns) - 1)

    def _byte(self) -> int:
        value = self._body[self.at]
        self._same(1)
        return value

    def _flag(self) -> bool:
        value = self._byte()
        if value > 1:
            raise _Apart
        return value == 1

    def _length(self) -> int:
        (value,) = self._width.unpack_from(self._body, self.at)
        self._same(self._width.size)
        return int(value)

    def _value(self, kind: Type) -> Any:
        if isinstance(kind, Scalar):
            if kind.format == "?":
                return self._flag()
            return self._column(kind.format, struct.calcsize("<" + kind.format))
        if isinstance(kind, Text):
            length = self._length()
            return self._column(f"{length}s", length)
        if isinstance(kind, Struct):
            return tuple([self._value(member) for member in kind.members])
        if isinstance(kind, Variant):
            index = self._byte()
            return index, self._value(kind.alternatives[index])
        if isinstance(kind, Optional):
            return self._value(kind.value) if self._flag() else None
        if isinstance(kind, Expected):
            if not self._flag():
                raise _Apart  # a failure
            return self._value(kind.value)
        if isinstance(kind, Void):
            return None
        element = Struct((kind.key, kind.value)) if isinstance(kind, Map) else kind.element
        count = kind.count if isinstance(kind, Array) else self._length()
        if count > _MAX_FIELDS:
            raise _Apart
        return [self._value(element) for _ in range(count)]


class _Memory:
    """The layout met last for one literal: the next answer mostly has it, too."""

    __slots__ = ("element", "layout")

    def __init__(self, literal: bytes) -> None:
        kind = parse_literal(literal)
        self.element = kind.element if isinstance(kind, Sequence) else None
        self.layout: _Layout | None = None


@lru_cache(maxsize=128)
def _memory(literal: bytes, width: int) -> _Memory:
    return _Memory(literal)


def read_columns(body: bytes, frame: Frame) -> Columns | None:
    """The list in ``body``, when its elements are all built alike; None when they are not, or are failures, none,
    or damaged (which the decoder then says)."""
    try:
        memory = _memory(frame.literal, frame.width)
        lengths = _LENGTHS[frame.width]
        (count,) = lengths.unpack_from(body, frame.start)
        start = frame.start + lengths.size
        if memory.element is None or count == 0:
            return None
        found = None if memory.layout is None else _read(memory.layout, body, start, count, frame)
        if found is None:
            memory.layout = _Survey(body[: frame.end], start, frame.width).layout(memory.element)
            found = _read(memory.layout, body, start, count, frame)
        return found
    except (_Apart, struct.error, IndexError, CodecError):
        return None


def _read(layout: _Layout, body: bytes, start: int, count: int, frame: Frame) -> Columns | None:
    stop = start + count * layout.form.size
    # With a total length, fields that a newer Master appended may follow.
    if not layout.form.size or stop > frame.end or (stop < frame.end and frame.total_width is None):
        return None
    fields = list(zip(*layout.form.iter_unpack(memoryview(body)[start:stop]), strict=True))
    if any(fields[at].count(value) != count for at, value in layout.fixed):
        return None
    return Columns(layout.element, [fields[at] for at in layout.columns])
