"""Reads and writes of many small entries at given offsets: bounds are checked before anything of an object is used.

Offsets come as integers of this process, or lie on a GPU, where a selector left them; then the kernel checks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from egmctl.consumer.buffers import Buffers
from egmctl.consumer.engine import Engine, Part
from egmctl.consumer.errors import BadOffset, InvalidRequest
from egmctl.consumer.host_copy import Completion
from egmctl.consumer.pins import Target

__all__ = ["Indices", "gather", "scatter"]

Indices: TypeAlias = "Sequence[int] | int"
"""Integers, or the GPU address of int64 values."""


def _read(values: Indices, count: int | None, name: str) -> list[int] | int:
    if isinstance(values, int):
        if count is None:
            raise InvalidRequest(f"{name} is an address, so count must say how many there are")
        return values
    listed = [int(value) for value in values]
    if count is not None and count != len(listed):
        raise InvalidRequest(f"{name} has {len(listed)} values, and count is {count}")
    return listed


def _entries(
    offsets: Sequence[int], objects: Sequence[int] | None, entry_bytes: int, sizes: Sequence[int]
) -> list[tuple[int, int]]:
    """(object, offset) of each entry, all inside their objects. Raises `BadOffset` for the first that is not."""
    if objects is None:
        if len(sizes) != 1:
            raise InvalidRequest(f"there are {len(sizes)} keys: objects must say which one each entry is in")
        chosen: Sequence[int] = [0] * len(offsets)
    else:
        chosen = objects
        if len(chosen) != len(offsets):
            raise InvalidRequest(f"{len(offsets)} offsets and {len(chosen)} objects")
    for at, (number, offset) in enumerate(zip(chosen, offsets, strict=True)):
        if not 0 <= number < len(sizes):
            raise BadOffset(f"entry {at} is in object {number} of {len(sizes)}", facts={"entry": at})
        if offset < 0 or offset + entry_bytes > sizes[number]:
            raise BadOffset(
                f"entry {at}: {entry_bytes} bytes at {offset} are not inside the object's {sizes[number]} bytes",
                facts={"entry": at, "offset": offset},
            )
    return list(zip(chosen, offsets, strict=True))


def _move(
    engine: Engine,
    buffers: Buffers,
    spaces: Sequence[tuple[Target, int]],
    offsets: Indices,
    entry_bytes: int,
    dense: int,
    objects: Indices | None,
    count: int | None,
    stream: int | None,
    *,
    write: bool,
) -> tuple[int, Completion]:
    if entry_bytes <= 0:
        raise InvalidRequest(f"entries of {entry_bytes} bytes")
    where = _read(offsets, count, "offsets")
    which = None if objects is None else _read(objects, count, "objects")
    number = count if isinstance(where, int) else len(where)
    assert number is not None
    total = number * entry_bytes
    buffer = buffers.find(dense, total)
    if buffer.device is not None and engine.device_copier is not None:
        from egmctl.consumer.copy import make_gatherer

        gatherer = make_gatherer(engine.device_copier, buffer.device)
        memory = [(target.device_address, size) for target, size in spaces]
        move = gatherer.scatter if write else gatherer.gather
        return total, move(memory, where, entry_bytes, dense, objects=which, count=number, stream=stream)
    if isinstance(where, int) or isinstance(which, int):
        raise InvalidRequest("offsets on a GPU need a buffer on a GPU", hint="register the buffer with devices=[...]")
    entries = _entries(where, which, entry_bytes, [size for _, size in spaces])
    routes = engine.routes()
    for at, (space, offset) in enumerate(entries):
        target = spaces[space][0]
        part = Part(offset, dense + at * entry_bytes, entry_bytes, buffer)
        routes.add(target, part, write=write)
    return total, engine.copy(routes, stream)


def gather(
    engine: Engine,
    buffers: Buffers,
    spaces: Sequence[tuple[Target, int]],
    offsets: Indices,
    entry_bytes: int,
    destination: int,
    objects: Indices | None,
    count: int | None,
    stream: int | None,
) -> tuple[int, Completion]:
    """Entries of ``spaces`` (memory, its bytes) side by side into ``destination``: bytes in all, and the copy's end,
    whose ``wait`` raises `BadOffset` where a GPU checked the offsets."""
    return _move(engine, buffers, spaces, offsets, entry_bytes, destination, objects, count, stream, write=False)


def scatter(
    engine: Engine,
    buffers: Buffers,
    space: tuple[Target, int],
    offsets: Indices,
    entry_bytes: int,
    source: int,
    count: int | None,
    stream: int | None,
) -> Completion:
    """The reverse, into one object's space."""
    return _move(engine, buffers, [space], offsets, entry_bytes, source, None, count, stream, write=True)[1]
