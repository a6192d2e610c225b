"""Reads and writes of many small entries at given offsets: bounds are checked before anything of an object is used.

Offsets come as integers of this process, or lie on a GPU, where a selector left them; then the kernel checks them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, TypeAlias

from egmctl.consumer.buffers import Buffer, Buffers
from egmctl.consumer.engine import Engine, Part
from egmctl.consumer.errors import BadOffset, InvalidBuffer, InvalidRequest
from egmctl.consumer.host_copy import Completion
from egmctl.consumer.pins import Target

__all__ = ["Entries", "Indices", "gather", "scatter", "zero"]

Indices: TypeAlias = Any
"""Integers (a sequence, or a buffer of them such as a NumPy array), an array on a GPU (``__cuda_array_interface__``, or
a `egmctl.consumer.copy.DeviceArray`), or the GPU address of int64 values, whose number is then given as ``count``."""


class Entries:
    """``entry_bytes`` at each of ``offsets``, in the object that ``objects`` (left out: the only one) says for it."""

    def __init__(self, offsets: Indices, entry_bytes: int, objects: Indices, count: int | None) -> None:
        if entry_bytes <= 0:
            raise InvalidRequest(f"entries of {entry_bytes} bytes")
        self.offsets = _numbers(offsets, count, "offsets")
        self.objects = None if objects is None else _numbers(objects, count, "objects")
        self.entry_bytes = entry_bytes
        self.count = int(self.offsets.length)
        if count is not None and self.count != count:
            raise InvalidRequest(f"there are {self.count} offsets, and count is {count}")
        if self.objects is not None and self.objects.length != self.count:
            raise InvalidRequest(f"there are {self.count} offsets and {self.objects.length} objects")

    @property
    def nbytes(self) -> int:
        """Of all entries, side by side."""
        return self.count * self.entry_bytes

    def checked(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """(object, offset) of each entry, all of them inside their objects. Raises `BadOffset` for the first that is
        not, `InvalidRequest` when the offsets lie on a GPU."""
        offsets = _listed(self.offsets, "offsets")
        if self.objects is None:
            if len(sizes) != 1:
                raise InvalidRequest(f"there are {len(sizes)} keys: objects must say which one each entry is in")
            objects = [0] * len(offsets)
        else:
            objects = _listed(self.objects, "objects")
        entries = list(zip(objects, offsets, strict=True))
        for at, (number, offset) in enumerate(entries):
            if not 0 <= number < len(sizes):
                raise BadOffset(f"entry {at} is in object {number} of {len(sizes)}", facts={"entry": at})
            if offset < 0 or offset + self.entry_bytes > sizes[number]:
                raise BadOffset(
                    f"entry {at}: {self.entry_bytes} bytes at {offset} are not inside its {sizes[number]} bytes",
                    hint="offsets are bytes from the start of the object; an entry must end inside it",
                    facts={"entry": at, "offset": offset},
                )
        return entries


def _numbers(values: Indices, count: int | None, name: str) -> Any:
    from egmctl.consumer.copy.arrays import DeviceArray, as_numbers

    if isinstance(values, int):
        if count is None:
            raise InvalidRequest(f"{name} is an address, so count must say how many there are")
        values = DeviceArray(values, count)
    return as_numbers(values, name)


def _listed(numbers: Any, name: str) -> list[int]:
    data = getattr(numbers.where, "data", None)
    if data is None:
        raise InvalidRequest(
            f"{name} lie on a GPU, the buffer does not", hint="register a buffer on that GPU, with devices=[...]"
        )
    return memoryview(data).cast("B").cast("q" if numbers.where.width == 8 else "i").tolist()


def _move(
    engine: Engine,
    spaces: Sequence[tuple[Target, int]],
    entries: Entries,
    dense: int,
    buffer: Buffer,
    stream: int | None,
    *,
    write: bool,
) -> Completion:
    if buffer.device is not None and engine.gatherer is not None:
        ranges = []
        for target, size in spaces:
            if target.device_address is None:
                raise InvalidBuffer("this memory is not mapped for GPUs", where=target.where)
            ranges.append((target.device_address, size))
        move = engine.gatherer.scatter if write else engine.gatherer.gather
        offsets, objects = entries.offsets, entries.objects
        if objects is None and len(ranges) != 1:
            raise InvalidRequest(f"there are {len(ranges)} keys: objects must say which one each entry is in")
        done: Completion = move(
            ranges,
            offsets.owner if offsets.owner is not None else offsets.where,
            entries.entry_bytes,
            dense,
            device=buffer.device,
            objects=None if objects is None else objects.owner if objects.owner is not None else objects.where,
            stream=stream,
        )
        return done
    size = entries.entry_bytes
    routes = engine.routes()
    for at, (number, offset) in enumerate(entries.checked([nbytes for _, nbytes in spaces])):
        routes.add(spaces[number][0], Part(offset, dense + at * size, size, buffer), write=write)
    return engine.copy(routes, stream)


def gather(
    engine: Engine,
    buffers: Buffers,
    spaces: Sequence[tuple[Target, int]],
    entries: Entries,
    destination: int,
    stream: int | None,
) -> Completion:
    """Entries of ``spaces`` (memory, its bytes) side by side into ``destination``. Where a GPU checks the offsets, it
    is the completion's ``wait`` that raises `BadOffset`."""
    buffer = buffers.find(destination, entries.nbytes)
    return _move(engine, spaces, entries, destination, buffer, stream, write=False)


def scatter(
    engine: Engine,
    buffers: Buffers,
    space: tuple[Target, int],
    entries: Entries,
    source: int,
    stream: int | None,
) -> Completion:
    """The reverse, into the space of one put."""
    buffer = buffers.find(source, entries.nbytes)
    return _move(engine, [space], entries, source, buffer, stream, write=True)


def zero(engine: Engine, target: Target, nbytes: int, device: int | None) -> None:
    """Clear the space of a put, which holds whatever was there before."""
    if target.address is not None:
        ctypes.memset(target.address, 0, nbytes)
        return
    if target.device_address is None or device is None:
        raise InvalidBuffer("neither the CPU nor a GPU can write this memory", where=target.where)
    from egmctl.memory.driver import get_driver

    driver = get_driver()
    driver.use_device(device)
    driver.memset(target.device_address, 0, nbytes)
