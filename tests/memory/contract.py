"""What egmctl relies on of the driver, one small case each, run on the model everywhere and on the real one on a GPU.

A case returns what it saw. ``@case(expected)`` says what that has to be; ``real=`` (with ``why=``) where the real
driver is known to answer otherwise. Cases that may end the process run in a child (``child=True``):
``python -m tests.memory.contract model|real CASE`` prints what the case saw.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from egmctl.memory import linux
from egmctl.memory.driver import AllocationProp, CudaError, Driver, HandleType, Location, MemoryType

UNIT = 2 << 20
NODE = Location("host_numa", 0)
GPU = Location("device", 0)
POSIX = AllocationProp(NODE, HandleType.POSIX_FD)
PLAIN = AllocationProp(NODE, HandleType.NONE)
FABRIC = AllocationProp(NODE, HandleType.FABRIC)
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[Bench], str]
    expected: str
    real: str | None
    why: str
    child: bool

    def expect(self, side: str) -> str:
        return self.real if side == "real" and self.real is not None else self.expected


CASES: dict[str, Case] = {}


def case(
    expected: str, *, real: str | None = None, why: str = "", child: bool = False
) -> Callable[[Callable[[Bench], str]], Callable[[Bench], str]]:
    def add(run: Callable[[Bench], str]) -> Callable[[Bench], str]:
        CASES[run.__name__] = Case(run.__name__, run, expected, real, why, child)
        return run

    return add


def make_driver(side: str, folder: Path) -> Driver:
    """The model set up as the machine with H200s that the real results come from."""
    if side == "real":
        from egmctl.memory.cuda_driver import CudaDriver

        return CudaDriver()
    from tests.model.config import Config, Device
    from tests.model.driver import ModelDriver

    return ModelDriver(
        Config(
            directory=folder,
            nodes=(0,),
            devices=(Device("0000:01:00.0", 0),),
            attributes={143: 0},
            fabric="not-permitted",
        )
    )


class Bench:
    """A driver and what a case made with it, taken down afterwards whatever happened."""

    def __init__(self, driver: Driver, side: str, folder: Path) -> None:
        self.driver = driver
        self.side = side
        self.folder = folder
        self.stack = ExitStack()

    def _later(self, act: Callable[..., None], *arguments: int) -> None:
        def quietly() -> None:
            try:
                act(*arguments)
            except CudaError:
                pass  # the case did it itself, or ended where it cannot be done

        self.stack.callback(quietly)

    def create(self, units: int = 1, prop: AllocationProp = POSIX) -> int:
        handle = self.driver.mem_create(units * UNIT, prop)
        self._later(self.driver.mem_release, handle)
        return handle

    def reserve(self, units: int = 1, alignment: int = 0, hint: int = 0) -> int:
        address = self.driver.address_reserve(units * UNIT, alignment, hint)
        self._later(self.driver.address_free, address, units * UNIT)
        return address

    def map(self, address: int, handle: int, units: int = 1) -> None:
        self.driver.mem_map(address, units * UNIT, 0, handle)
        self._later(self.driver.mem_unmap, address, units * UNIT)

    def chunk(self, *locations: Location, units: int = 1) -> int:
        """Mapped memory with the access given; its address."""
        handle = self.create(units)
        address = self.reserve(units)
        self.map(address, handle, units)
        if locations:
            self.driver.set_access(address, units * UNIT, locations)
        return address

    def device(self, nbytes: int = 4096) -> int:
        self.driver.use_device(0)
        address = self.driver.mem_alloc(nbytes)
        self._later(self.driver.mem_free, address)
        return address

    def stream(self) -> int:
        self.driver.use_device(0)
        stream = self.driver.stream_create()
        self._later(self.driver.stream_destroy, stream)
        return stream

    def event(self, timing: bool = False) -> int:
        event = self.driver.event_create(timing)
        self._later(self.driver.event_destroy, event)
        return event

    def pages(self, nbytes: int = 1 << 20) -> int:
        """Plain shared pages."""
        fd = linux.memfd("contract", nbytes)
        address = linux.map_file(fd, nbytes)
        os.close(fd)
        self.stack.callback(linux.unmap, address, nbytes)
        return address


def saw(act: Callable[[], object]) -> str:
    """What became of a call: the driver's error, or ok."""
    try:
        act()
    except CudaError as error:
        return f"{error.name.removeprefix('CUDA_ERROR_')} ({error.number})"
    return "ok"


