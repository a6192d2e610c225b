"""Decoders made for one type: a literal is compiled to a Python function, once, and kept.

A batch of 256 locations is some 6,000 values. Walking the type tree for each takes longer than the Master needs to
answer, so the walk is done once, at compile time: what is left are a few `unpack_from` calls over merged fixed fields.

Bounds: offsets only ever grow and are compared with the end at the end; a loop's count is compared with the bytes left
before the loop is entered; reading past the buffer raises. So nothing is larger than the message that asked for it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

from egmctl.mooncake.codec import Failure
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
    minimum_size,
    parse_literal,
)

__all__ = ["Decoder", "decoder"]

# (body, start, end) -> (value, where its payload ends)
Decoder: TypeAlias = Callable[[bytes, int, int], tuple[Any, int]]

_LENGTH_FORMATS = "BHIQ"
_MAX_INLINE = 6  # Python allows 20 nested blocks; deeper types get a function of their own
_MAX_MERGED = 64


class _Truncated(Exception):
    pass


def _too_long(count: int) -> None:
    raise _Truncated(f"a length of {count} is more than the message holds")


def _not_bool(byte: int) -> None:
    raise _Truncated(f"0x{byte:02x} is not a truth value")


class _Writer:
    """Writes the source of one function. ``pending`` are fixed fields not read yet, to be read by one unpack."""

    def __init__(self, width: int, shared: _Shared) -> None:
        self.width = width
        self.shared = shared
        self.lines: list[str] = []
        self.indent = 1
        self.pending: list[tuple[str, str]] = []
        self.checks: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def name(self) -> str:
        return self.shared.name()

    def fixed(self, fmt: str) -> str:
        """A fixed-size field: its name, valid after the next `flush`."""
        name = self.name()
        self.pending.append((fmt, name))
        if len(self.pending) >= _MAX_MERGED:
            self.flush()
        return name

    def flush(self) -> None:
        """Read the pending fields with one call and step over them."""
        if not self.pending:
            return
        formats = "".join(fmt for fmt, _ in self.pending)
        names = [name for _, name in self.pending]
        size = struct.calcsize("<" + formats)
        if formats == "B":
            self.line(f"{names[0]} = b[o]")
        else:
            self.line(f"{', '.join(names)}, = {self.shared.unpacker(formats)}(b, o)")
        self.line(f"o += {size}")
        self.pending.clear()
        for check in self.checks:
            self.line(check)
        self.checks.clear()

    def flag(self) -> str:
        """A bool, as 0 or 1; anything else is an error."""
        name = self.fixed("B")
        self.checks.append(f"if {name} > 1: not_bool({name})")
        return name

    def value(self, kind: Type, depth: int) -> str:
        """Emit code that reads a value; an expression for it, valid until the block ends and after `flush`."""
        if isinstance(kind, Scalar):
            if kind.format == "?":
                return f"({self.flag()} == 1)"
            return self.fixed(kind.format)
        if isinstance(kind, Void):
            return "None"
        if isinstance(kind, Struct):
            parts = [self.value(member, depth) for member in kind.members]
            return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        if isinstance(kind, Text):
            length = self.fixed(_LENGTH_FORMATS[self.width])
            self.flush()
            name, stop = self.name(), self.name()
            self.line(f"{stop} = o + {length}")
            self.line(f"{name} = str(b[o:{stop}], 'utf-8', 'surrogateescape')")
            self.line(f"o = {stop}")
            return name
        if depth >= _MAX_INLINE:
            self.flush()
            name = self.name()
            self.line(f"{name}, o = {self.shared.function(kind, self.width)}(b, o, n)")
            return name
        return self.branching(kind, depth + 1)

    def branching(self, kind: Type, depth: int) -> str:
        name = self.name()
        if isinstance(kind, Array):
            self.flush()
            self.line(f"{name} = []")
            self.block(f"for _ in range({kind.count}):", kind.element, depth, f"{name}.append(%s)")
        elif isinstance(kind, (Sequence, Map)):
            count = self.fixed(_LENGTH_FORMATS[self.width])
            self.flush()
            element = kind.element if isinstance(kind, Sequence) else Struct((kind.key, kind.value))
            # An element of no bytes at all is counted as one: nobody sends a list of nothings.
            self.line(f"if {count} * {max(1, minimum_size(element))} > n - o: too_long({count})")
            self.line(f"{name} = []")
            self.block(f"for _ in range({count}):", element, depth, f"{name}.append(%s)")
        elif isinstance(kind, Optional):
            flag = self.flag()
            self.flush()
            self.line(f"{name} = None")
            self.block(f"if {flag}:", kind.value, depth, f"{name} = %s")
        elif isinstance(kind, Expected):
            flag = self.flag()
            self.flush()
            self.block(f"if {flag}:", kind.value, depth, f"{name} = %s")
            self.block("else:", kind.error, depth, f"{name} = Failure(%s)")
        elif isinstance(kind, Variant):
            index = self.fixed("B")
            self.flush()
            word = "if"
            for number, alternative in enumerate(kind.alternatives):
                self.block(f"{word} {index} == {number}:", alternative, depth, f"{name} = ({number}, %s)")
                word = "elif"
            self.block("else:", None, depth, f"too_long({index})")
        return name

    def block(self, head: str, kind: Type | None, depth: int, last: str) -> None:
        self.line(head)
        self.indent += 1
        if kind is None:
            self.line(last)
        else:
            expression = self.value(kind, depth)
            self.flush()
            self.line(last % expression)
        self.indent -= 1


class _Shared:
    """What the functions of one literal have in common: names, unpackers, the source written so far."""

    def __init__(self) -> None:
        self.count = 0
        self.scope: dict[str, Any] = {"Failure": Failure, "too_long": _too_long, "not_bool": _not_bool}
        self.source: list[str] = []
        self.functions: dict[Type, str] = {}

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def unpacker(self, formats: str) -> str:
        name = "u_" + formats
        self.scope[name] = struct.Struct("<" + formats).unpack_from
        return name

    def function(self, kind: Type, width: int) -> str:
        name = self.functions.get(kind)
        if name is None:
            name = self.functions[kind] = f"read{len(self.functions)}"
            writer = _Writer(width, self)
            expression = writer.value(kind, 0)
            writer.flush()
            self.source += [f"def {name}(b, o, n):", *writer.lines, f"    return {expression}, o"]
        return name


@lru_cache(maxsize=128)
def decoder(literal: bytes, width: int) -> Decoder:
    """The decoder of a literal at one width of lengths. It raises `CodecError`, and nothing else."""
    shared = _Shared()
    kind = parse_literal(literal)
    least = minimum_size(kind)
    name = shared.function(kind, width)
    exec("\n".join(shared.source), shared.scope)  # noqa: S102 - made of our own text and names; a literal has no part in it
    read = shared.scope[name]

    def run(body: bytes, start: int, end: int) -> tuple[Any, int]:
        try:
            if least > end - start:
                raise _Truncated("a message is shorter than its type")
            value, stop = read(body, start, end)
        except (struct.error, IndexError, _Truncated) as error:
            raise CodecError(f"a message is damaged: {error}", where=literal.hex()[:400]) from None
        if stop > end:
            raise CodecError("a message is damaged: a length in it is more than it holds", where=literal.hex()[:400])
        return value, stop

    return run
