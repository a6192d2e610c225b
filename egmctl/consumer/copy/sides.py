"""Which addresses are a GPU's own memory, by allocation: asking the driver takes longer than a small copy."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from egmctl.memory.driver import Driver, MemoryType

__all__ = ["Sides"]

_MOST = 4096
_PAGE = 1 << 21  # taken where the driver does not say how far an allocation reaches


class _Range(NamedTuple):
    start: int
    end: int
    on_device: bool


class Sides:
    """Safe for several threads. An allocation may end and another come to lie there, so what is remembered may be wrong
    later: only for what costs speed and nothing else."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._known: tuple[_Range, ...] = ()  # in order, replaced as a whole

    def on_device(self, address: int) -> bool:
        known = self._known
        at = bisect_right(known, (address, 1 << 64)) - 1
        if at >= 0 and address < known[at].end:
            return known[at].on_device
        found = self._ask(address)
        apart = [each for each in known if each.end <= found.start or found.end <= each.start]
        self._known = tuple(sorted([*apart[-_MOST + 1 :], found]))
        return found.on_device

    def _ask(self, address: int) -> _Range:
        info = self._driver.pointer_info(address)
        start, size = info.range_start, info.range_size
        if not start or not size or not start <= address < start + size:
            start, size = address // _PAGE * _PAGE, _PAGE
        return _Range(start, start + size, info.type is MemoryType.DEVICE)