BAD = "INVALID_VALUE (1)"

# --- allocations


@case("2097152")
def granularity_is_2_mib(b: Bench) -> str:
    return str(b.driver.granularity(POSIX))


@case("ok")
def memory_on_a_node_can_be_created_and_released(b: Bench) -> str:
    handle = b.driver.mem_create(UNIT, POSIX)
    return saw(lambda: b.driver.mem_release(handle))


@case(BAD)
def a_size_that_is_no_multiple_of_the_granularity_is_refused(b: Bench) -> str:
    return saw(lambda: b.driver.mem_create(UNIT + 4096, POSIX))


@case(BAD)
def size_zero_is_refused(b: Bench) -> str:
    return saw(lambda: b.driver.mem_create(0, POSIX))


@case(BAD, child=True)
def a_node_that_does_not_exist_is_refused(b: Bench) -> str:
    return saw(lambda: b.driver.mem_create(UNIT, AllocationProp(Location("host_numa", 63), HandleType.POSIX_FD)))


@case(BAD, child=True)
def node_minus_one_is_refused(b: Bench) -> str:
    return saw(lambda: b.driver.mem_create(UNIT, AllocationProp(Location("host_numa", -1), HandleType.POSIX_FD)))


@case(BAD)
def memory_on_a_node_does_not_take_the_rdma_flag(b: Bench) -> str:
    return saw(lambda: b.create(1, AllocationProp(NODE, HandleType.POSIX_FD, gpu_direct_rdma=True)))


@case("NOT_PERMITTED (800)")
def fabric_memory_without_an_imex_channel_is_not_permitted(b: Bench) -> str:
    return saw(lambda: b.create(1, FABRIC))


@case(BAD, child=True)
def releasing_twice_is_refused(b: Bench) -> str:
    handle = b.driver.mem_create(UNIT, POSIX)
    b.driver.mem_release(handle)
    return saw(lambda: b.driver.mem_release(handle))


# --- addresses


@case("True")
def a_reservation_is_aligned_as_asked(b: Bench) -> str:
    return str(b.reserve(1, 16 << 20) % (16 << 20) == 0)


@case("True", real="False", why="the driver gives addresses of a region of its own only; nothing of ours needs others")
def a_reservation_far_away_from_where_the_driver_goes_is_made_where_asked(b: Bench) -> str:
    wishes = [linux.unlikely_address(16 << 20) for _ in range(4)]
    return str([b.reserve(1, 16 << 20, wish) for wish in wishes] == wishes)


@case(BAD)
def a_reservation_of_one_page_is_refused(b: Bench) -> str:
    return saw(lambda: b.driver.address_reserve(4096))


@case(BAD)
def an_alignment_that_is_no_power_of_two_is_refused(b: Bench) -> str:
    return saw(lambda: b.driver.address_reserve(UNIT, 3 << 20))


@case("True")
def a_free_address_asked_for_is_given(b: Bench) -> str:
    first = b.driver.address_reserve(UNIT, 16 << 20)
    b.driver.address_free(first, UNIT)
    wish = first + (1 << 30)
    return str(b.reserve(1, 16 << 20, wish) == wish)


@case("True")
def an_address_in_use_that_is_asked_for_is_given_elsewhere(b: Bench) -> str:
    first = b.reserve()
    return str(b.reserve(1, 0, first) != first)


@case(BAD)
def freeing_another_size_is_refused(b: Bench) -> str:
    address = b.reserve(2)
    return saw(lambda: b.driver.address_free(address, UNIT))


@case(BAD)
def freeing_what_is_not_reserved_is_refused(b: Bench) -> str:
    return saw(lambda: b.driver.address_free(1 << 44, UNIT))


@case(BAD)
def freeing_a_range_with_a_mapping_is_refused(b: Bench) -> str:
    address = b.chunk()
    return saw(lambda: b.driver.address_free(address, UNIT))


@case(BAD, child=True)
def freeing_twice_is_refused(b: Bench) -> str:
    address = b.driver.address_reserve(UNIT)
    b.driver.address_free(address, UNIT)
    return saw(lambda: b.driver.address_free(address, UNIT))


@case("True", child=True)
def a_fresh_process_gets_the_same_address_again(b: Bench) -> str:
    def first() -> str:
        return run_child(b.side, "_first_address")

    return str(first() == first())


