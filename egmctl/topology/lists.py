"""The kernel's list format (``0-3,8``), and small files read without surprises."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["format_list", "parse_list", "read_int", "read_text"]

_LIMIT = 1 << 20
_MOST = 1 << 16  # more CPUs or nodes than any kernel is built for
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", re.ASCII)


def parse_list(text: str) -> tuple[int, ...]:
    """``"0-2,8"`` is ``(0, 1, 2, 8)``; an empty list is empty. Raises `ValueError` for anything else."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part[:40]!r} is not a number or a range of numbers")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low or high >= _MOST:
            raise ValueError(f"{part!r} is not a range of numbers below {_MOST}")
        numbers.update(range(low, high + 1))
    return tuple(sorted(numbers))


def format_list(numbers: Iterable[int]) -> str:
    """The reverse of `parse_list`, as short as can be."""
    parts: list[str] = []
    ordered = sorted(set(numbers))
    start = 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or ordered[end] != ordered[end - 1] + 1:
            low, high = ordered[start], ordered[end - 1]
            parts.append(str(low) if low == high else f"{low}-{high}")
            start = end
    return ",".join(parts)


def read_text(path: Path) -> str | None:
    """What a file of sysfs or procfs says; None when it is absent or cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_LIMIT).decode("utf-8", "replace")
    except OSError:
        return None


def read_int(path: Path, base: int = 10) -> int | None:
    """The integer in a file; None when it is absent or holds something else."""
    text = read_text(path)
    try:
        return None if text is None else int(text.strip(), base)
    except ValueError:
        return None
