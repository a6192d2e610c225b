"""Part 7: puts and gets of mixed sizes from threads and from processes, all compared, and what has grown by it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from egmctl.consumer import EgmStore
from egmctl.errors import EgmError
from egmctl.memory.driver import Driver
from tests.benchmarks.store.here import Here
from tests.benchmarks.store.world import KIB, World

__all__ = ["soak", "soak_process"]

THREADS, PROCESSES = 8, 4
BATCH = 16
WARM = 0.15  # of the operations are done before the first look at what grows
SLACK = 48 << 20  # bytes of resident memory that are no growth


@dataclass(frozen=True)
class Footprint:
    """What a process has, as far as it could grow."""

    resident: int
    descriptors: int
    mappings: int  # lines of its map
    imports: int  # chunks mapped by the store
    threads: int

    @classmethod
    def of_this_process(cls, store: EgmStore) -> Footprint:
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        with open("/proc/self/maps") as maps:
            lines = sum(1 for _ in maps)
        files = len(os.listdir("/proc/self/fd")) - 1
        # A stream of the model is a thread; how many there are depends on how many copies ever met.
        threads = sum(not each.name.startswith("model-") for each in threading.enumerate())
        return cls(resident, files, lines, store._engine.mappings.count, threads)


class _Work:
    """What one thread does: each turn one object, or a batch of them, is put and got again into other memory."""

    def __init__(self, driver: Driver, store: EgmStore, hbm: int, source: np.ndarray[Any, Any], name: str) -> None:
        self.driver = driver
        self.store = store
        self.source_at = hbm
        self.source = source
        self.largest = source.nbytes // 2
        self.target = hbm + source.nbytes
        self.name = name
        self.random = random.Random(name)
        self.turn = 0
        self.done = 0
        self.staged = np.empty(self.largest, dtype=np.uint8)

    def run(self, operations: int) -> None:
        """So many puts and gets. Raises `SystemExit` for wrong bytes."""
        until = self.done + operations
        while self.done < until:
            count = BATCH if self.random.random() < 0.2 else 1
            keys = [f"{self.name}-{self.turn}-{number}" for number in range(count)]
            self.turn += 1
            room = self.largest // count
            sizes = [max(1, int(room ** self.random.random())) for _ in keys]
            froms = [self.random.randrange(self.source.nbytes - size) for size in sizes]
            places, at = [], 0
            for size in sizes:
                places.append(at)
                at += size
            targets = [self.target + place for place in places]
            if count == 1:
                self.store.put_from(keys[0], self.source_at + froms[0], sizes[0])
                got: list[Any] = [self.store.get_into(keys[0], targets[0], sizes[0])]
            else:
                put = self.store.batch_put_from(keys, [self.source_at + begin for begin in froms], sizes)
                if put != sizes:
                    raise SystemExit(f"a put failed: {[each for each in put if isinstance(each, EgmError)][:2]}")
                got = list(self.store.batch_get_into(keys, targets, sizes))
            if got != sizes:
                raise SystemExit(f"a get failed: {[each for each in got if isinstance(each, EgmError)][:2]}")
            self.driver.use_device(0)
            self.driver.memcpy(self.staged.ctypes.data, self.target, at)
            for place, begin, size in zip(places, froms, sizes, strict=True):
                if not np.array_equal(self.staged[place : place + size], self.source[begin : begin + size]):
                    raise SystemExit(f"WRONG BYTES: {size} of {self.name}-{self.turn}")
            self.done += 2 * count


def _share(here: Here, threads: int, operations: int, names: str, together: Any) -> dict[str, Any]:
    """Let ``threads`` threads work, look at what there is after the first part and at the end."""
    largest = here.scale.soak_largest
    source = np.random.default_rng(7).integers(0, 256, 2 * largest, dtype=np.uint8)
    space = 3 * largest
    works = []
    for number in range(threads):
        at = here.hbm[0] + number * space
        here.write(at, source.tobytes())
        works.append(_Work(here.driver, here.store, at, source, f"{names}-{number}"))
    errors: list[BaseException] = []

    def go(work: _Work, count: int) -> None:
        try:
            work.run(count)
        except BaseException as error:
            errors.append(error)

    def everybody(count: int) -> None:
        group = [threading.Thread(target=go, args=(work, -(-count // threads))) for work in works]
        for thread in group:
            thread.start()
        for thread in group:
            thread.join()
        if errors:
            raise errors[0]

    together()
    began = time.monotonic()
    everybody(int(operations * WARM))
    before = Footprint.of_this_process(here.store)
    free = here.driver.memory_info(0)[0]
    everybody(operations - int(operations * WARM))
    after = Footprint.of_this_process(here.store)
    return {
        "operations": sum(work.done for work in works),
        "seconds": round(time.monotonic() - began, 1),
        "before": vars(before),
        "after": vars(after),
        "hbm_free_before": free,
        "hbm_free_after": here.driver.memory_info(0)[0],
    }


def soak(world: World) -> None:
    """Half of the operations by threads of one process, half by processes."""
    scale = world.scale
    with Here(world, 7, 3 * THREADS * scale.soak_largest) as here:
        _judge(here, f"{THREADS} threads", [_share(here, THREADS, scale.soak // 2, f"t{os.getpid()}", lambda: None)])
        children = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.benchmarks.consumer_h200",
                    "--soak",
                    str(number),
                    "--world",
                    world.to_json(),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(PROCESSES)
        ]
        found: list[dict[str, Any]] = []
        try:
            for child in children:
                assert child.stdout is not None
                if child.stdout.readline().strip() != "ready":
                    raise SystemExit("a process did not start")
            for child in children:
                assert child.stdin is not None
                child.stdin.write("go\n")
                child.stdin.flush()
            for child in children:
                out, _ = child.communicate(timeout=120)
                if child.returncode != 0:
                    raise SystemExit(f"a process ended with {child.returncode}")
                found.append(json.loads(out.splitlines()[-1]))
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                    child.wait()
        _judge(here, f"{PROCESSES} processes", found)


def soak_process(world: World, number: int) -> None:
    """One of the processes: says when it is ready, starts when told, tells what it found."""
    with Here(world, 7, 3 * world.scale.soak_largest) as here:

        def together() -> None:
            print("ready", flush=True)
            sys.stdin.readline()

        operations = world.scale.soak // 2 // PROCESSES
        print(json.dumps(_share(here, 1, operations, f"p{os.getpid()}", together)), flush=True)


def _judge(here: Here, who: str, found: list[dict[str, Any]]) -> None:
    grown = {
        name: max(each["after"][name] - each["before"][name] for each in found)
        for name in ("resident", "descriptors", "mappings", "imports", "threads")
    }
    # the memory of the GPU is shared by all that work at the time
    lost = min(each["hbm_free_before"] - each["hbm_free_after"] for each in found)
    grown_a_lot = grown["resident"] > SLACK or any(grown[name] > 0 for name in ("descriptors", "imports", "threads"))
    operations = sum(each["operations"] for each in found)
    seconds = max(each["seconds"] for each in found)
    here.rows.add(
        f"{operations} puts and gets of 1 B to {here.scale.soak_largest // KIB} KiB from {who}, all equal",
        good=not grown_a_lot and grown["mappings"] <= 16 and lost <= 64 << 20,
        seconds=seconds,
        a_second=round(operations / seconds),
        grown=grown,
        hbm_lost=lost,
        before=found[0]["before"],
        after=found[0]["after"],
    )