@case("", child=True)
def _first_address(b: Bench) -> str:
    b.create()
    return hex(b.reserve(8, 16 << 20))


# --- mapping


@case(BAD)
def mapping_where_nothing_is_reserved_is_refused(b: Bench) -> str:
    handle = b.create()
    return saw(lambda: b.driver.mem_map(1 << 44, UNIT, 0, handle))


@case(BAD, real="ok", why="the driver reserves more than it is asked for; the model holds to what was asked")
def mapping_over_the_end_of_the_reservation_is_refused(b: Bench) -> str:
    handle, address = b.create(2), b.reserve(1)
    return saw(lambda: b.driver.mem_map(address, 2 * UNIT, 0, handle))


@case("NOT_SUPPORTED (801)")
def mapping_more_than_was_allocated_is_refused(b: Bench) -> str:
    handle, address = b.create(1), b.reserve(2)
    return saw(lambda: b.driver.mem_map(address, 2 * UNIT, 0, handle))


@case(BAD)
def mapping_twice_at_one_place_is_refused(b: Bench) -> str:
    address, other = b.chunk(), b.create()
    return saw(lambda: b.driver.mem_map(address, UNIT, 0, other))


@case(BAD)
def mapping_at_an_odd_address_is_refused(b: Bench) -> str:
    handle, address = b.create(), b.reserve(2)
    return saw(lambda: b.driver.mem_map(address + 4096, UNIT, 0, handle))


@case("NOT_SUPPORTED (801)")
def mapping_from_an_offset_is_refused(b: Bench) -> str:
    handle, address = b.create(2), b.reserve(1)
    return saw(lambda: b.driver.mem_map(address, UNIT, UNIT, handle))


@case("ok")
def one_allocation_can_be_mapped_at_two_places(b: Bench) -> str:
    handle = b.create()
    b.map(b.reserve(), handle)
    return saw(lambda: b.map(b.reserve(), handle))


@case("ok")
def chunks_can_be_mapped_side_by_side_in_one_reservation(b: Bench) -> str:
    address = b.reserve(2)
    b.map(address, b.create())
    return saw(lambda: b.map(address + UNIT, b.create()))


@case(BAD)
def unmapping_a_part_is_refused(b: Bench) -> str:
    address = b.chunk(units=2)
    return saw(lambda: b.driver.mem_unmap(address, UNIT))


@case(BAD, real="ok", why="the driver lets it pass; the model takes it for a defect of ours")
def unmapping_what_is_not_mapped_is_refused(b: Bench) -> str:
    address = b.reserve()
    return saw(lambda: b.driver.mem_unmap(address, UNIT))


@case("ok")
def an_unmapped_place_can_be_mapped_again(b: Bench) -> str:
    address, handle = b.reserve(), b.create()
    b.driver.mem_map(address, UNIT, 0, handle)
    b.driver.mem_unmap(address, UNIT)
    return saw(lambda: b.map(address, handle))


@case("bytes kept")
def releasing_a_mapped_handle_keeps_the_memory(b: Bench) -> str:
    handle, address = b.driver.mem_create(UNIT, POSIX), b.reserve()
    b.map(address, handle)
    b.driver.set_access(address, UNIT, [GPU, NODE])
    ctypes.memset(address, 7, UNIT)
    b.driver.mem_release(handle)
    return "bytes kept" if ctypes.string_at(address, UNIT) == b"\7" * UNIT else "bytes lost"


# --- access


@case(BAD)
def access_to_what_is_not_mapped_is_refused(b: Bench) -> str:
    address = b.reserve()
    return saw(lambda: b.driver.set_access(address, UNIT, [GPU]))


@case(
    BAD,
    real="ok",
    why="the driver grants what is mapped; its manual, and the model, want no gaps",
)
def access_over_a_gap_is_refused(b: Bench) -> str:
    address = b.reserve(3)
    b.map(address, b.create())
    b.map(address + 2 * UNIT, b.create())
    return saw(lambda: b.driver.set_access(address, 3 * UNIT, [GPU]))


@case("ok")
def access_to_two_neighbours_at_once_is_granted(b: Bench) -> str:
    address = b.reserve(2)
    b.map(address, b.create())
    b.map(address + UNIT, b.create())
    return saw(lambda: b.driver.set_access(address, 2 * UNIT, [GPU, NODE]))


