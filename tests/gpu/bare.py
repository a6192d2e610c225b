"""The driver calls that a `cuda-posix` pool of one node makes, in a bare loop: what provisioning is measured against.

``python -m tests.gpu.bare BYTES CHUNK``: prints seconds of setting up and of releasing, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress

__all__ = ["main"]


def main() -> None:
    from egmctl import seams
    from egmctl.memory.driver import AllocationProp, CudaError, HandleType, Location, get_driver

    seams.load()
    total, size = int(sys.argv[1]), int(sys.argv[2])
    driver = get_driver()
    access = [Location("device", device) for device in range(driver.device_count())] + [Location("host_numa", 0)]
    prop = AllocationProp(Location("host_numa", 0), HandleType.POSIX_FD)
    driver.granularity(prop)
    made: list[tuple[int, int, int]] = []
    creating = granting = 0.0
    flagged = AllocationProp(Location("host_numa", 0), HandleType.POSIX_FD, gpu_direct_rdma=True)
    first = time.perf_counter()
    with suppress(CudaError):
        driver.mem_release(driver.mem_create(size, flagged))
    refusing = time.perf_counter() - first
    began = time.perf_counter()
    base = driver.address_reserve(total, 16 << 20)
    for address in range(base, base + total, size):
        first = time.perf_counter()
        handle = driver.mem_create(size, prop)
        second = time.perf_counter()
        driver.mem_map(address, size, 0, handle)
        third = time.perf_counter()
        driver.set_access(address, size, access)
        creating, granting = creating + second - first, granting + time.perf_counter() - third
        made.append((handle, address, driver.export_fd(handle)))
    middle = time.perf_counter()
    for handle, address, fd in made:
        os.close(fd)
        driver.mem_unmap(address, size)
        driver.mem_release(handle)
    driver.address_free(base, total)
    ended = time.perf_counter()
    told = {"setup_s": middle - began, "create_s": creating, "access_s": granting, "release_s": ended - middle}
    told["with_rdma_flag_s"] = refusing
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
