"""Sizes: what a person writes, and bytes.

All units are binary, Mooncake's ``80GB`` style included (Mooncake reads GB as 2**30 bytes), so that one number means
one thing on both sides.
"""

from __future__ import annotations

import re

from egmctl.errors import UsageError

__all__ = ["GIB", "KIB", "MIB", "TIB", "format_size", "parse_size"]

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_FACTORS = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}
_SIZE = re.compile(r"([0-9]+)(\.[0-9]+)?\s*(?:([kmgt])(?:i?b)?|(b))?", re.IGNORECASE)


def parse_size(value: int | str, *, name: str = "size") -> int:
    """Bytes of ``"1GiB"``, ``"80GB"``, ``"1.5 GiB"``, ``"4096"`` or an integer.

    Raises `UsageError` for anything else, a negative number and a fraction of a byte included.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise UsageError(f"{name} = {value!r} is not a size", hint='write an integer or a string such as "16GiB"')
    if isinstance(value, int):
        if value < 0:
            raise UsageError(f"{name} = {value} is negative", hint="sizes are zero or more")
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None or len(value) > 64:
        raise UsageError(f"{name} = {value[:64]!r} is not a size", hint='write an integer or a string such as "16GiB"')
    whole, fraction, unit, _ = match.groups()
    factor = _FACTORS[(unit or "").lower()]
    total = int(whole) * factor
    if fraction:
        digits = fraction[1:]
        part, rest = divmod(int(digits) * factor, 10 ** len(digits))
        if rest:
            raise UsageError(f"{name} = {value!r} is not a whole number of bytes", hint="write it without a fraction")
        total += part
    return total


def format_size(nbytes: int) -> str:
    """For a person: exact when a binary unit divides it, else three significant digits and a unit."""
    for suffix, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= factor:
            if nbytes % factor == 0:
                return f"{nbytes // factor} {suffix}"
            return f"{nbytes / factor:.2f} {suffix}"
    return f"{nbytes} B"