@case(BAD)
def access_for_a_gpu_that_is_not_there_is_refused(b: Bench) -> str:
    address = b.chunk()
    return saw(lambda: b.driver.set_access(address, UNIT, [Location("device", 99)]))


@case("killed by SIGSEGV", child=True)
def the_cpu_without_access_dies_of_it(b: Bench) -> str:
    ctypes.memset(b.chunk(GPU), 1, 1)
    return "ok"


@case("ok")
def the_cpu_with_access_reads_and_writes(b: Bench) -> str:
    address = b.chunk(NODE)
    ctypes.memset(address, 9, UNIT)
    return "ok" if ctypes.string_at(address + UNIT - 1, 1) == b"\x09" else "other bytes"


@case(
    BAD,
    real="ok",
    why="the driver takes the CPU's access and copies as from plain pages; a kernel would fault",
    child=True,
)
def a_gpu_copy_without_access_fails(b: Bench) -> str:
    address, hbm, stream = b.chunk(NODE), b.device(UNIT), b.stream()

    def copy() -> None:
        b.driver.memcpy_async(hbm, address, UNIT, stream)
        b.driver.stream_synchronize(stream)

    return saw(copy)


@case(
    BAD,
    real="killed by SIGSEGV",
    why="the driver takes the address for plain pages and reads them with the CPU",
    child=True,
)
def a_gpu_copy_after_unmapping_fails(b: Bench) -> str:
    address, hbm, stream = b.chunk(GPU, NODE), b.device(UNIT), b.stream()
    b.driver.mem_unmap(address, UNIT)

    def copy() -> None:
        b.driver.memcpy_async(hbm, address, UNIT, stream)
        b.driver.stream_synchronize(stream)

    return saw(copy)


