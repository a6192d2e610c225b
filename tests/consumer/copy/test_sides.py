"""Which addresses are a GPU's own memory: asked once for each allocation."""

from __future__ import annotations

import threading
from typing import Any

from egmctl.consumer.copy.sides import Sides
from egmctl.memory.driver import MemoryType, PointerInfo

GIB = 1 << 30


class Driver:
    """Knows some allocations; of others only that they are none of the driver's."""

    def __init__(self, *ranges: tuple[int, int, MemoryType], says_range: bool = True) -> None:
        self.ranges = ranges
        self.says_range = says_range
        self.asked: list[int] = []

    def pointer_info(self, address: int) -> PointerInfo:
        self.asked.append(address)
        for start, nbytes, kind in self.ranges:
            if start <= address < start + nbytes:
                return PointerInfo(kind, None, start, nbytes) if self.says_range else PointerInfo(kind)
        return PointerInfo(MemoryType.UNREGISTERED)


def sides(driver: Driver) -> Sides:
    some: Any = driver
    return Sides(some)


def test_an_allocation_is_asked_about_once() -> None:
    driver = Driver((GIB, GIB, MemoryType.DEVICE), (2 * GIB, GIB, MemoryType.HOST))
    known = sides(driver)
    assert [known.on_device(address) for address in (GIB, 2 * GIB - 1, GIB + 5)] == [True] * 3
    assert [known.on_device(address) for address in (2 * GIB, 3 * GIB - 1)] == [False] * 2
    assert len(driver.asked) == 2
    assert not known.on_device(7 * GIB)
    assert not known.on_device(7 * GIB + 1)
    assert len(driver.asked) == 3


def test_where_the_driver_does_not_say_how_far_it_reaches_a_page_is_taken() -> None:
    driver = Driver((GIB, GIB, MemoryType.DEVICE), says_range=False)
    known = sides(driver)
    assert known.on_device(GIB + 100)
    assert known.on_device(GIB + (1 << 21) - 1)
    assert known.on_device(GIB + (1 << 21))
    assert len(driver.asked) == 2


def test_an_allocation_in_the_place_of_others_takes_theirs() -> None:
    driver = Driver((GIB, GIB, MemoryType.DEVICE), (2 * GIB, GIB, MemoryType.DEVICE))
    known = sides(driver)
    assert known.on_device(GIB)
    assert known.on_device(2 * GIB)
    driver.ranges = ((GIB, 3 * GIB, MemoryType.HOST),)
    assert known.on_device(GIB)  # not known to be over
    assert not known.on_device(3 * GIB)
    assert not known.on_device(GIB)
    assert not known.on_device(2 * GIB)


def test_many_threads_and_more_allocations_than_are_remembered() -> None:
    driver = Driver(*[(at << 22, 1 << 21, MemoryType.DEVICE if at % 2 else MemoryType.HOST) for at in range(1, 6000)])
    driver.ranges = driver.ranges[:600]
    known = sides(driver)
    wrong: list[int] = []

    def look(first: int) -> None:
        for at in range(first, 600, 4):
            if known.on_device(at << 22) != bool(at % 2):
                wrong.append(at)

    threads = [threading.Thread(target=look, args=(first,)) for first in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for at in range(5000):
        assert not known.on_device((1 << 40) + (at << 21))
    assert len(known._known) <= 4096
