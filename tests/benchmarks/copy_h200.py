"""Copies between GPU memory and a pool's DRAM, next to the raw driver copy of the same run.

    python -m tests.benchmarks.copy_h200 [--pool-gib 8] [--json FILE]

The DRAM is a ``cuda-posix`` chunk, imported as a consumer imports it. Every figure is the median of repeated runs, each
from the call in Python to the end of the wait, with the first runs left out; gathers take another set of offsets each
time, so that no cache knows them. GB is 10**9 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from egmctl.consumer.copy import CopyOptions, DeviceArray, Range, make_copier, make_gatherer
from egmctl.memory import ChunkSpec, import_share, provider_memory
from egmctl.memory.driver import Attribute, get_driver

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SETS = 6
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Bench:
    """One GPU's memory and DRAM, and the rows measured so far."""

    def __init__(self, stack: ExitStack, pool_bytes: int) -> None:
        self.driver = get_driver()
        self.devices = list(range(self.driver.device_count()))[:2]
        self.rows: list[dict[str, Any]] = []
        node = self.driver.attribute(0, Attribute.HOST_NUMA_ID) or 0
        provider = provider_memory("cuda-posix", total_bytes=pool_bytes, devices=self.devices)
        stack.callback(provider.close)
        chunk = provider.create(ChunkSpec(0, node, pool_bytes), lambda _: None)
        stack.callback(provider.release, chunk)
        share = chunk.share()
        mapping = import_share(share, devices=self.devices)
        stack.callback(mapping.close)
        if share.fd is not None:
            os.close(share.fd)
        self.dram, self.pool_bytes = mapping.address, pool_bytes
        self.hbm = {}
        for device in self.devices:
            self.driver.use_device(device)
            self.hbm[device] = self.driver.mem_alloc(GIB)
            stack.callback(self._free, device)
        self.copier = make_copier(self.driver, self.devices, CopyOptions())
        stack.callback(self.copier.close)
        self.gatherer = make_gatherer(self.driver, self.devices, CopyOptions())
        stack.callback(self.gatherer.close)
        self.copier.prepare()
        self.gatherer.prepare()
        self.streams = {}
        for device in self.devices:
            self.driver.use_device(device)
            self.streams[device] = [self.driver.stream_create() for _ in range(2)]
        self.random = np.random.default_rng(1)
        self.fill()

    def _free(self, device: int) -> None:
        self.driver.use_device(device)
        self.driver.mem_free(self.hbm[device])

    def fill(self) -> None:
        """Each 8-byte word of the DRAM is its own number times an odd constant: any entry can be checked."""
        self.driver.use_device(0)
        words = np.arange(GIB // 8, dtype=np.uint64) * MULTIPLIER
        for at in range(0, self.pool_bytes, GIB):
            self.driver.memcpy(self.hbm[0], words.ctypes.data, GIB)
            self.driver.memcpy(self.dram + at, self.hbm[0], GIB)
            words += np.uint64(GIB // 8 * int(MULTIPLIER) % (1 << 64))

    def expected(self, offsets: np.ndarray[Any, Any], entry: int) -> np.ndarray[Any, Any]:
        words = (offsets[:, None] // 8 + np.arange(entry // 8)[None, :]).astype(np.uint64)
        result: np.ndarray[Any, Any] = words * MULTIPLIER
        return result

    def seconds(self, run: Callable[[int], None], repeats: int = 7, warm: int = 2) -> list[float]:
        times = []
        for number in range(repeats + warm):
            begin = time.perf_counter()
            run(number)
            times.append(time.perf_counter() - begin)
        return times[warm:]

    def row(self, name: str, nbytes: int, times: Sequence[float], base: float | None = None, **more: Any) -> float:
        rate = nbytes / statistics.median(times) / 1e9
        row = {"name": name, "gbps": round(rate, 2), "ratio": round(rate / base, 3) if base else None, **more}
        self.rows.append(row)
        extra = "  ".join(f"{key} {value}" for key, value in more.items())
        print(f"{name:58s} {rate:7.2f} GB/s  {row['ratio'] or '':>6}  {extra}", file=sys.stderr, flush=True)
        return rate

    # raw copies

    def raw(self, jobs: Sequence[tuple[int, int, int, int]]) -> Callable[[int], None]:
        """(device, destination, source, bytes), each on a stream of its own."""

        def run(number: int) -> None:
            used = []
            for index, (device, destination, source, nbytes) in enumerate(jobs):
                self.driver.use_device(device)
                stream = self.streams[device][index % 2]
                self.driver.memcpy_async(destination, source, nbytes, stream)
                used.append((device, stream))
            for device, stream in used:
                self.driver.use_device(device)
                self.driver.stream_synchronize(stream)

        return run

    def copies(self, jobs: Sequence[tuple[int, list[tuple[int, int, int]]]], **how: Any) -> Callable[[int], None]:
        """(device, fragments), all under way at once."""

        def run(number: int) -> None:
            for completion in [self.copier.copy(fragments, device=device, **how) for device, fragments in jobs]:
                completion.wait()

        return run

    def large(self) -> dict[str, float]:
        hbm, dram, half = self.hbm[0], self.dram, 512 * MIB
        raw = {
            "get": self.row("raw copy, DRAM to HBM, 1 GiB", GIB, self.seconds(self.raw([(0, hbm, dram, GIB)]))),
            "put": self.row("raw copy, HBM to DRAM, 1 GiB", GIB, self.seconds(self.raw([(0, dram, hbm, GIB)]))),
        }
        both = [(0, hbm, dram, half), (0, dram + 2 * GIB, hbm + half, half)]
        raw["both"] = self.row("raw copy, both ways at once", GIB, self.seconds(self.raw(both)))
        for direction in ("get", "put"):
            pairs = [(hbm, dram), (dram, hbm)][direction == "put"]
            for size in (64 * MIB, 256 * MIB, GIB):
                count = 8 if size == 64 * MIB else 1
                jobs = [(0, [(pairs[0] + n * size, pairs[1] + n * size, size)]) for n in range(count)]
                times = self.seconds(self.copies(jobs), 11)
                self.row(f"engine, {direction}, {count} x {size // MIB} MiB", count * size, times, raw[direction])
            blocks = self.random.permutation(self.pool_bytes // MIB)[:256]
            fragments = [(hbm + n * MIB, dram + int(at) * MIB, MIB) for n, at in enumerate(blocks)]
            if direction == "put":
                fragments = [(b, a, n) for a, b, n in fragments]
            times = self.seconds(self.copies([(0, fragments)]), 11)
            self.row(f"batch, {direction}, 256 x 1 MiB", 256 * MIB, times, raw[direction])
        jobs = [(device, [(d, s, n)]) for device, d, s, n in both]
        self.row("engine, both ways at once", GIB, self.seconds(self.copies(jobs)), raw["both"])
        if len(self.devices) > 1:
            for direction in ("get", "put"):
                two = [(d, self.hbm[d], dram + d * 2 * GIB, GIB) for d in self.devices]
                if direction == "put":
                    two = [(d, b, a, n) for d, a, b, n in two]
                base = self.row(f"raw copy, {direction}, two GPUs at once", 2 * GIB, self.seconds(self.raw(two)))
                jobs = [(d, [(a, b, n)]) for d, a, b, n in two]
                self.row(f"engine, {direction}, two GPUs at once", 2 * GIB, self.seconds(self.copies(jobs)), base)
        else:
            print("two GPUs at once: waived, this machine has one", file=sys.stderr)
        self.fill()
        return raw

    # entries

    def offsets(self, count: int, entry: int, span: int, align: int = 16, distinct: bool = False) -> list[Any]:
        """Sets of offsets on the device, with their host arrays."""
        sets = []
        for _ in range(SETS):
            if distinct:
                values = self.random.permutation(span // entry)[:count].astype(np.int64) * entry
            else:
                values = self.random.integers(0, (span - entry) // align + 1, count, dtype=np.int64) * align
            self.driver.use_device(0)
            address = self.driver.mem_alloc(8 * count)
            self.driver.memcpy(address, values.ctypes.data, 8 * count)
            sets.append((DeviceArray(address, count, 8), values))
        return sets

    def drop(self, sets: list[Any]) -> None:
        self.driver.use_device(0)
        for device, _ in sets:
            self.driver.mem_free(device.address)

    def check(self, values: np.ndarray[Any, Any], entry: int) -> None:
        sample = slice(None, None, max(1, len(values) // 50_000))
        got = np.empty(len(values) * entry, dtype=np.uint8)
        self.driver.memcpy(got.ctypes.data, self.hbm[0], got.nbytes)
        rows = got.view(np.uint64).reshape(len(values), entry // 8)[sample]
        if not np.array_equal(rows, self.expected(values[sample], entry)):
            raise SystemExit(f"WRONG BYTES in a gather of {len(values)} x {entry}")

    def entries(
        self, what: str, entry: int, count: int, span: int, base: float, *, order: Any = "auto", align: int = 16
    ) -> float:
        put = what == "scatter"
        sets = self.offsets(count, entry, span, align, distinct=put)
        count = sets[0][0].length
        where = Range(self.dram, span)

        def gather(number: int) -> None:
            self.gatherer.gather(where, sets[number % SETS][0], entry, self.hbm[0], device=0, order=order).wait()

        def scatter(number: int) -> None:
            self.gatherer.scatter(where, sets[number % SETS][0], entry, self.hbm[0], device=0, order=order).wait()

        gather(0)
        self.check(sets[0][1], entry)
        # a scatter writes what was gathered from there: the DRAM keeps its pattern
        times = self.seconds((lambda number: scatter(0)) if put else gather)
        if put:
            gather(0)
            self.check(sets[0][1], entry)
        name = f"{what}, {entry} B x {count}, over {span // MIB} MiB, order {order}"
        rate = self.row(name, count * entry, times, base)
        self.drop(sets)
        return rate

    def against_batch(self, rate: float, count: int = 8192) -> None:
        """The same 4 KiB blocks by one batch of the driver's, and by the copier's kernel."""
        blocks = self.random.permutation(self.pool_bytes // (4 * KIB))[:count]
        fragments = [(self.hbm[0] + 4096 * n, self.dram + 4096 * int(at), 4096) for n, at in enumerate(blocks)]
        destinations, sources, sizes = (list(each) for each in zip(*fragments, strict=True))
        stream = self.streams[0][0]

        def batch(number: int) -> None:
            self.driver.use_device(0)
            self.driver.memcpy_batch_async(destinations, sources, sizes, stream)
            self.driver.stream_synchronize(stream)

        one = self.row(f"one cuMemcpyBatchAsync of {count} x 4 KiB", count * 4096, self.seconds(batch))
        print(f"gather of 4 KiB is {rate / one:.1f} times that batch", file=sys.stderr)
        self.rows.append({"name": "gather of 4 KiB over one batch of the same size", "times": round(rate / one, 1)})
        times = self.seconds(self.copies([(0, fragments)], strategy="kernel"))
        self.row(f"kernel, {count} x 4 KiB fragments from a Python list", count * 4096, times)
        table: Any = np.array(fragments, dtype=np.uint64)
        times = self.seconds(self.copies([(0, table)], strategy="kernel"))
        self.row(f"kernel, {count} x 4 KiB fragments from a NumPy array", count * 4096, times)

    def top_k(self, count: int = 2048, entry: int = 656) -> None:
        for span in (512 * MIB, min(4 * GIB, self.pool_bytes)):
            sets = self.offsets(count, entry, span)
            where = Range(self.dram, span)

            def run(number: int, sets: list[Any] = sets, where: Range = where) -> None:
                self.gatherer.gather(where, sets[number % SETS][0], entry, self.hbm[0], device=0).wait()

            times = sorted(t * 1e6 for t in self.seconds(run, 1000, 50))
            p50, p99 = round(times[500], 1), round(times[990], 1)
            nbytes = count * entry
            self.row(f"top-{count} of {entry} B over {span // MIB} MiB", nbytes, [p50 / 1e6], p50_us=p50, p99_us=p99)
            self.drop(sets)

    def small(self) -> None:
        for size in (4 * KIB, 64 * KIB, MIB):
            fragments = [(self.hbm[0], self.dram, size)]
            times = sorted(t * 1e6 for t in self.seconds(self.copies([(0, fragments)]), 500, 50))
            more = {"p50_us": round(times[250], 1), "p99_us": round(times[495], 1)}
            self.row(f"one copy of {size // KIB} KiB", size, [times[250] / 1e6], **more)
            times = sorted(t * 1e6 for t in self.seconds(self.raw([(0, self.hbm[0], self.dram, size)]), 500, 50))
            more = {"p50_us": round(times[250], 1), "p99_us": round(times[495], 1)}
            self.row(f"raw copy of {size // KIB} KiB", size, [times[250] / 1e6], **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool-gib", type=int, default=8)
    parser.add_argument("--json", help="write the rows here")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        bench = Bench(stack, arguments.pool_gib * GIB)
        raw = bench.large()
        calibration = bench.copier.calibrate()
        print(f"kernel below: {calibration}", file=sys.stderr)
        four = bench.entries("gather", 4096, 131072, bench.pool_bytes, raw["get"], align=4096)
        bench.against_batch(four)
        span = min(4 * GIB, bench.pool_bytes)
        for what, base in (("gather", raw["get"]), ("scatter", raw["put"])):
            if what == "scatter":
                bench.entries(what, 4096, 131072, bench.pool_bytes, base)
            for entry in (656, 576):
                bench.entries(what, entry, 786432, 512 * MIB, base)
                bench.entries(what, entry, MIB, span, base)
            bench.entries(what, 656, MIB, span, base, order="never")
        bench.top_k()
        bench.small()
        driver = bench.driver
        document = {
            "schema": "egmctl/benchmark-copy/1",
            "environment": {
                "gpus": [driver.device_name(device) for device in bench.devices],
                "driver": driver.version(),
                "pool_bytes": bench.pool_bytes,
                "calibration": calibration._asdict(),
            },
            "results": bench.rows,
        }
        text = json.dumps(document, indent=1)
        if arguments.json:
            with open(arguments.json, "w") as file:
                file.write(text + "\n")
        else:
            print(text)


if __name__ == "__main__":
    main()
