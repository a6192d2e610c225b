"""A model of the CUDA driver: the calls of `egmctl.memory.driver.Driver` under the documented rules, on real memory.

What the real driver refuses is refused here with the same error; what it would die of (a CPU touching memory without
access) kills the process here too. Handles travel between processes. ``EGMCTL_SEAMS=tests.model.driver:install`` puts
it in the place of the real one.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from egmctl.memory import linux
from egmctl.memory.driver import (
    AllocationProp,
    CudaError,
    HandleType,
    Location,
    MemoryType,
    PointerInfo,
    install_driver,
)
from egmctl.topology.fabric import ImexChannel, ImexChannels, install_imex_channels
from tests.model.backing import Backing
from tests.model.config import Config
from tests.model.streams import Event, Stream

__all__ = ["Config", "ModelDriver", "install"]

FIRST_ADDRESS = 0x402000000
"""Where the real driver put the first reservation of every fresh process."""

ERRORS = {
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    101: "CUDA_ERROR_INVALID_DEVICE",
    201: "CUDA_ERROR_INVALID_CONTEXT",
    400: "CUDA_ERROR_INVALID_HANDLE",
    600: "CUDA_ERROR_NOT_READY",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    712: "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
    713: "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
    800: "CUDA_ERROR_NOT_PERMITTED",
    801: "CUDA_ERROR_NOT_SUPPORTED",
    999: "CUDA_ERROR_UNKNOWN",
}
INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE, INVALID_CONTEXT, INVALID_HANDLE = 1, 2, 101, 201, 400
NOT_READY, ILLEGAL_ADDRESS, ALREADY_REGISTERED, NOT_REGISTERED = 600, 700, 712, 713
NOT_PERMITTED, NOT_SUPPORTED, UNKNOWN = 800, 801, 999


class Refused(Exception):
    """A rule that a call broke, by the driver's number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


Method = TypeVar("Method", bound=Callable[..., Any])


def call(method: Method) -> Method:
    """Count and log the call, let it fail when told to, and turn a broken rule into the driver's error."""

    @functools.wraps(method)
    def wrapper(self: ModelDriver, *arguments: Any, **options: Any) -> Any:
        name = method.__name__
        outcome = "ok"
        try:
            self._enter(name)
            return method(self, *arguments, **options)
        except Refused as error:
            outcome = ERRORS[error.number]
            raise CudaError(name, outcome, error.number) from None
        except CudaError as error:
            outcome = error.name
            raise
        finally:
            self._note(name, outcome)

    return cast(Method, wrapper)


@dataclass
class Mapped:
    """A mapped part of a reservation."""

    address: int
    nbytes: int
    backing: Backing
    offset: int
    access: set[Location] = field(default_factory=set)

    @property
    def end(self) -> int:
        return self.address + self.nbytes


