"""The driver calls that a `cuda-posix` pool of one node makes, in a bare loop: what provisioning is measured against.

``python -m tests.gpu.bare BYTES CHUNK``: prints seconds of setting up and of releasing, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time

__all__ = ["main"]


def main() -> None:
    from egmctl import seams
    from egmctl.memory.driver import AllocationProp, HandleType, Location, get_driver

    seams.load()
    total, size = int(sys.argv[1]), int(sys.argv[2])
    driver = get_driver()
    access = [Location("device", device) for device in range(driver.device_count())] + [Location("host_numa", 0)]
    prop = AllocationProp(Location("host_numa", 0), HandleType.POSIX_FD)
    driver.granularity(prop)
    made: list[tuple[int, int, int]] = []
    began = time.perf_counter()
    base = driver.address_reserve(total, 16 << 20)
    for address in range(base, base + total, size):
        handle = driver.mem_create(size, prop)
        driver.mem_map(address, size, 0, handle)
        driver.set_access(address, size, access)
        made.append((handle, address, driver.export_fd(handle)))
    middle = time.perf_counter()
    for handle, address, fd in made:
        os.close(fd)
        driver.mem_unmap(address, size)
        driver.mem_release(handle)
    driver.address_free(base, total)
    print(json.dumps({"setup_s": middle - began, "release_s": time.perf_counter() - middle}), flush=True)


if __name__ == "__main__":
    main()
