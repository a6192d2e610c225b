"""Arrays of offsets and object numbers as they come: on a device, in host memory, or as plain integers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

from egmctl.consumer.errors import BadOffset, InvalidRequest

__all__ = ["DeviceArray", "HostArray", "Numbers", "as_numbers"]

_HOST_FORMATS = {"q": 8, "l": 8, "n": 8, "Q": 8, "L": 8, "N": 8, "i": 4}
_DEVICE_FORMATS = {"<i8": 8, "|i8": 8, "<u8": 8, "<i4": 4}


class DeviceArray(NamedTuple):
    """``length`` signed integers of ``width`` bytes (4 or 8) that the device can read at ``address``."""

    address: int
    length: int
    width: int = 8


class HostArray(NamedTuple):
    """The same in host memory, as bytes."""

    data: memoryview
    length: int
    width: int


class Numbers(NamedTuple):
    """One of the two, the stream on which its producer runs if it says so, and what keeps it alive."""

    where: DeviceArray | HostArray
    stream: int | None
    owner: Any

    @property
    def length(self) -> int:
        return self.where.length


def as_numbers(values: Any, name: str = "offsets") -> Numbers:
    """Accepts a `DeviceArray`, anything with ``__cuda_array_interface__`` (torch and CuPy arrays), a contiguous buffer
    of 32- or 64-bit integers (NumPy, ``array``), or an iterable of integers.

    Unsigned 64-bit values are read as signed: what is over 2**63 is out of any object's bounds anyway. Raises
    `InvalidRequest` for another type or shape, `BadOffset` for an integer that 64 bits do not hold.
    """
    if isinstance(values, DeviceArray):
        if values.width not in (4, 8) or values.length < 0 or (values.length and values.address % values.width):
            raise InvalidRequest(f"{name}: {values.length} integers of {values.width} bytes at {values.address:#x}")
        return Numbers(values, None, values)
    interface = getattr(values, "__cuda_array_interface__", None)
    if interface is not None:
        return _from_device(values, interface, name)
    try:
        view = memoryview(values)
    except TypeError:
        return _from_integers(values, name)
    width = _HOST_FORMATS.get(view.format.lstrip("@=<"), 0)
    if width == 0 or view.itemsize != width or view.ndim != 1 or not view.c_contiguous:
        raise InvalidRequest(
            f"{name}: {view.ndim} dimensions of format {view.format!r} are not a list of signed integers",
            hint="give one contiguous dimension of int64 or int32",
        )
    return Numbers(HostArray(view.cast("B"), len(view), width), None, values)


def _from_device(values: Any, interface: dict[str, Any], name: str) -> Numbers:
    shape, kind, strides = interface["shape"], interface["typestr"], interface.get("strides")
    width = _DEVICE_FORMATS.get(kind, 0)
    if width == 0 or len(shape) != 1 or (strides is not None and tuple(strides) != (width,) and shape[0] > 1):
        raise InvalidRequest(
            f"{name}: shape {tuple(shape)} of {kind} with strides {strides} is not a list of signed integers",
            hint="give one contiguous dimension of int64 or int32",
        )
    address = int(interface["data"][0] or 0)
    stream = interface.get("stream")
    return Numbers(DeviceArray(address, int(shape[0]), width), stream if isinstance(stream, int) else None, values)


def _from_integers(values: Iterable[int], name: str) -> Numbers:
    try:
        plain = array("q", values)
    except OverflowError as error:
        raise BadOffset(
            f"{name}: an integer does not fit 64 bits", hint="offsets are bytes inside an object"
        ) from error
    except TypeError as error:
        raise InvalidRequest(
            f"{name}: {type(values).__name__} is not a list of integers", hint="give int64 or int32, one dimension"
        ) from error
    return Numbers(HostArray(memoryview(plain).cast("B"), len(plain), 8), None, plain)