class ModelDriver:
    """See the module. ``leaks()`` counts what exists and would be left at exit."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()
        if self.config.driver_missing:
            raise CudaError("cuInit", "DRIVER_NOT_FOUND", -1, hint="install the NVIDIA driver")
        self.config.directory.mkdir(parents=True, exist_ok=True)
        self.calls: list[str] = []
        self._counts: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._local = threading.local()
        self._numbers = itertools.count(0x7F0000001000, 0x100)
        self._serial = itertools.count()
        self._handles: dict[int, Backing] = {}
        self._reservations: dict[int, int] = {}
        self._mapped: list[Mapped] = []
        self._registered: dict[int, int] = {}
        self._host_allocations: dict[int, int] = {}
        self._device_allocations: dict[int, tuple[int, int]] = {}
        self._streams: dict[int, Stream] = {}
        self._events: dict[int, Event] = {}
        self._sticky: int | None = None

    # the model's own

    def _enter(self, name: str) -> None:
        with self._lock:
            self.calls.append(name)
            self._counts[name] += 1
            count = self._counts[name]
        for fault in self.config.faults:
            if fault.program and not any(fault.program in word for word in sys.orig_argv):
                continue
            if fault.call == name and (fault.nth == 0 or fault.nth <= count < fault.nth + fault.times):
                raise CudaError(name, fault.name, fault.number)
        if self._sticky is not None:
            raise Refused(self._sticky)

    def _note(self, name: str, outcome: str) -> None:
        if self.config.log is None:
            return
        line = json.dumps({"pid": os.getpid(), "call": name, "nth": self._counts[name], "outcome": outcome})
        fd = os.open(self.config.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line.encode() + b"\n")
        finally:
            os.close(fd)

    def leaks(self) -> dict[str, int]:
        """What exists, by sort; empty when nothing does."""
        with self._lock:
            counts = {
                "handles": len(self._handles),
                "reservations": len(self._reservations),
                "mappings": len(self._mapped),
                "descriptors": self._open_descriptors(),
                "registrations": len(self._registered),
                "host allocations": len(self._host_allocations),
                "device allocations": len(self._device_allocations),
                "streams": len(self._streams),
                "events": len(self._events),
            }
        return {name: count for name, count in counts.items() if count}

    def _open_descriptors(self) -> int:
        """Descriptors that lead to allocations and are not the model's own."""
        ours = {backing.fd for backing in self._backings()}
        count = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{name}").removesuffix(" (deleted)")
            except OSError:
                continue
            if int(name) not in ours and target.startswith(f"{self.config.directory}/alloc-"):
                count += not target.endswith(".owner")
        return count

    def _backings(self) -> list[Backing]:
        found = {id(one): one for one in self._handles.values()}
        found.update((id(one.backing), one.backing) for one in self._mapped)
        return list(found.values())

    def host_pointer(self, address: int, nbytes: int) -> int:
        """Where a stand-in for a kernel finds the bytes of a device pointer of one mapping or allocation."""
        with self._lock:
            parts = self._parts(address, nbytes, self._current())
        if len(parts) != 1:
            raise Refused(INVALID_VALUE)
        return parts[0][0]

    def report(self) -> None:
        """Write the leaks of this process, and give back what a dying process gives back."""
        if self.config.leaks is not None:
            leaks = self.leaks()
            line = {"pid": os.getpid(), "argv": sys.argv, "total": sum(leaks.values()), "leaks": leaks}
            fd = os.open(self.config.leaks, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.write(fd, json.dumps(line).encode() + b"\n")
            os.close(fd)
        for backing in self._backings():
            if backing.owned:
                backing.path.unlink(missing_ok=True)

    def _current(self) -> int:
        device: int | None = getattr(self._local, "device", None)
        if device is None:
            raise Refused(INVALID_CONTEXT)
        return device

    def _known(self, device: int) -> int:
        if not 0 <= device < len(self.config.devices):
            raise Refused(INVALID_DEVICE)
        return device

    # machine

    @call
    def version(self) -> int:
        return 13000

    @call
    def device_count(self) -> int:
        return len(self.config.devices)

    @call
    def device_name(self, device: int) -> str:
        return self.config.devices[self._known(device)].name

    @call
    def device_uuid(self, device: int) -> str:
        chosen = self.config.devices[self._known(device)]
        return chosen.uuid or f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, chosen.bdf)}"

    @call
    def device_bdf(self, device: int) -> str:
        return self.config.devices[self._known(device)].bdf

    @call
    def attribute(self, device: int, attribute: int) -> int | None:
        return self.config.attribute(self._known(device), int(attribute))

    @call
    def memory_info(self, device: int) -> tuple[int, int]:
        total = self.config.devices[self._known(device)].total_bytes
        used = sum(size for size, where in self._device_allocations.values() if where == device)
        self._local.device = device
        return total - used, total

    @call
    def use_device(self, device: int) -> None:
        self._local.device = self._known(device)

    @call
    def current_context(self) -> int:
        device = getattr(self._local, "device", None)
        return 0 if device is None else 0xC0 + int(device)

    @call
    def set_current_context(self, context: int) -> None:
        self._local.device = self._known(context - 0xC0)

    # virtual memory management

    def _check_prop(self, prop: AllocationProp) -> None:
        on_gpu = prop.location.kind == "device"
        if prop.location.id not in (range(len(self.config.devices)) if on_gpu else self.config.nodes):
            raise Refused(INVALID_VALUE)
        if prop.handle_type not in (HandleType.NONE, HandleType.POSIX_FD, HandleType.FABRIC):
            raise Refused(INVALID_VALUE)

    @call
    def granularity(self, prop: AllocationProp, recommended: bool = False) -> int:
        self._check_prop(prop)
        return self.config.granularity

    @call
    def mem_create(self, nbytes: int, prop: AllocationProp) -> int:
        config = self.config
        node = prop.location.id if prop.location.kind == "host_numa" else -1
        if node in config.crash_nodes:
            os.kill(os.getpid(), signal.SIGSEGV)
        if node in config.hang_nodes:
            time.sleep(3600)
        if node in config.refuse_nodes:
            name, number = config.refuse_nodes[node]
            raise CudaError("mem_create", name, number)
        self._check_prop(prop)
        if nbytes <= 0 or nbytes % config.granularity or (prop.gpu_direct_rdma and node >= 0 and not config.rdma):
            raise Refused(INVALID_VALUE)
        if prop.handle_type is HandleType.FABRIC and config.fabric != "ok":
            raise Refused(NOT_PERMITTED if config.fabric == "not-permitted" else NOT_SUPPORTED)
        with self._lock:
            used = sum(one.nbytes for one in self._backings() if one.owned and one.node == node)
            if used + nbytes > config.node_bytes.get(node, 1 << 62):
                raise Refused(OUT_OF_MEMORY)
            ident = f"{next(self._serial) + 1:032x}" if config.reuse_handles else None
            backing = Backing.create(config.directory, nbytes, node, int(prop.handle_type), config.host, ident)
            return self._new_handle(backing)

    def _new_handle(self, backing: Backing) -> int:
        backing.references += 1
        number = next(self._numbers)
        self._handles[number] = backing
        return number

    def _drop(self, backing: Backing) -> None:
        backing.references -= 1
        if backing.references == 0:
            backing.close()

    def _backing(self, handle: int) -> Backing:
        backing = self._handles.get(handle)
        if backing is None:
            raise Refused(INVALID_VALUE)
        return backing

    @call
    def mem_release(self, handle: int) -> None:
        with self._lock:
            backing = self._backing(handle)
            del self._handles[handle]
            self._drop(backing)

    @call
    def address_reserve(self, nbytes: int, alignment: int = 0, hint: int = 0) -> int:
        if nbytes <= 0 or nbytes % self.config.granularity or alignment & (alignment - 1):
            raise Refused(INVALID_VALUE)
        step = max(alignment, self.config.granularity)
        with self._lock:
            candidates = itertools.chain([hint] if hint and hint % step == 0 else [], itertools.count(FIRST_ADDRESS))
            address = next(candidates)
            while True:
                address = -(-address // step) * step
                try:
                    linux.reserve(nbytes, step, address)
                except OSError:
                    address = next(candidates) if address == hint else address + step
                    continue
                self._reservations[address] = nbytes
                return address

    @call
    def address_free(self, address: int, nbytes: int) -> None:
        with self._lock:
            if self._reservations.get(address) != nbytes or self._inside(address, nbytes):
                raise Refused(INVALID_VALUE)
            linux.unmap(address, nbytes)
            del self._reservations[address]

    def _inside(self, address: int, nbytes: int) -> list[Mapped]:
        """Mappings that touch a range, in order."""
        found = [one for one in self._mapped if one.address < address + nbytes and address < one.end]
        return sorted(found, key=lambda one: one.address)

    def _exactly(self, address: int, nbytes: int) -> list[Mapped]:
        """The mappings that a range consists of; refused when it is not made of whole ones without a gap."""
        found = self._inside(address, nbytes)
        position = address
        for one in found:
            if one.address != position:
                raise Refused(INVALID_VALUE)
            position = one.end
        if not found or position != address + nbytes:
            raise Refused(INVALID_VALUE)
        return found

    @call
    def mem_map(self, address: int, nbytes: int, offset: int, handle: int) -> None:
        unit = self.config.granularity
        with self._lock:
            backing = self._backing(handle)
            if nbytes <= 0 or nbytes % unit or address % unit:
                raise Refused(INVALID_VALUE)
            if offset != 0 or nbytes > backing.nbytes:
                raise Refused(NOT_SUPPORTED)
            if not any(start <= address and address + nbytes <= start + n for start, n in self._reservations.items()):
                raise Refused(INVALID_VALUE)
            if self._inside(address, nbytes):
                raise Refused(INVALID_VALUE)
            backing.references += 1
            self._mapped.append(Mapped(address, nbytes, backing, offset))

    @call
    def mem_unmap(self, address: int, nbytes: int) -> None:
        with self._lock:
            for one in self._exactly(address, nbytes):
                linux.reserve_over(one.address, one.nbytes)
                self._mapped.remove(one)
                self._drop(one.backing)

    @call
    def set_access(self, address: int, nbytes: int, locations: Sequence[Location]) -> None:
        with self._lock:
            found = self._exactly(address, nbytes)
            if not locations:
                raise Refused(INVALID_VALUE)
            for location in locations:
                if location.kind == "device":
                    if not 0 <= location.id < len(self.config.devices):
                        raise Refused(INVALID_VALUE)
                elif any(one.backing.node < 0 or one.backing.host != self.config.host for one in found):
                    raise Refused(NOT_SUPPORTED)
            for one in found:
                for location in locations:
                    if location.kind == "host_numa" and location not in one.access:
                        linux.map_file(one.backing.fd, one.nbytes, over=one.address)
                    one.access.add(location)

    @call
    def export_fd(self, handle: int) -> int:
        with self._lock:
            backing = self._backing(handle)
            if backing.handle_type != HandleType.POSIX_FD:
                raise Refused(INVALID_VALUE)
            return os.open(f"/proc/self/fd/{backing.fd}", os.O_RDWR | os.O_CLOEXEC)

    @call
    def export_fabric(self, handle: int) -> bytes:
        with self._lock:
            backing = self._backing(handle)
            if backing.handle_type != HandleType.FABRIC:
                raise Refused(INVALID_VALUE)
            return backing.fabric()

    @call
    def import_fd(self, fd: int) -> int:
        with self._lock:
            backing = Backing.from_fd(fd)
            if backing is None or backing.handle_type != HandleType.POSIX_FD:
                if backing is not None:
                    backing.close()
                raise Refused(UNKNOWN)
            return self._new_handle(backing)

    @call
    def import_fabric(self, handle: bytes) -> int:
        if self.config.fabric != "ok":
            raise Refused(NOT_SUPPORTED)  # what the real one said without an IMEX channel, whatever its manual says
        with self._lock:
            backing = Backing.from_fabric(self.config.directory, handle)
            if backing is None:
                raise Refused(INVALID_VALUE)
            return self._new_handle(backing)

    # host memory

    @call
    def host_register(self, address: int, nbytes: int) -> None:
        self._current()
        with self._lock:
            if nbytes <= 0 or not _is_mapped(address, nbytes):
                raise Refused(INVALID_VALUE)
            if self._overlaps({**self._registered, **self._host_allocations}, address, nbytes):
                raise Refused(ALREADY_REGISTERED)
            self._registered[address] = nbytes

    @staticmethod
    def _overlaps(ranges: dict[int, int], address: int, nbytes: int) -> bool:
        return any(start < address + nbytes and address < start + size for start, size in ranges.items())

    @call
    def host_unregister(self, address: int) -> None:
        self._current()
        with self._lock:
            if self._registered.pop(address, None) is None:
                raise Refused(NOT_REGISTERED)

    @call
    def host_device_pointer(self, address: int) -> int:
        self._current()
        with self._lock:
            if not self._overlaps({**self._registered, **self._host_allocations}, address, 1):
                raise Refused(INVALID_VALUE)
            return address

    @call
    def host_alloc(self, nbytes: int) -> int:
        self._current()
        if nbytes <= 0:
            raise Refused(INVALID_VALUE)
        return self._anonymous(nbytes, lambda address: self._host_allocations.__setitem__(address, nbytes))

    def _anonymous(self, nbytes: int, record: Callable[[int], None]) -> int:
        fd = linux.memfd("model", nbytes)
        try:
            with self._lock:
                address = linux.map_file(fd, nbytes)
                record(address)
                return address
        finally:
            os.close(fd)

    @call
    def host_free(self, address: int) -> None:
        self._current()
        with self._lock:
            nbytes = self._host_allocations.pop(address, None)
            if nbytes is None:
                raise Refused(INVALID_VALUE)
            linux.unmap(address, nbytes)

    # device memory and copies

    @call
    def mem_alloc(self, nbytes: int) -> int:
        device = self._current()
        if nbytes <= 0:
            raise Refused(INVALID_VALUE)
        used = sum(size for size, where in self._device_allocations.values() if where == device)
        if used + nbytes > self.config.devices[device].total_bytes:
            raise Refused(OUT_OF_MEMORY)
        return self._anonymous(nbytes, lambda at: self._device_allocations.__setitem__(at, (nbytes, device)))

    @call
    def mem_free(self, address: int) -> None:
        self._current()
        with self._lock:
            found = self._device_allocations.pop(address, None)
            if found is None:
                raise Refused(INVALID_VALUE)
            streams = list(self._streams.values())
        for stream in streams:  # the real one waits for the device as well
            stream.synchronize()
        linux.unmap(address, found[0])

    @call
    def pointer_info(self, address: int) -> PointerInfo:
        with self._lock:
            for start, (nbytes, device) in self._device_allocations.items():
                if start <= address < start + nbytes:
                    return PointerInfo(MemoryType.DEVICE, device, start, nbytes)
            for one in self._inside(address, 1):
                # the range is the whole reservation, not the part of it that is mapped
                start, size = next((s, n) for s, n in self._reservations.items() if s <= address < s + n)
                if one.backing.node < 0:
                    return PointerInfo(MemoryType.DEVICE, 0, start, size)
                return PointerInfo(MemoryType.HOST, None, start, size)
            for start, nbytes in {**self._registered, **self._host_allocations}.items():
                if start <= address < start + nbytes:
                    return PointerInfo(MemoryType.HOST, None, start, nbytes)
            return PointerInfo(MemoryType.UNREGISTERED)

    def _parts(self, address: int, nbytes: int, device: int) -> list[tuple[int, int]]:
        """(host pointer, length) of the pieces of a range that a copy of ``device`` may touch; refused otherwise."""
        if nbytes < 0:
            raise Refused(INVALID_VALUE)
        for start, (size, _) in self._device_allocations.items():
            if start <= address < start + size:
                if address + nbytes > start + size:
                    raise Refused(INVALID_VALUE)
                return [(address, nbytes)]
        if any(start < address + nbytes and address < start + size for start, size in self._reservations.items()):
            return self._vmm_parts(address, nbytes, device)
        if not _is_mapped(address, nbytes):
            raise Refused(INVALID_VALUE)
        return [(address, nbytes)]

    def _vmm_parts(self, address: int, nbytes: int, device: int) -> list[tuple[int, int]]:
        parts, position = [], address
        for one in self._inside(address, nbytes):
            if one.address > position or Location("device", device) not in one.access:
                raise Refused(INVALID_VALUE)
            length = min(one.end, address + nbytes) - position
            parts.append((one.backing.alias + one.offset + position - one.address, length))
            position += length
        if position != address + nbytes:
            raise Refused(INVALID_VALUE)
        return parts

    def _pageable(self, address: int) -> bool:
        return self.pointer_info.__wrapped__(self, address).type is MemoryType.UNREGISTERED  # type: ignore[attr-defined]

    def _stream(self, stream: int) -> Stream:
        found = self._streams.get(stream)
        if found is None:
            raise Refused(INVALID_HANDLE)
        return found

    def _event(self, event: int) -> Event:
        found = self._events.get(event)
        if found is None:
            raise Refused(INVALID_HANDLE)
        return found

    @call
    def stream_create(self) -> int:
        stream = Stream(self._current())
        with self._lock:
            number = next(self._numbers)
            self._streams[number] = stream
            return number

    @call
    def stream_destroy(self, stream: int) -> None:
        with self._lock:
            self._stream(stream).close()
            del self._streams[stream]

    @call
    def stream_synchronize(self, stream: int) -> None:
        self._stream(stream).synchronize()
        if self._sticky is not None:
            raise Refused(self._sticky)

    @call
    def stream_wait_event(self, stream: int, event: int) -> None:
        mark = self._event(event).mark
        waiting = self._stream(stream)
        if mark is not None:
            waiting.put(mark.wait)

    @call
    def event_create(self, timing: bool = False) -> int:
        device = self._current()
        with self._lock:
            number = next(self._numbers)
            self._events[number] = Event(device, timing)
            return number

    @call
    def event_destroy(self, event: int) -> None:
        with self._lock:
            self._event(event)
            del self._events[event]

    @call
    def event_record(self, event: int, stream: int) -> None:
        recorded, queue = self._event(event), self._stream(stream)
        if recorded.device != queue.device:
            raise Refused(INVALID_HANDLE)
        recorded.mark = queue.mark()

    @call
    def event_query(self, event: int) -> bool:
        mark = self._event(event).mark
        return mark is None or mark.reached()

    @call
    def event_synchronize(self, event: int) -> None:
        mark = self._event(event).mark
        if mark is not None:
            mark.wait()
        if self._sticky is not None:
            raise Refused(self._sticky)

    @call
    def event_elapsed_ms(self, start: int, end: int) -> float:
        first, last = self._event(start), self._event(end)
        if not (first.timing and last.timing) or first.mark is None or last.mark is None:
            raise Refused(INVALID_HANDLE)
        if not (first.mark.reached() and last.mark.reached()):
            raise Refused(NOT_READY)
        return (last.mark.when - first.mark.when) * 1000

    def _copy(self, destination: int, source: int, nbytes: int, device: int) -> None:
        with self._lock:
            targets = self._parts(destination, nbytes, device)
            origins = self._parts(source, nbytes, device)
        _move(targets, origins)

    def _later(self, copies: list[tuple[int, int, int]], device: int) -> Callable[[], None]:
        """The copies as work for a stream; what is no longer there then is an error that sticks, as on a GPU."""

        def work() -> None:
            if self.config.copy_delay:
                time.sleep(self.config.copy_delay)
            try:
                for destination, source, nbytes in copies:
                    self._copy(destination, source, nbytes, device)
            except Refused:
                self._sticky = ILLEGAL_ADDRESS

        return work

    def _enqueue(self, copies: list[tuple[int, int, int]], stream: int) -> None:
        self._current()
        queue = self._stream(stream)
        with self._lock:
            for destination, source, nbytes in copies:
                self._parts(destination, nbytes, queue.device)
                self._parts(source, nbytes, queue.device)
        queue.put(self._later(copies, queue.device))
        if any(self._pageable(one[0]) or self._pageable(one[1]) for one in copies):
            queue.synchronize()  # pageable memory is staged before the call returns

    @call
    def memcpy(self, destination: int, source: int, nbytes: int) -> None:
        self._copy(destination, source, nbytes, self._current())

    @call
    def memcpy_async(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        self._enqueue([(destination, source, nbytes)], stream)

    @call
    def memcpy_batch_async(
        self, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        if not len(destinations) == len(sources) == len(sizes):
            raise Refused(INVALID_VALUE)
        if sizes:
            self._enqueue(list(zip(destinations, sources, sizes, strict=True)), stream)

    @call
    def memset(self, address: int, value: int, nbytes: int) -> None:
        device = self._current()
        with self._lock:
            parts = self._parts(address, nbytes, device)
        for pointer, length in parts:
            ctypes.memset(pointer, value & 0xFF, length)


def _move(targets: list[tuple[int, int]], origins: list[tuple[int, int]]) -> None:
    targets, origins = targets[::-1], origins[::-1]
    while targets and origins:
        (target, room), (origin, length) = targets.pop(), origins.pop()
        count = min(room, length)
        ctypes.memmove(target, origin, count)
        if room > count:
            targets.append((target + count, room - count))
        if length > count:
            origins.append((origin + count, length - count))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def _is_mapped(address: int, nbytes: int) -> bool:
    """Whether each page of a range of this process exists."""
    page = linux.page_size()
    start = address - address % page
    pages = -(-(address + max(nbytes, 1) - start) // page)
    if address <= 0:
        return False
    vector = (ctypes.c_ubyte * pages)()
    return bool(_libc.mincore(start, pages * page, vector) == 0)


def install() -> None:
    """The seam: this process's driver is a model configured by the environment, and reports its leaks at exit."""
    drivers: list[ModelDriver] = []

    def factory() -> ModelDriver:
        driver = ModelDriver(Config.from_env())
        drivers.append(driver)
        return driver

    def at_exit() -> None:
        for driver in drivers:
            driver.report()

    atexit.register(at_exit)
    install_driver(factory)
    install_imex_channels(lambda: _channels(Config.from_env()))


def _channels(config: Config) -> ImexChannels:
    """The channel files of a machine whose driver makes fabric handles, or does not."""
    folder = "/dev/nvidia-caps-imex-channels"
    channels = (ImexChannel(0, f"{folder}/channel0", ""),) if config.fabric == "ok" else ()
    return ImexChannels(folder, None if config.fabric == "not-supported" else 234, channels)
