"""Registered buffers."""

from __future__ import annotations

import mmap

import pytest

from egmctl.consumer.buffers import Buffers
from egmctl.consumer.errors import InvalidBuffer
from tests.consumer.support import Memory


def test_any_part_of_a_registered_buffer_is_found_and_nothing_beyond() -> None:
    memory = Memory(10_000)
    buffers = Buffers(None, [])
    registered = buffers.register(memory.address, 10_000)
    assert registered.kind == "pageable"
    assert buffers.find(memory.address + 10, 9_990) == registered
    for address, nbytes in ((memory.address - 1, 2), (memory.address + 1, 10_000), (memory.address + 10_000, 1)):
        with pytest.raises(InvalidBuffer):
            buffers.find(address, nbytes)


def test_the_same_registration_again_is_success_and_an_overlap_is_refused() -> None:
    memory = Memory(10_000)
    buffers = Buffers(None, [])
    buffers.register(memory.address + 100, 1000)
    buffers.register(memory.address + 100, 1000)
    buffers.register(memory.address + 1100, 10)
    buffers.register(memory.address, 100)
    for address, nbytes in ((100, 999), (50, 100), (1000, 200), (0, 5000), (1105, 1)):
        with pytest.raises(InvalidBuffer):
            buffers.register(memory.address + address, nbytes)
    assert len(buffers) == 3
    buffers.unregister(memory.address + 100)
    with pytest.raises(InvalidBuffer):
        buffers.unregister(memory.address + 100)
    with pytest.raises(InvalidBuffer):
        buffers.find(memory.address + 100, 1)


def test_memory_that_is_not_mapped_is_refused() -> None:
    import ctypes

    area = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    buffers = Buffers(None, [])
    buffers.register(address, 4 * mmap.PAGESIZE)
    buffers.unregister(address)
    libc = ctypes.CDLL(None)
    hole = libc.munmap
    hole.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    assert hole(address + mmap.PAGESIZE, mmap.PAGESIZE) == 0
    with pytest.raises(InvalidBuffer, match="not mapped"):
        buffers.register(address, 4 * mmap.PAGESIZE)
    buffers.register(address + 5, 100)
    for bad in ((0, 10), (address, 0), (address, -1), ((1 << 64) - 10, 100)):
        with pytest.raises(InvalidBuffer):
            buffers.register(*bad)