@case("equal")
def a_gpu_and_the_cpu_see_the_same_bytes(b: Bench) -> str:
    address, hbm, stream = b.chunk(GPU, NODE), b.device(UNIT), b.stream()
    pattern = bytes(range(256)) * (UNIT // 256)
    ctypes.memmove(address, pattern, UNIT)
    b.driver.memcpy_async(hbm, address, UNIT, stream)
    b.driver.stream_synchronize(stream)
    ctypes.memset(address, 0, UNIT)
    b.driver.memcpy(address, hbm, UNIT)
    return "equal" if ctypes.string_at(address, UNIT) == pattern else "different"


@case("ok", child=True)
def no_context_is_needed_to_create_map_grant_and_export(b: Bench) -> str:
    def whole() -> None:
        address = b.chunk(GPU, NODE)
        ctypes.memset(address, 1, UNIT)
        os.close(b.driver.export_fd(b.create()))

    return saw(whole)


# --- export and import


@case("the same memory")
def an_imported_descriptor_is_the_same_memory(b: Bench) -> str:
    handle, address = b.create(), b.reserve()
    b.map(address, handle)
    b.driver.set_access(address, UNIT, [NODE])
    fd = b.driver.export_fd(handle)
    imported = b.driver.import_fd(fd)
    os.close(fd)
    b._later(b.driver.mem_release, imported)
    other = b.reserve()
    b.map(other, imported)
    b.driver.set_access(other, UNIT, [NODE, GPU])
    ctypes.memset(address, 5, UNIT)
    return "the same memory" if ctypes.string_at(other, UNIT) == b"\5" * UNIT else "other memory"


@case("ok")
def the_importer_may_release_its_handle_and_the_exporter_keeps_its_own(b: Bench) -> str:
    handle = b.create()
    fd = b.driver.export_fd(handle)
    b.driver.mem_release(b.driver.import_fd(fd))
    os.close(fd)
    return saw(lambda: b.map(b.reserve(), handle))


@case("False")
def an_exported_descriptor_is_not_inherited(b: Bench) -> str:
    fd = b.driver.export_fd(b.create())
    inherited = os.get_inheritable(fd)
    os.close(fd)
    return str(inherited)


@case(BAD)
def exporting_memory_made_without_a_handle_type_is_refused(b: Bench) -> str:
    handle = b.create(1, PLAIN)
    return saw(lambda: b.driver.export_fd(handle))


@case(BAD)
def a_fabric_handle_of_posix_memory_is_refused(b: Bench) -> str:
    handle = b.create()
    return saw(lambda: b.driver.export_fabric(handle))


@case("UNKNOWN (999)", child=True)
def importing_a_descriptor_that_is_no_memory_is_refused(b: Bench) -> str:
    with open("/dev/null", "rb") as file:
        return saw(lambda: b.driver.import_fd(file.fileno()))


@case("NOT_SUPPORTED (801)", child=True)
def importing_a_fabric_handle_without_an_imex_channel_is_refused(b: Bench) -> str:
    return saw(lambda: b.driver.import_fabric(bytes(64)))


@case("the exporter's bytes", child=True)
def an_import_outlives_the_exporter(b: Bench) -> str:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.memory.contract", b.side, "_export_to_peer", str(theirs.fileno())]
    env = {**os.environ, "EGMCTL_CONTRACT_DIR": str(b.folder)}
    exporter = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    theirs.close()
    ours.settimeout(60)
    _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    handle = b.driver.import_fd(descriptors[0])
    b._later(b.driver.mem_release, handle)
    os.close(descriptors[0])
    exporter.kill()
    exporter.wait(60)
    ours.close()
    address = b.reserve()
    b.map(address, handle)
    b.driver.set_access(address, UNIT, [GPU, NODE])
    return "the exporter's bytes" if ctypes.string_at(address, UNIT) == b"\x2a" * UNIT else "other bytes"


@case("", child=True)
def _export_to_peer(b: Bench) -> str:
    handle, address = b.create(), b.reserve()
    b.map(address, handle)
    b.driver.set_access(address, UNIT, [NODE])
    ctypes.memset(address, 0x2A, UNIT)
    with socket.socket(fileno=int(sys.argv[3])) as peer:
        socket.send_fds(peer, [b"x"], [b.driver.export_fd(handle)])
        time.sleep(60)
    return ""


# --- host memory


@case("the same address")
def registered_pages_have_their_own_address_on_the_gpu(b: Bench) -> str:
    b.driver.use_device(0)
    address = b.pages()
    b.driver.host_register(address, 1 << 20)
    b._later(b.driver.host_unregister, address)
    return "the same address" if b.driver.host_device_pointer(address) == address else "another"


@case("HOST_MEMORY_ALREADY_REGISTERED (712)")
def registering_twice_is_refused(b: Bench) -> str:
    b.driver.use_device(0)
    address = b.pages()
    b.driver.host_register(address, 1 << 20)
    b._later(b.driver.host_unregister, address)
    return saw(lambda: b.driver.host_register(address, 1 << 20))


@case("HOST_MEMORY_NOT_REGISTERED (713)")
def unregistering_what_is_not_registered_is_refused(b: Bench) -> str:
    b.driver.use_device(0)
    address = b.pages()
    return saw(lambda: b.driver.host_unregister(address))


@case(BAD)
def registering_what_is_not_mapped_is_refused(b: Bench) -> str:
    b.driver.use_device(0)
    return saw(lambda: b.driver.host_register(1 << 44, 1 << 20))


@case(BAD)
def a_device_pointer_of_plain_pages_is_refused(b: Bench) -> str:
    b.driver.use_device(0)
    address = b.pages()
    return saw(lambda: b.driver.host_device_pointer(address))


@case("ok")
def pinned_memory_can_be_taken_and_given_back(b: Bench) -> str:
    b.driver.use_device(0)
    address = b.driver.host_alloc(1 << 20)
    ctypes.memset(address, 1, 1 << 20)
    return saw(lambda: b.driver.host_free(address))


# --- pointers


def _described(b: Bench, address: int, base: int, size: int) -> str:
    info = b.driver.pointer_info(address)
    inside = info.range_start == base and info.range_size == size
    other = f"range at {(info.range_start or 0) - base:+#x} of {info.range_size}"
    return f"{info.type.value}, device {info.device}, {'its range' if inside else other}"


@case("host, device None, its range")
def a_chunk_is_host_memory_with_its_range(b: Bench) -> str:
    b.driver.use_device(0)
    address = b.chunk(GPU, NODE)
    return _described(b, address + 100, address, UNIT)


@case("host, device None, its range")
def a_chunk_inside_a_larger_reservation_has_the_range_of_the_reservation(b: Bench) -> str:
    b.driver.use_device(0)
    start = b.reserve(3)
    b.map(start + UNIT, b.create())
    b.driver.set_access(start + UNIT, UNIT, [GPU, NODE])
    return _described(b, start + UNIT, start, 3 * UNIT)


@case("device, device 0, its range")
def device_memory_says_its_device_and_range(b: Bench) -> str:
    address = b.device(UNIT)
    return _described(b, address + 1, address, UNIT)


@case("on the last GPU")
def memory_of_the_last_gpu_is_said_to_be_there(b: Bench) -> str:
    last = b.driver.device_count() - 1
    b.driver.use_device(last)
    address = b.driver.mem_alloc(UNIT)
    try:
        found = b.driver.pointer_info(address).device
        return "on the last GPU" if found == last else f"on GPU {found} of {last + 1}"
    finally:
        b.driver.mem_free(address)


@case("host, device None, its range")
def registered_pages_are_host_memory(b: Bench) -> str:
    b.driver.use_device(0)
    address = b.pages()
    b.driver.host_register(address, 1 << 20)
    b._later(b.driver.host_unregister, address)
    return _described(b, address, address, 1 << 20)


@case("True")
def plain_pages_are_unregistered(b: Bench) -> str:
    b.driver.use_device(0)
    return str(b.driver.pointer_info(b.pages()).type is MemoryType.UNREGISTERED)


# --- contexts, copies, streams, events


@case("INVALID_DEVICE (101)")
def a_gpu_that_is_not_there_is_refused(b: Bench) -> str:
    return saw(lambda: b.driver.use_device(99))


@case("True")
def an_unknown_attribute_is_unknown_not_no(b: Bench) -> str:
    return str(b.driver.attribute(0, 9999) is None)


@case("INVALID_CONTEXT (201)", child=True)
def device_memory_needs_a_context(b: Bench) -> str:
    return saw(lambda: b.driver.mem_alloc(4096))


@case("INVALID_CONTEXT (201)", child=True)
def a_stream_needs_a_context(b: Bench) -> str:
    return saw(lambda: b.driver.stream_create())


@case("INVALID_CONTEXT (201)", child=True)
def registering_needs_a_context(b: Bench) -> str:
    address = b.pages()
    return saw(lambda: b.driver.host_register(address, 1 << 20))


@case(BAD)
def device_memory_of_no_bytes_is_refused(b: Bench) -> str:
    b.driver.use_device(0)
    return saw(lambda: b.driver.mem_alloc(0))


@case(BAD)
def freeing_device_memory_twice_is_refused(b: Bench) -> str:
    b.driver.use_device(0)
    address = b.driver.mem_alloc(4096)
    b.driver.mem_free(address)
    return saw(lambda: b.driver.mem_free(address))


@case(BAD)
def a_copy_over_the_end_of_an_allocation_is_refused(b: Bench) -> str:
    hbm, pages = b.device(UNIT), b.pages(2 * UNIT)
    return saw(lambda: b.driver.memcpy(hbm, pages, UNIT + 4096))


@case("equal")
def a_copy_of_plain_pages_is_right_when_it_returns(b: Bench) -> str:
    hbm, pages, stream = b.device(1 << 20), b.pages(), b.stream()
    ctypes.memset(pages, 3, 1 << 20)
    b.driver.memcpy_async(hbm, pages, 1 << 20, stream)
    ctypes.memset(pages, 0, 1 << 20)  # the bytes were taken before the call returned
    b.driver.stream_synchronize(stream)
    b.driver.memcpy(pages, hbm, 1 << 20)
    return "equal" if ctypes.string_at(pages, 1 << 20) == b"\3" * (1 << 20) else "different"


@case("equal")
def a_batch_copies_every_piece(b: Bench) -> str:
    address, hbm, stream = b.chunk(GPU, NODE), b.device(UNIT), b.stream()
    pattern = os.urandom(UNIT)
    ctypes.memmove(address, pattern, UNIT)
    pieces = list(range(0, UNIT, 8192))[::-1]
    sizes = [8192] * len(pieces)
    b.driver.memcpy_batch_async([hbm + p for p in pieces], [address + p for p in pieces], sizes, stream)
    b.driver.stream_synchronize(stream)
    ctypes.memset(address, 0, UNIT)
    b.driver.memcpy(address, hbm, UNIT)
    return "equal" if ctypes.string_at(address, UNIT) == pattern else "different"


@case("ok")
def an_empty_batch_is_nothing(b: Bench) -> str:
    stream = b.stream()
    return saw(lambda: b.driver.memcpy_batch_async([], [], [], stream))


@case(BAD)
def a_batch_of_unequal_lists_is_refused(b: Bench) -> str:
    hbm, stream = b.device(), b.stream()
    return saw(lambda: b.driver.memcpy_batch_async([hbm], [hbm], [1, 2], stream))


@case("equal")
def memset_is_done_when_it_returns(b: Bench) -> str:
    hbm, pages = b.device(1 << 20), b.pages()
    b.driver.memset(hbm, 0x5A, 1 << 20)
    b.driver.memcpy(pages, hbm, 1 << 20)
    return "equal" if ctypes.string_at(pages, 1 << 20) == b"\x5a" * (1 << 20) else "different"


@case("done: True, and after the work: True")
def an_event_is_done_when_the_work_before_it_is(b: Bench) -> str:
    address, hbm, stream = b.chunk(GPU, NODE), b.device(UNIT), b.stream()
    event = b.event()
    never_recorded = b.driver.event_query(event)
    b.driver.memcpy_async(hbm, address, UNIT, stream)
    b.driver.event_record(event, stream)
    b.driver.event_synchronize(event)
    return f"done: {never_recorded}, and after the work: {b.driver.event_query(event)}"


@case("INVALID_HANDLE (400)")
def time_between_events_without_timing_is_refused(b: Bench) -> str:
    stream = b.stream()
    first, last = b.event(), b.event()
    for event in (first, last):
        b.driver.event_record(event, stream)
        b.driver.event_synchronize(event)
    return saw(lambda: b.driver.event_elapsed_ms(first, last))


@case("INVALID_HANDLE (400)")
def time_between_events_never_recorded_is_refused(b: Bench) -> str:
    b.driver.use_device(0)
    first, last = b.event(True), b.event(True)
    return saw(lambda: b.driver.event_elapsed_ms(first, last))


@case("True")
def time_between_events_is_positive(b: Bench) -> str:
    address, hbm, stream = b.chunk(GPU, NODE), b.device(UNIT), b.stream()
    first, last = b.event(True), b.event(True)
    b.driver.event_record(first, stream)
    b.driver.memcpy_async(hbm, address, UNIT, stream)
    b.driver.event_record(last, stream)
    b.driver.event_synchronize(last)
    return str(b.driver.event_elapsed_ms(first, last) > 0)


@case("in order")
def a_stream_that_waits_for_an_event_comes_after_it(b: Bench) -> str:
    address, hbm = b.chunk(GPU, NODE, units=8), b.device(8 * UNIT)
    first, second, event = b.stream(), b.stream(), b.event()
    ctypes.memset(address, 1, 8 * UNIT)
    b.driver.memcpy_async(hbm, address, 8 * UNIT, first)
    b.driver.event_record(event, first)
    b.driver.stream_wait_event(second, event)
    target = b.chunk(GPU, NODE, units=8)
    b.driver.memcpy_async(target, hbm, 8 * UNIT, second)
    b.driver.stream_synchronize(second)
    return "in order" if ctypes.string_at(target, 8 * UNIT) == b"\1" * (8 * UNIT) else "too early"


def run_child(side: str, name: str) -> str:
    """A case in a process of its own: what it printed, or what it died of."""
    command = [sys.executable, "-m", "tests.memory.contract", side, name]
    # Its folder is ours, since a child that dies of its case removes nothing.
    with tempfile.TemporaryDirectory(prefix="egm-contract-") as folder:
        env = {**os.environ, "EGMCTL_CONTRACT_DIR": folder}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode < 0:
        return f"killed by {signal.Signals(-done.returncode).name}"
    if done.returncode:
        return f"exit {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
    return done.stdout.strip()


def run_here(one: Case, driver: Driver, side: str, folder: Path) -> str:
    bench = Bench(driver, side, folder)
    with bench.stack:
        return one.run(bench)


def main() -> int:
    side, name = sys.argv[1:3]
    with ExitStack() as stack:
        folder = os.environ.get("EGMCTL_CONTRACT_DIR")
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="egm-contract-"))
        print(run_here(CASES[name], make_driver(side, Path(folder)), side, Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    from tests.memory.contract import main as imported_main  # one module, one table of cases

    raise SystemExit(imported_main())
