"""Rates of creating memory against a bare loop of the same calls: ``python -m tests.memory.measure [GIB [--no-shm]]``.

Each pair is run in turn, twice, after a first round that is left out. Prints one JSON line a figure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from egmctl.memory import Chunk, ChunkSpec, linux, provider_memory
from egmctl.memory.driver import AllocationProp, CudaError, Driver, HandleType, Location, get_driver

GIB = 1 << 30


def say(what: str, **figures: object) -> None:
    print(json.dumps({"what": what, **figures}), flush=True)


def timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def ratio(what: str, ours: Callable[[], float], bare: Callable[[], float], gib: int) -> None:
    ours(), bare()
    pairs = [(ours(), bare()) for _ in range(3)]
    best_ours, best_bare = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
    say(what, gib=gib, ours_gib_s=round(gib / best_ours, 2), bare_gib_s=round(gib / best_bare, 2))
    say(f"{what}: ratio", ratio=round(best_bare / best_ours, 3), all=[[round(x, 3) for x in pair] for pair in pairs])


def shm_ours(gib: int) -> float:
    memory = provider_memory("shm", total_bytes=gib * GIB)
    chunks: list[Chunk] = []
    took = timed(lambda: chunks.extend(memory.create(ChunkSpec(k, 0, GIB), lambda _: None) for k in range(gib)))
    for chunk in chunks:
        memory.release(chunk)
    memory.close()
    return took


def shm_bare(gib: int) -> float:
    made: list[tuple[int, int]] = []

    def loop() -> None:
        for _ in range(gib):
            fd = linux.memfd("bare", GIB)
            address = linux.map_file(fd, GIB)
            linux.populate(address, GIB, fd, 0)
            made.append((fd, address))

    took = timed(loop)
    for fd, address in made:
        linux.unmap(address, GIB)
        os.close(fd)
    return took


def posix_ours(gib: int) -> float:
    memory = provider_memory("cuda-posix", total_bytes=gib * GIB)
    chunks: list[Chunk] = []
    took = timed(lambda: chunks.extend(memory.create(ChunkSpec(k, 0, GIB), lambda _: None) for k in range(gib)))

    def release_all() -> None:
        for chunk in chunks:
            memory.release(chunk)

    release = timed(release_all)
    memory.close()
    say("cuda-posix release", seconds_per_gib=round(release / gib, 4))
    return took


def posix_bare(gib: int) -> float:
    driver = get_driver()
    access = [Location("device", k) for k in range(driver.device_count())] + [Location("host_numa", 0)]
    prop = AllocationProp(Location("host_numa", 0), HandleType.POSIX_FD)
    made: list[tuple[int, int, int]] = []

    def loop() -> None:
        for _ in range(gib):
            handle = driver.mem_create(GIB, prop)
            address = driver.address_reserve(GIB, 16 << 20)
            driver.mem_map(address, GIB, 0, handle)
            driver.set_access(address, GIB, access)
            made.append((handle, address, driver.export_fd(handle)))

    took = timed(loop)
    for handle, address, fd in made:
        os.close(fd)
        driver.mem_unmap(address, GIB)
        driver.mem_release(handle)
        driver.address_free(address, GIB)
    return took


def longest_pause(act: Callable[[], object]) -> float:
    """Seconds that another thread of this process stood still while ``act`` ran."""
    gaps, stop = [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        act()
    finally:
        stop.set()
        thread.join()
    return max(gaps)


def gpu_memory_used() -> str:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.strip()


def batch(driver: Driver) -> None:
    count, size = 2048, 4096
    driver.use_device(0)
    hbm, host, stream = driver.mem_alloc(count * size), driver.host_alloc(count * size), driver.stream_create()
    ours = [hbm + k * size for k in range(count)], [host + k * size for k in range(count)], [size] * count
    for _ in range(3):
        driver.memcpy_batch_async(*ours, stream)
        driver.stream_synchronize(stream)
    call = min(timed(lambda: driver.memcpy_batch_async(*ours, stream)) for _ in range(20))
    driver.stream_synchronize(stream)

    def batch_and_wait() -> None:
        driver.memcpy_batch_async(*ours, stream)
        driver.stream_synchronize(stream)

    def copy_and_wait() -> None:
        driver.memcpy_async(hbm, host, size, stream)
        driver.stream_synchronize(stream)

    whole = min(timed(batch_and_wait) for _ in range(20))
    say("batch of 2048 x 4 KiB", call_us=round(call * 1e6), with_wait_us=round(whole * 1e6))
    one = min(timed(copy_and_wait) for _ in range(200))
    say("one copy of 4 KiB, with wait", us=round(one * 1e6, 1))
    driver.stream_destroy(stream)
    driver.mem_free(hbm)
    driver.host_free(host)


def main() -> int:
    gib = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    if "--no-shm" not in sys.argv:
        ratio("shm populate", lambda: shm_ours(gib), lambda: shm_bare(gib), gib)
    try:
        driver = get_driver()
    except CudaError as error:
        say("no CUDA driver", error=error.message)
        return 0
    say("GPU memory used before", mib=gpu_memory_used())
    memory = provider_memory("cuda-posix", total_bytes=4 * GIB)
    chunk = None

    def create() -> None:
        nonlocal chunk
        chunk = memory.create(ChunkSpec(0, 0, 4 * GIB), lambda _: None)

    say("pause of another thread while 4 GiB are created", seconds=round(longest_pause(create), 4))
    say("GPU memory used by an agent with a chunk", mib=gpu_memory_used())
    if chunk is not None:
        memory.release(chunk)
    memory.close()
    ratio("cuda-posix create", lambda: posix_ours(gib), lambda: posix_bare(gib), gib)
    batch(driver)
    say("GPU memory used with a context", mib=gpu_memory_used())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
