"""Parts 3 and 4: many small entries of large objects, and one small object."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from egmctl.consumer.copy import DeviceArray
from tests.benchmarks.store.here import Here, device_address, percentiles
from tests.benchmarks.store.world import KIB, MIB, World, on_a_cpu_of_its_own

__all__ = ["entries", "one_small"]

SETS = 4


def entries(world: World) -> None:
    """Gathers and scatters through the store, offsets on the GPU, another set of them each time."""
    with Here(world, 3, world.scale.far) as here, on_a_cpu_of_its_own(world):
        rates = here.raw_rates()
        scale = here.scale
        here.fill(here.hbm[0], scale.far, seed=3)
        here.store.put_from("far", here.hbm[0], scale.far)
        here.store.put_from("near", here.hbm[0], scale.near)
        work = _Entries(here, rates)
        work.gather("far", scale.far, 4 * KIB, 0.88, aligned=4 * KIB)
        work.against_batch()
        work.gather("near", scale.near, 656, 0.80)
        work.gather("far", scale.far, 656, 0.80)
        work.top_k("near", scale.near)
        work.top_k("far", scale.far)
        here.remove(["far", "near"])
        work.scatter(scale.far, 4 * KIB, 0.88)
        work.scatter(scale.near, 656, 0.80)
        work.scatter(scale.far, 656, 0.80)


class _Entries:
    def __init__(self, here: Here, rates: dict[str, float]) -> None:
        self.here = here
        self.rates = rates
        self.random = np.random.default_rng(3)

    def on_gpu(self, values: np.ndarray[Any, Any]) -> DeviceArray:
        here = self.here
        here.driver.use_device(0)
        address = here.driver.mem_alloc(8 * len(values))
        here.driver.memcpy(address, values.ctypes.data, 8 * len(values))
        return DeviceArray(address, len(values), 8)

    def sets(self, count: int, entry: int, span: int, aligned: int) -> list[tuple[DeviceArray, np.ndarray[Any, Any]]]:
        found = []
        for _ in range(SETS):
            values = self.random.integers(0, (span - entry) // aligned + 1, count, dtype=np.int64) * aligned
            found.append((self.on_gpu(values), values))
        return found

    def drop(self, sets: list[tuple[DeviceArray, np.ndarray[Any, Any]]]) -> None:
        for each, _ in sets:
            self.here.driver.use_device(0)
            self.here.driver.mem_free(each.address)

    def gather(self, key: str, span: int, entry: int, target: float, aligned: int = 16) -> None:
        here = self.here
        count = here.scale.gathered // entry
        sets = self.sets(count, entry, span, aligned)
        store, hbm = here.store, here.hbm[0]

        def whole(number: int) -> None:
            store.gather_into(key, sets[number % SETS][0], entry, hbm)

        whole(0)
        here.check_entries(hbm, sets[0][1], entry, seed=3)
        what = f"gather, {entry} B x {count} at random over {span // MIB} MiB"
        self.here.row(f"{what}, Master calls included", count * entry, here.seconds(whole), self.rates["get"])
        with store.session([key]) as session:
            times = here.seconds(lambda number: session.gather(sets[number % SETS][0], entry, hbm))
        here.row(f"{what}, session", count * entry, times, self.rates["get"], target)
        self.drop(sets)

    def against_batch(self) -> None:
        """The very same blocks by one batch of the driver's, its arrays made beforehand."""
        here, block = self.here, 4 * KIB
        count = here.scale.gathered // block
        with here.store.session(["far"]) as session:
            start = device_address(session, "far")
            blocks = self.random.permutation(here.scale.far // block)[:count].astype(np.int64)
            destinations = array("Q", range(here.hbm[0], here.hbm[0] + count * block, block))
            sources = array("Q", (start + block * blocks).tolist())
            sizes = array("Q", [block]) * count
            stream = here._streams[0][0]

            def batch(number: int) -> None:
                here.driver.use_device(0)
                here.driver.memcpy_batch_async(destinations, sources, sizes, stream)
                here.driver.stream_synchronize(stream)

            name = f"one cuMemcpyBatchAsync of {count} x 4 KiB"
            one = here.row(name, count * block, here.seconds(batch, 5, 1), self.rates["get"])
            here.check_entries(here.hbm[0], blocks * block, block, seed=3)
            offsets = self.on_gpu(blocks * block)
            times = here.seconds(lambda _: session.gather(offsets, block, here.hbm[0]))
            same = here.row(f"gather of the same {count} x 4 KiB, session", count * block, times, self.rates["get"])
            here.driver.use_device(0)
            here.driver.mem_free(offsets.address)
        here.rows.add("gather of the same blocks over one cuMemcpyBatchAsync, times", ratio=same / one, target=20.0)

    def top_k(self, key: str, span: int) -> None:
        here, count, entry = self.here, self.here.scale.top_k, 656
        sets = self.sets(count, entry, span, 16)
        store, hbm = here.store, here.hbm[0]
        with store.session([key]) as session:
            times = here.seconds(lambda n: session.gather(sets[n % SETS][0], entry, hbm), here.scale.small, 50)
        name = f"top-{count} of {entry} B over {span // MIB} MiB"
        here.rows.add(f"{name}, session", **percentiles(times))
        times = here.seconds(lambda n: store.gather_into(key, sets[n % SETS][0], entry, hbm), here.scale.small // 4, 50)
        here.rows.add(f"{name}, Master calls included", **percentiles(times))
        self.drop(sets)

    def scatter(self, span: int, entry: int, target: float) -> None:
        """Every entry of an object, in random order, from the HBM where they lie side by side."""
        here = self.here
        count = span // entry
        order = self.random.permutation(count).astype(np.int64) * entry
        offsets = self.on_gpu(order)
        here.fill(here.hbm[0], count * entry // 8 * 8, seed=4)
        times = []
        for turn in range(2 * here.scale.repeats + 2):
            key = f"scatter-{entry}-{turn}"

            def put(_: int, key: str = key) -> None:
                here.store.scatter_from(key, count * entry, offsets, entry, here.hbm[0], covers=True)

            times += here.seconds(put, 1, 0)
            if turn == 0:
                self.check_scatter(key, order, entry, count)
            here.remove([key])
        name = f"scatter, {entry} B x {count} in random order into {span // MIB} MiB, Master calls included"
        here.row(name, count * entry, times[1:], self.rates["put"], target)
        here.driver.use_device(0)
        here.driver.mem_free(offsets.address)

    def check_scatter(self, key: str, order: np.ndarray[Any, Any], entry: int, count: int) -> None:
        here = self.here
        numbers = np.arange(0, count, max(1, count // 500))
        here.driver.use_device(0)
        spare = here.driver.mem_alloc(len(numbers) * entry)
        here.store.register_buffer(spare, len(numbers) * entry)
        here.store.gather_into(key, [int(at) for at in order[numbers]], entry, spare)
        # what went to the place of each was the entry at its number in the source
        here.check_entries(spare, numbers * entry, entry, seed=4)
        here.store.unregister_buffer(spare)
        here.driver.use_device(0)
        here.driver.mem_free(spare)


def one_small(world: World) -> None:
    """One object of 4 KiB: with the call to the Master, in a session, and what the call and the copy take alone."""
    with Here(world, 4, MIB) as here, on_a_cpu_of_its_own(world):
        size, count = 4 * KIB, here.scale.small
        here.fill(here.hbm[0], size, seed=5)
        here.store.put_from("small", here.hbm[0], size)
        hbm, store, master = here.hbm[0], here.store, here.master
        here.clear(hbm, size)
        store.get_into("small", hbm, size)
        here.check(hbm, size, seed=5)
        times = here.seconds(lambda _: store.get_into("small", hbm, size), count, 100)
        here.rows.add("get of 4 KiB, Master calls included", **percentiles(times))
        with store.session(["small"]) as session:
            place = device_address(session, "small")
            times = here.seconds(lambda _: session.read_into("small", 0, hbm, size), count, 100)
            here.rows.add("get of 4 KiB, session", **percentiles(times))
            times = here.seconds(here.raw([(0, hbm, place, size)]), count, 100)
            here.rows.add("raw copy of 4 KiB and its wait", **percentiles(times))
        times = here.seconds(lambda _: master.get_replica_list("small"), count, 100)
        here.rows.add("the bare RPC, GetReplicaList", **percentiles(times))
        times = here.seconds(lambda _: master.exist_key("small"), count, 100)
        here.rows.add("the bare RPC, ExistKey", **percentiles(times))
        times = []
        for number in range(count // 4):
            times += here.seconds(lambda _, n=number: store.put_from(f"small-{n}", hbm, size), 1, 0)
        here.rows.add("put of 4 KiB, Master calls included", **percentiles(times))
        here.remove(["small", *(f"small-{number}" for number in range(count // 4))])
