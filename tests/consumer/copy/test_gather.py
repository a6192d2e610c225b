"""Entries at offsets: each arrives, none leaves its object, and a bad offset is an error."""

from __future__ import annotations

import ctypes
import random
import struct
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egmctl.consumer.copy import DeviceArray, GpuGatherer, Range, as_numbers, make_gatherer
from egmctl.consumer.copy.jobs import EntryJob
from egmctl.consumer.errors import BadOffset, InvalidBuffer, InvalidRequest, StoreClosed
from egmctl.memory.driver import CudaError
from tests.consumer.copy.conftest import ROOM, Machine, ModelMachine
from tests.model.config import Fault
from tests.model.kernels import ModelKernels

SPACE = 200_000
ENTRY_SIZES = st.sampled_from([1, 2, 3, 7, 8, 16, 31, 64, 100, 128, 256, 576, 656, 1152, 4096, 20_000, 40_001])
BAD = [-1, -(1 << 63), (1 << 63) - 1, SPACE, (1 << 63) - 100]


class Place:
    """DRAM with two objects, HBM for dense entries and for offsets, and a gatherer of either machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.dram, self.hbm, self.numbers = machine.dram(), machine.hbm(4 * ROOM), machine.hbm()
        self.gatherer: GpuGatherer = machine.gatherer()
        self.objects = [Range(self.dram + 4096, SPACE), Range(self.dram + 4096 + SPACE + 77, SPACE - 1000)]

    def on_device(self, values: list[int], width: int, at: int = 0) -> DeviceArray:
        self.machine.write(self.numbers + at, struct.pack(f"={len(values)}{'q' if width == 8 else 'i'}", *values))
        return DeviceArray(self.numbers + at, len(values), width)

    def present(self, values: list[int], form: str, at: int = 0) -> Any:
        if form == "device64":
            return self.on_device(values, 8, at)
        if form == "device32":
            return self.on_device(values, 4, at)
        return values if form == "list" else array("q" if form == "host64" else "i", values)


@pytest.fixture(scope="module")
def place(machine: Machine) -> Place:
    return Place(machine)


FORMS = st.sampled_from(["device64", "device32", "list", "host64", "host32"])
ORDERS = st.sampled_from(["auto", "never", "always"])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), entry=ENTRY_SIZES, form=FORMS, order=ORDERS, seed=st.integers(0, 1 << 30))
def test_gather_brings_every_entry_and_leaves_bad_ones_untouched(
    place: Place, data: st.DataObject, entry: int, form: str, order: Any, seed: int
) -> None:
    machine = place.machine
    content = random.Random(seed).randbytes(ROOM)
    machine.write(place.dram, content)
    fits = st.integers(0, SPACE - entry)
    bad = st.sampled_from(BAD if form in ("device64", "list", "host64") else [-1, SPACE, -(1 << 31), (1 << 31) - 1])
    wrong = bad | st.integers(SPACE - entry + 1, SPACE)
    offsets = data.draw(st.lists(fits | fits | fits | wrong, min_size=1, max_size=40))
    room = len(offsets) * entry
    machine.write(place.hbm, b"\xee" * (room + 64))
    completion = place.gatherer.gather(
        place.objects[0], place.present(offsets, form), entry, place.hbm, device=0, order=order
    )
    good = [0 <= offset <= SPACE - entry for offset in offsets]
    if all(good):
        assert completion.wait()
    else:
        with pytest.raises(BadOffset) as caught:
            completion.wait()
        assert caught.value.facts["entry"] == good.index(False)
    got = machine.read(place.hbm, room + 64)
    for index, offset in enumerate(offsets):
        expected = content[4096 + offset : 4096 + offset + entry] if good[index] else b"\xee" * entry
        assert got[index * entry : (index + 1) * entry] == expected
    assert got[room:] == b"\xee" * 64


@settings(max_examples=40, deadline=None)
@given(data=st.data(), entry=ENTRY_SIZES, form=FORMS, order=ORDERS, seed=st.integers(0, 1 << 30))
def test_scatter_writes_every_entry_and_nothing_beside_them(
    place: Place, data: st.DataObject, entry: int, form: str, order: Any, seed: int
) -> None:
    machine = place.machine
    before = random.Random(seed).randbytes(ROOM)
    machine.write(place.dram, before)
    slots = SPACE // entry
    chosen = data.draw(st.lists(st.integers(0, slots - 1), min_size=1, max_size=min(40, slots), unique=True))
    offsets = [slot * entry for slot in chosen]
    bad = data.draw(st.integers(0, len(offsets)))
    offsets.insert(bad, data.draw(st.sampled_from([-1, -entry, SPACE - entry + 1, SPACE])))
    dense = random.Random(seed + 1).randbytes(len(offsets) * entry)
    machine.write(place.hbm, dense)
    completion = place.gatherer.scatter(
        place.objects[0], place.present(offsets, form), entry, place.hbm, device=0, order=order
    )
    with pytest.raises(BadOffset) as caught:
        completion.wait()
    assert caught.value.facts["entry"] == bad
    expected = bytearray(before)
    for index, offset in enumerate(offsets):
        if index != bad:
            expected[4096 + offset : 4096 + offset + entry] = dense[index * entry : (index + 1) * entry]
    assert machine.read(place.dram, ROOM) == bytes(expected)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), entry=st.sampled_from([1, 16, 100, 656, 5000]), form=FORMS, order=ORDERS)
def test_entries_of_several_objects_stay_inside_their_own(
    place: Place, data: st.DataObject, entry: int, form: str, order: Any
) -> None:
    machine = place.machine
    content = random.Random(entry).randbytes(ROOM)
    machine.write(place.dram, content)
    pairs = data.draw(st.lists(st.tuples(st.integers(-1, 2), st.integers(-3, SPACE + 3)), min_size=1, max_size=40))
    numbers, offsets = [n for n, _ in pairs], [o for _, o in pairs]
    machine.write(place.hbm, b"\xee" * (len(pairs) * entry))
    completion = place.gatherer.gather(
        place.objects,
        place.present(offsets, form),
        entry,
        place.hbm,
        device=0,
        objects=place.present(numbers, form, at=4096),
        order=order,
    )
    good = [0 <= n < 2 and 0 <= o <= place.objects[n].nbytes - entry for n, o in pairs]
    if all(good):
        assert completion.wait(10)
    else:
        with pytest.raises(BadOffset, match=f"entry {good.index(False)} "):
            completion.wait(10)
    got = machine.read(place.hbm, len(pairs) * entry)
    for index, (number, offset) in enumerate(pairs):
        expected = b"\xee" * entry
        if good[index]:
            start = place.objects[number].address - place.dram + offset
            expected = content[start : start + entry]
        assert got[index * entry : (index + 1) * entry] == expected


@pytest.mark.parametrize("order", ["never", "always"])
def test_many_entries_over_many_pages_arrive(machine: Machine, order: Any) -> None:
    """Enough for many blocks, and for page bins that hold none, one and many."""
    nbytes, entry, count = 48 << 20, 256, 20_000
    dram, hbm, numbers = machine.dram(nbytes), machine.hbm(count * entry), machine.hbm(count * 8)
    content = random.Random(9).randbytes(nbytes)
    machine.write(dram, content)
    rng = random.Random(10)
    offsets = [rng.randrange(nbytes - entry) & ~15 if n % 3 else n * 16 for n in range(count)]
    offsets[777] = nbytes - entry + 16
    machine.write(numbers, struct.pack(f"={count}q", *offsets))
    gatherer = machine.gatherer()
    completion = gatherer.gather(Range(dram, nbytes), DeviceArray(numbers, count), entry, hbm, device=0, order=order)
    with pytest.raises(BadOffset, match="entry 777 "):
        completion.wait()
    got = machine.read(hbm, count * entry)
    wrong = [
        n for n, o in enumerate(offsets) if n != 777 and got[n * entry : (n + 1) * entry] != content[o : o + entry]
    ]
    assert not wrong
    offsets[777] = 0
    machine.write(numbers, struct.pack(f"={count}q", *offsets))
    gatherer.gather(Range(dram, nbytes), DeviceArray(numbers, count), entry, hbm, device=0, order=order).wait()
    assert machine.read(hbm + 777 * entry, entry) == content[:entry]
    gatherer.close()


def test_a_gather_after_a_bad_one_is_not_blamed_for_it(place: Place) -> None:
    for _ in range(3):
        with pytest.raises(BadOffset):
            place.gatherer.gather(place.objects[0], [0, -1], 16, place.hbm, device=0).wait()
        assert place.gatherer.gather(place.objects[0], [0, 16], 16, place.hbm, device=0).wait()


def test_a_bad_offset_is_told_again_by_every_wait(place: Place) -> None:
    completion = place.gatherer.gather(place.objects[0], [SPACE], 16, place.hbm, device=0)
    for limit in (None, 1.0, 0.0):
        with pytest.raises(BadOffset, match="entry 0 "):
            completion.wait(limit)
    assert completion.done()


def test_an_entry_larger_than_its_object_is_bad(place: Place) -> None:
    with pytest.raises(BadOffset):
        place.gatherer.gather(Range(place.dram, 100), [0], 101, place.hbm, device=0).wait()
    assert place.gatherer.gather(Range(place.dram, 100), [0], 100, place.hbm, device=0).wait()


def test_offsets_made_on_a_stream_are_read_after_they_are_made(model: ModelMachine) -> None:
    place = Place(model)
    model.write(place.dram, bytes(range(256)) * (ROOM // 256))
    fresh = place.on_device([3, 5], 8)
    staged = model.dram(4096)
    model.write(staged, struct.pack("=2q", 100, 200))
    stream = model.driver.stream_create()
    model.driver.config.copy_delay = 0.1
    model.driver.memcpy_async(fresh.address, staged, 16, stream)
    model.driver.config.copy_delay = 0.0
    place.gatherer.gather(Range(place.dram, ROOM), fresh, 1, place.hbm, device=0, stream=stream).wait()
    assert model.read(place.hbm, 2) == bytes([100, 200])
    place.gatherer.close()
    model.driver.stream_destroy(stream)


class Tensor:
    """An array as torch and CuPy describe theirs."""

    def __init__(self, where: DeviceArray, stream: int | None = None, **changes: Any) -> None:
        kind = f"<i{where.width}"
        self.__cuda_array_interface__ = {
            "shape": (where.length,),
            "typestr": kind,
            "data": (where.address, False),
            "version": 3,
            "stream": stream,
            **changes,
        }


def test_an_array_that_names_its_stream_is_read_after_what_is_queued_there(model: ModelMachine) -> None:
    place = Place(model)
    model.write(place.dram, bytes(range(256)) * (ROOM // 256))
    fresh, staged = place.on_device([3], 8), model.dram(4096)
    model.write(staged, struct.pack("=q", 100))
    producer = model.driver.stream_create()
    model.driver.config.copy_delay = 0.1
    model.driver.memcpy_async(fresh.address, staged, 8, producer)
    model.driver.config.copy_delay = 0.0
    place.gatherer.gather(Range(place.dram, ROOM), Tensor(fresh, producer), 1, place.hbm, device=0).wait()
    assert model.read(place.hbm, 1) == bytes([100])
    place.gatherer.close()
    model.driver.stream_destroy(producer)


def test_host_offsets_may_be_changed_as_soon_as_gather_returns(model: ModelMachine) -> None:
    place = Place(model)
    model.write(place.dram, bytes(range(256)) * (ROOM // 256))
    stream = model.driver.stream_create()
    model.driver.config.copy_delay = 0.1
    model.driver.memcpy_async(place.hbm + 64, place.dram, 8, stream)
    offsets = array("q", [9, 8])
    completion = place.gatherer.gather(Range(place.dram, ROOM), offsets, 1, place.hbm, device=0, stream=stream)
    offsets[0] = offsets[1] = 77
    completion.wait()
    assert model.read(place.hbm, 2) == bytes([9, 8])
    place.gatherer.close()
    model.driver.stream_destroy(stream)


def test_a_gatherer_gives_everything_back(model: ModelMachine) -> None:
    place = Place(model)
    before = model.driver.leaks()
    gatherer = model.gatherer()
    gatherer.gather(place.objects[0], [0, 1], 16, place.hbm, device=0, order="always")
    gatherer.gather(place.objects, [0, -1], 16, place.hbm, device=0, objects=[0, 1])
    gatherer.close()
    gatherer.close()
    assert model.driver.leaks() == before
    with pytest.raises(StoreClosed):
        gatherer.gather(place.objects[0], [0], 16, place.hbm, device=0)
    place.gatherer.close()


class Watched(ModelKernels):
    """Notes what it is given, and does nothing."""

    def __init__(self, machine: ModelMachine) -> None:
        super().__init__(machine.driver)
        self.jobs: list[EntryJob] = []

    def gather(self, device: int, stream: int, job: EntryJob) -> None:
        self.jobs.append(job)

    scatter = gather


@pytest.mark.parametrize(
    ("entry", "span", "count", "gathers", "scatters"),
    [
        (656, 4 << 30, 100_000, "pages", "lines"),
        (576, 4 << 30, 100_000, "pages", "pages"),
        (656, 512 << 20, 100_000, "no", "lines"),
        (576, 512 << 20, 100_000, "no", "no"),
        (656, 4 << 30, 2048, "no", "no"),
        (4096, 64 << 30, 100_000, "no", "no"),
    ],
)
def test_entries_are_ordered_when_it_pays(
    model: ModelMachine, entry: int, span: int, count: int, gathers: str, scatters: str
) -> None:
    kernels = Watched(model)
    gatherer = make_gatherer(model.driver, [0], model.options(), kernels=kernels)
    offsets = DeviceArray(model.hbm(8 * count), count, 8)
    gatherer.gather(Range(1 << 30, span), offsets, entry, 1 << 20, device=0).wait()
    gatherer.scatter(Range(1 << 30, span), offsets, entry, 1 << 20, device=0).wait()
    gatherer.gather(Range(1 << 30, span), offsets, entry, 1 << 20, device=0, order="never").wait()
    seen = ["no" if job.order is None else "lines" if job.order.sorted else "pages" for job in kernels.jobs]
    assert seen == [gathers, scatters, "no"]
    gatherer.close()


@pytest.mark.parametrize("call", ["event_create", "event_record", "memcpy_async", "mem_alloc", "host_alloc", "memset"])
@pytest.mark.parametrize("own_stream", [False, True])
def test_a_gather_that_could_not_be_queued_leaves_the_gatherer_usable_and_loses_nothing(
    model: ModelMachine, call: str, own_stream: bool
) -> None:
    place = Place(model)
    model.write(place.dram, bytes(range(256)) * (ROOM // 256))
    stream = model.driver.stream_create() if own_stream else None
    before = model.driver.leaks()
    gatherer = model.gatherer()
    model.driver._counts.clear()
    model.driver.config.faults.append(Fault(call))
    whole = [Range(place.dram, 1000), Range(place.dram + 1000, 1000)]
    with pytest.raises(CudaError):
        gatherer.gather(whole, [5, 6], 1, place.hbm, device=0, objects=[0, 1], stream=stream, order="always")
    gatherer.gather(whole, [5, 6], 1, place.hbm, device=0, objects=[0, 1], stream=stream, order="always").wait()
    assert model.read(place.hbm, 2) == bytes([5, 1006 % 256])
    gatherer.close()
    assert model.driver.leaks() == before
    place.gatherer.close()


def test_no_offsets_are_done_at_once(place: Place) -> None:
    assert place.gatherer.gather(place.objects[0], [], 16, place.hbm, device=0).done()


def test_what_cannot_be_meant_is_refused_before_anything_runs(place: Place) -> None:
    gather, one = place.gatherer.gather, place.objects[0]
    attempts: list[Callable[[], object]] = [
        lambda: gather(one, [0], 0, place.hbm, device=0),
        lambda: gather(one, [0], 16, 0, device=0),
        lambda: gather(one, [0], 16, place.hbm, device=9),
        lambda: gather(place.objects, [0], 16, place.hbm, device=0),
        lambda: gather([], [0], 16, place.hbm, device=0),
        lambda: gather(place.objects, [0], 16, place.hbm, device=0, objects=[0, 1]),
        lambda: gather(Range(4096, -1), [0], 16, place.hbm, device=0),
        lambda: gather(one, [0.5], 16, place.hbm, device=0),
        lambda: gather(one, 7, 16, place.hbm, device=0),
        lambda: gather(one, array("d", [1.0]), 16, place.hbm, device=0),
        lambda: gather(one, array("I", [1]), 16, place.hbm, device=0),
        lambda: gather(one, memoryview(bytes(64)).cast("q", (2, 4)), 16, place.hbm, device=0),
        lambda: gather(one, memoryview(array("q", range(8)))[::2], 16, place.hbm, device=0),
        lambda: gather(one, DeviceArray(place.numbers, 1, 2), 16, place.hbm, device=0),
        lambda: gather(one, DeviceArray(place.numbers + 4, 1, 8), 16, place.hbm, device=0),
        lambda: gather(one, Tensor(DeviceArray(place.numbers, 4), shape=(2, 2)), 16, place.hbm, device=0),
        lambda: gather(one, Tensor(DeviceArray(place.numbers, 4), typestr="<f8"), 16, place.hbm, device=0),
        lambda: gather(one, Tensor(DeviceArray(place.numbers, 4), strides=(16,)), 16, place.hbm, device=0),
    ]
    for attempt in attempts:
        with pytest.raises(InvalidRequest):
            attempt()
    with pytest.raises(BadOffset):
        gather(one, [1 << 63], 16, place.hbm, device=0)


def test_arrays_are_taken_as_they_come() -> None:
    numpy = pytest.importorskip("numpy")
    for values, width in (
        (numpy.arange(5), 8),
        (numpy.arange(5, dtype=numpy.int32), 4),
        (numpy.arange(5, dtype=numpy.uint64), 8),
        (array("l", range(5)), 8),
        (range(5), 8),
        (Tensor(DeviceArray(4096, 5, 4), strides=(4,)), 4),
    ):
        numbers = as_numbers(values)
        assert (numbers.length, numbers.where.width) == (5, width)


def test_numbers_that_the_gpu_cannot_read_are_refused_before_the_kernel_does(model: ModelMachine) -> None:
    place = Place(model)
    gatherer = model.gatherer()
    model.driver.use_device(1)
    elsewhere = model.driver.mem_alloc(4096)
    pageable = ctypes.create_string_buffer(4096)
    allocation = next(size for start, (size, _) in model.driver._device_allocations.items() if start == place.numbers)
    wrong = [
        (DeviceArray(elsewhere, 10), "GPU 1"),
        (DeviceArray(ctypes.addressof(pageable) + 7 & ~7, 10), "neither GPU memory nor pinned"),
        (DeviceArray(place.numbers, allocation // 8 + 1), "beyond their allocation"),
    ]
    before = len(model.driver.calls)
    for numbers, what in wrong:
        with pytest.raises(InvalidBuffer, match=what):
            gatherer.gather(place.objects[0], numbers, 16, place.hbm, device=0)
        with pytest.raises(InvalidBuffer, match=what):
            gatherer.scatter(place.objects, [0] * numbers.length, 16, place.hbm, device=0, objects=numbers)
    assert "memcpy_async" not in model.driver.calls[before:]
    model.driver.use_device(1)
    model.driver.mem_free(elsewhere)
    gatherer.close()
