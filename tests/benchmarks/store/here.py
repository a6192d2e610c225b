"""One process that measures: a store on the GPUs of this machine, their memory, and the raw copies of the driver."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np

from egmctl import seams
from egmctl.consumer import EgmStore
from egmctl.consumer.session import Session
from egmctl.memory.driver import get_driver
from egmctl.mooncake.master import MasterClient
from tests.benchmarks.store.world import MIB, Rows, Scale, World

__all__ = ["Here", "Started", "at_once", "device_address", "in_flight", "percentiles", "words"]

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
SAMPLE = 64


class Started(Protocol):
    def result(self) -> object: ...


def words(seed: int, first: int, count: int) -> np.ndarray[Any, Any]:
    """``count`` 8-byte words of the pattern of ``seed``, from word ``first`` on."""
    with np.errstate(over="ignore"):
        numbers = np.arange(first, first + count, dtype=np.uint64) * MULTIPLIER
        result: np.ndarray[Any, Any] = numbers + np.uint64(seed) * np.uint64(0xD1342543DE82EF95)
    return result


def percentiles(seconds: Sequence[float]) -> dict[str, Any]:
    """p50 and p99 in microseconds."""
    ordered = sorted(seconds)
    return {
        "p50_us": round(ordered[len(ordered) // 2] * 1e6, 1),
        "p99_us": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e6, 1),
    }


def in_flight(start: Callable[[int], Started], count: int, width: int = 8) -> None:
    """``count`` transfers, ``width`` of them under way at any time."""
    pending: deque[Started] = deque()
    for number in range(count):
        if len(pending) == width:
            pending.popleft().result()
        pending.append(start(number))
    while pending:
        pending.popleft().result()


def device_address(session: Session, key: str) -> int:
    """Where the GPUs see an object of a session; nothing but a measurement has to know it."""
    address = session._object(key)[2].device_address
    assert address is not None, "the pool is not mapped for GPUs"
    return address


def at_once(*runs: Callable[[], None]) -> None:
    """Each in a thread of its own; raises what one of them raised."""
    errors: list[BaseException] = []

    def guarded(run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Here:
    """``with Here(world, part) as here``."""

    def __init__(self, world: World, part: int, hbm: int | None = None) -> None:
        seams.load()
        self.world = world
        self.scale: Scale = world.scale
        self.rows = Rows(world, part)
        self._stack = ExitStack()
        self.driver = get_driver()
        self.devices = list(range(min(2, self.driver.device_count())))
        self.hbm_bytes = self.scale.hbm if hbm is None else hbm
        self.hbm: dict[int, int] = {}
        self.dram = 0
        self._streams: dict[int, list[int]] = {}

    def __enter__(self) -> Here:
        try:
            self.master = self._stack.enter_context(MasterClient(self.world.master))
            self.store = EgmStore.connect(self.world.master, devices=self.devices)
            self._stack.callback(self._free)
            self._stack.callback(self.store.close)
            for device in self.devices:
                self.driver.use_device(device)
                self.hbm[device] = self.driver.mem_alloc(self.hbm_bytes)
                self.store.register_buffer(self.hbm[device], self.hbm_bytes)
                self._streams[device] = [self.driver.stream_create() for _ in range(2)]
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _free(self) -> None:
        for device, address in self.hbm.items():
            self.driver.use_device(device)
            self.driver.mem_free(address)
            for stream in self._streams.get(device, []):
                self.driver.stream_destroy(stream)

    # content

    def fill(self, address: int, nbytes: int, seed: int = 0, device: int = 0) -> None:
        """Give memory of a GPU the pattern of ``seed``."""
        self.driver.use_device(device)
        piece = min(nbytes, 256 * MIB)
        values = words(seed, 0, piece // 8)
        with np.errstate(over="ignore"):
            step = np.uint64(piece // 8) * MULTIPLIER
        for at in range(0, nbytes, piece):
            self.driver.memcpy(address + at, values.ctypes.data, min(piece, nbytes - at))
            values += step

    def write(self, address: int, data: bytes, device: int = 0) -> None:
        self.driver.use_device(device)
        held = np.frombuffer(data, dtype=np.uint8)
        self.driver.memcpy(address, held.ctypes.data, len(data))

    def clear(self, address: int, nbytes: int, device: int = 0) -> None:
        self.driver.use_device(device)
        self.driver.memset(address, 0, nbytes)

    def read(self, address: int, nbytes: int, device: int = 0) -> np.ndarray[Any, Any]:
        """Bytes of GPU memory."""
        self.driver.use_device(device)
        got = np.empty(nbytes, dtype=np.uint8)
        self.driver.memcpy(got.ctypes.data, address, nbytes)
        return got

    def check(self, address: int, nbytes: int, seed: int = 0, device: int = 0) -> None:
        """That memory of a GPU has the pattern, at `SAMPLE` places spread over all of it."""
        piece = min(nbytes, 4096) // 8 * 8
        for at in {nbytes * number // SAMPLE // 8 * 8 for number in range(SAMPLE)} | {(nbytes - piece) // 8 * 8}:
            at = min(at, (nbytes - piece) // 8 * 8)
            if not np.array_equal(
                self.read(address + at, piece, device).view(np.uint64), words(seed, at // 8, piece // 8)
            ):
                raise SystemExit(f"WRONG BYTES at {at} of {nbytes}")

    def check_entries(self, address: int, offsets: np.ndarray[Any, Any], entry: int, seed: int = 0) -> None:
        """That entries lie side by side, as they are in an object with the pattern; some 2,000 of them are compared."""
        step = max(1, len(offsets) // 2000)
        rows = self.read(address, len(offsets) * entry).reshape(len(offsets), entry)[::step]
        chosen = offsets[::step]
        span = np.arange(entry // 8)[None, :]
        with np.errstate(over="ignore"):
            numbers = (chosen[:, None] // 8 + span).astype(np.uint64) * MULTIPLIER
            wanted = numbers + np.uint64(seed) * np.uint64(0xD1342543DE82EF95)
        if not np.array_equal(np.ascontiguousarray(rows).view(np.uint64), wanted):
            raise SystemExit(f"WRONG BYTES in {len(offsets)} entries of {entry}")

    # time

    def seconds(self, run: Callable[..., object], repeats: int | None = None, warm: int = 2) -> list[float]:
        """Of each run but the first ``warm``; ``run`` is given its number."""
        times = []
        for number in range((repeats or self.scale.repeats) + warm):
            begin = time.perf_counter()
            run(number)
            times.append(time.perf_counter() - begin)
        return times[warm:]

    def in_turns(self, *runs: Callable[[int], object], warm: int = 2) -> list[list[float]]:
        """Seconds of each, one of each after the other: what drifts meanwhile drifts for all of them."""
        times: list[list[float]] = [[] for _ in runs]
        for number in range(self.scale.repeats + warm):
            for run, its in zip(runs, times, strict=True):
                its += self.seconds(lambda _, run=run, number=number: run(number), 1, 0)
        return [its[warm:] for its in times]

    @staticmethod
    def rate(nbytes: int, times: Sequence[float]) -> float:
        """GB/s."""
        return nbytes / statistics.median(times) / 1e9

    def row(
        self,
        name: str,
        nbytes: int,
        times: Sequence[float],
        base: float | None = None,
        target: float | None = None,
        **more: Any,
    ) -> float:
        """A rate next to the raw copy's ``base``; returns it in GB/s."""
        rate = self.rate(nbytes, times)
        self.rows.add(name, gbps=round(rate, 2), ratio=rate / base if base else None, target=target, **more)
        return rate

    def remove(self, keys: Sequence[str]) -> None:
        self.master.batch_remove(keys, force=True)

    # raw copies

    def map_dram(self, nbytes: int) -> int:
        """The address, for GPUs, of an object's space in the pool, for the driver's own copies."""
        key = f"raw-{time.time_ns()}"
        spare = self.hbm[0]
        if nbytes > self.hbm_bytes:
            self.driver.use_device(0)
            spare = self.driver.mem_alloc(nbytes)
            self.store.register_buffer(spare, nbytes)
        self.store.put_from(key, spare, nbytes)
        if spare != self.hbm[0]:
            self.store.unregister_buffer(spare)
            self.driver.mem_free(spare)
        self._stack.callback(self.remove, [key])
        self.dram = device_address(self._stack.enter_context(self.store.session([key])), key)
        return self.dram

    def raw(self, jobs: Sequence[tuple[int, int, int, int]]) -> Callable[[int], None]:
        """(device, destination, source, bytes), each on a stream of its own, all at once."""

        def run(number: int) -> None:
            for index, (device, destination, source, nbytes) in enumerate(jobs):
                self.driver.use_device(device)
                self.driver.memcpy_async(destination, source, nbytes, self._streams[device][index % 2])
            for index, (device, _, _, _) in enumerate(jobs):
                self.driver.use_device(device)
                self.driver.stream_synchronize(self._streams[device][index % 2])

        return run

    def raw_one(self, way: str) -> Callable[[int], None]:
        """One large copy, get or put, in the memory of `raw_rates`."""
        pair = (self.hbm[0], self.dram) if way == "get" else (self.dram, self.hbm[0])
        return self.raw([(0, *pair, self.scale.raw)])

    def raw_two(self, way: str) -> Callable[[int], None]:
        """One large copy for each of two GPUs, in the memory of `raw_rates`."""
        pairs = [(device, self.hbm[device], self.dram + device * self.scale.raw) for device in self.devices]
        return self.raw([(d, a, b, self.scale.raw) if way == "get" else (d, b, a, self.scale.raw) for d, a, b in pairs])

    def raw_both(self) -> Callable[[int], None]:
        """One large copy each way, in the memory of `raw_rates`."""
        nbytes, hbm = self.scale.raw, self.hbm[0]
        return self.raw([(0, hbm, self.dram, nbytes), (0, self.dram + nbytes, hbm + nbytes, nbytes)])

    def raw_rates(self, *, both: bool = False) -> dict[str, float]:
        """GB/s of large raw copies, written down: get, put, and when asked both ways and on two GPUs at once."""
        nbytes = self.scale.raw
        ways = 2 if both else 1
        self.map_dram(ways * nbytes)
        size = f"{nbytes // MIB} MiB"
        rates = {
            "get": self.row(f"raw copy, DRAM to HBM, {size}", nbytes, self.seconds(self.raw_one("get"))),
            "put": self.row(f"raw copy, HBM to DRAM, {size}", nbytes, self.seconds(self.raw_one("put"))),
        }
        if both:
            rates["both"] = self.row("raw copies, both ways at once", 2 * nbytes, self.seconds(self.raw_both()))
        if both and len(self.devices) > 1:
            for way in ("get", "put"):
                name = f"raw copies, {way}, two GPUs at once"
                rates[f"{way} on two"] = self.row(name, 2 * nbytes, self.seconds(self.raw_two(way)))
        return rates
