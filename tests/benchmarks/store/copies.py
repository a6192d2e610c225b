"""Parts 1 and 2: large objects, and a batch of middling ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tests.benchmarks.store.here import Here, at_once, device_address, in_flight, percentiles
from tests.benchmarks.store.world import KIB, MIB, World, on_a_cpu_of_its_own

__all__ = ["batches", "large"]


def large(world: World) -> None:
    """Objects of 64 MiB and more: copies alone, with the Master's calls eight at a time, and one after the other."""
    with Here(world, 1) as here:
        rates = here.raw_rates(both=True)
        for device in here.devices:
            here.fill(here.hbm[device], here.hbm_bytes, seed=1 + device, device=device)
        for size, count in here.scale.large:
            _Large(here, rates, size, count).measure()


class _Large:
    def __init__(self, here: Here, rates: dict[str, float], size: int, count: int) -> None:
        self.here = here
        self.rates = rates
        self.size = size
        self.count = count
        self.what = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"

    def keys(self, name: str) -> list[str]:
        return [f"{name}-{self.size}-{number}" for number in range(self.count)]

    def at(self, number: int, device: int = 0) -> int:
        return self.here.hbm[device] + number * self.size

    def put(self, keys: list[str], device: int = 0, width: int = 8) -> None:
        store, size = self.here.store, self.size
        in_flight(lambda n: store.put_from_async(keys[n], self.at(n, device), size), self.count, width)

    def get(self, keys: list[str], device: int = 0, width: int = 8) -> None:
        store, size = self.here.store, self.size
        in_flight(lambda n: store.get_into_async(keys[n], self.at(n, device), size), self.count, width)

    def measure(self) -> None:
        here, total = self.here, self.size * self.count
        kept = self.keys("kept")
        self.put(kept)
        here.clear(here.hbm[0], total)
        self.get(kept)
        here.check(here.hbm[0], total, seed=1)
        with ExitStack() as stack:
            session = stack.enter_context(here.store.session(kept))
            places = [device_address(session, key) for key in kept]
            self.alone(places)
            reads = [(key, 0, self.at(number), self.size) for number, key in enumerate(kept)]
            times = here.seconds(lambda _: session.batch_read_into(reads))
            here.row(f"get, {self.what}, session, all of them in one call", total, times, self.rates["get"], 0.97)
            times = here.seconds(lambda _: self.read_all(session, kept), 3, 1)
            here.row(f"get, {self.what}, session, one after the other", total, times, self.rates["get"])
        self.with_master(kept)
        self.crowded(kept)
        here.remove(kept)

    def read_all(self, session: object, keys: list[str]) -> None:
        for number, key in enumerate(keys):
            session.read_into(key, 0, self.at(number), self.size)  # type: ignore[attr-defined]

    def alone(self, places: list[int]) -> None:
        """What lies at known places, by the store's own copier: eight copies under way, as with the Master's calls."""
        here, size = self.here, self.size
        copier = here.store._engine.device_copier
        assert copier is not None

        def copies(way: str, device: int = 0, some: range = range(self.count)) -> None:
            def start(index: int) -> _Copy:
                number = some[index]
                there, here_ = places[number], self.at(number, device)
                fragment = (here_, there, size) if way == "get" else (there, here_, size)
                return _Copy(copier.copy([fragment], device=device))

            in_flight(start, len(some))

        for way in ("get", "put"):
            name = f"{way}, {self.what}, copies alone"
            times = here.seconds(lambda _, way=way: copies(way))
            here.row(name, size * self.count, times, self.rates[way], 0.97)
        first, second = range(self.count // 2), range(self.count // 2, self.count)
        if len(second) == len(first):
            # What the driver does both ways drifts by some per cent within seconds: the two are measured in turns.
            raw, times = here.in_turns(
                here.raw_both(), lambda _: at_once(lambda: copies("get", 0, first), lambda: copies("put", 0, second))
            )
            both = here.rate(2 * here.scale.raw, raw)
            name = f"both ways at once, {self.what}, copies alone"
            here.row(name, size * self.count, times, both, 0.97, raw_gbps=round(both, 2))
        for way in ("get", "put"):
            if f"{way} on two" not in self.rates:
                name = f"{way}, {self.what}, two GPUs at once"
                here.rows.add(name, waived="this machine has one GPU")
                continue
            runs = [
                lambda way=way, d=d, s=s: copies(way, d, s) for d, s in zip(here.devices, (first, second), strict=True)
            ]

            def both_at_once(_: int, runs: Sequence[Callable[[], None]] = runs) -> None:
                at_once(*runs)

            raw, times = here.in_turns(here.raw_two(way), both_at_once)
            base = here.rate(2 * here.scale.raw, raw)
            name = f"{way}, {self.what}, two GPUs at once, copies alone"
            here.row(name, size * (len(first) + len(second)), times, base, 0.97, raw_gbps=round(base, 2))

    def with_master(self, kept: list[str]) -> None:
        here, total = self.here, self.size * self.count
        times = here.seconds(lambda _: self.get(kept))
        here.row(f"get, {self.what}, eight in flight", total, times, self.rates["get"], 0.95)
        here.check(here.hbm[0], total, seed=1)
        here.row(f"put, {self.what}, eight in flight", total, self.puts(self.put), self.rates["put"], 0.95)
        times = here.seconds(lambda _: self.get(kept, width=1), 3, 1)
        here.row(f"get, {self.what}, one after the other", total, times, self.rates["get"])
        times = self.puts(lambda keys: self.put(keys, width=1), 3)
        here.row(f"put, {self.what}, one after the other", total, times, self.rates["put"])

    def puts(self, put: Callable[[list[str]], None], repeats: int | None = None) -> list[float]:
        """Seconds of puts of new keys, the removals not among them."""
        here = self.here
        times = []
        for _ in range((repeats or here.scale.repeats) + 1):
            keys = self.keys("put")
            times += here.seconds(lambda _, keys=keys: put(keys), 1, 0)
            here.remove(keys)
        return times[1:]

    def crowded(self, kept: list[str]) -> None:
        """Both ways at once and two GPUs at once, with the Master's calls."""
        here, size = self.here, self.size
        half = self.count // 2
        store = here.store

        def get(device: int, numbers: range) -> None:
            in_flight(lambda n: store.get_into_async(kept[numbers[n]], self.at(numbers[n], device), size), len(numbers))

        def put(keys: list[str], device: int, numbers: range) -> None:
            in_flight(lambda n: store.put_from_async(keys[numbers[n]], self.at(numbers[n], device), size), len(numbers))

        first, second = range(half), range(half, 2 * half)
        times = self.puts(lambda keys: at_once(lambda: get(0, first), lambda: put(keys, 0, second)))
        here.row(f"both ways at once, {self.what}, eight in flight each", 2 * half * size, times, self.rates["both"])
        if "get on two" not in self.rates:
            return
        times = here.seconds(lambda _: at_once(lambda: get(0, first), lambda: get(1, second)))
        here.row(
            f"get, {self.what}, two GPUs at once, eight in flight each",
            2 * half * size,
            times,
            self.rates["get on two"],
        )
        times = self.puts(lambda keys: at_once(lambda: put(keys, 0, first), lambda: put(keys, 1, second)))
        here.row(
            f"put, {self.what}, two GPUs at once, eight in flight each",
            2 * half * size,
            times,
            self.rates["put on two"],
        )
        for device in here.devices:  # what was got over the patterns
            here.fill(here.hbm[device], size * self.count, seed=1 + device, device=device)


class _Copy:
    def __init__(self, completion: object) -> None:
        self.result = completion.wait  # type: ignore[attr-defined]


def _spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    shares = {"best": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9}
    return {f"{name}_ms": round(ordered[int(len(ordered) * share)] * 1e3, 2) for name, share in shares.items()}


def batches(world: World) -> None:
    """Many objects of 1 MiB in one call, from the call to its return."""
    with Here(world, 2) as here, on_a_cpu_of_its_own(world) as choose_cpus:
        rates = here.raw_rates()
        count, size = here.scale.batch
        total = count * size
        here.fill(here.hbm[0], total, seed=2)
        addresses = [here.hbm[0] + number * size for number in range(count)]
        sizes = [size] * count
        kept = [f"batch-{number}" for number in range(count)]
        assert here.store.batch_put_from(kept, addresses, sizes) == sizes
        here.clear(here.hbm[0], total)
        assert here.store.batch_get_into(kept, addresses, sizes) == sizes
        here.check(here.hbm[0], total, seed=2)
        name = f"{count} objects of {size // KIB} KiB in a batch, Master calls included"

        def compared(way: str, run: Callable[[list[str]], object]) -> None:
            # The driver's own rate drifts within seconds: it is measured in turns with batches. These follow each
            # other; the first two after a raw copy, during which the Master slept, have a row of their own. What was
            # put is removed between turns: a Master that has just removed 256 objects is slow to reserve others.
            raw = here.raw_one(way)
            bare: list[float] = []
            rested: list[float] = []
            loops: list[float] = []
            times: list[float] = []
            for turn in range(13):
                choose_cpus()
                bare += here.seconds(raw, 2, 1)
                loops += here.seconds(lambda _: sum(number * number for number in range(10_000)), 1, 0)
                some = []
                batches = [kept] * 7
                if way == "put":
                    batches = [[f"batch-{turn}-{again}-{number}" for number in range(count)] for again in range(7)]
                for keys in batches:
                    some += here.seconds(lambda _, keys=keys: run(keys), 1, 0)
                if way == "put":
                    here.remove([key for keys in batches for key in keys])
                if turn >= 3:
                    rested += some[:2]
                    times += some[2:]
            base = here.rate(here.scale.raw, bare[6:])
            here.row(f"{way}, {name}", total, times, base, 0.85, raw_gbps=round(base, 2), **_spread(times))
            here.rows.add("10,000 turns of a loop in Python, meanwhile", **percentiles(loops))
            here.row(f"{way}, the same, after a pause", total, rested, base, **_spread(rested))

        compared("get", lambda keys: here.store.batch_get_into(keys, addresses, sizes))
        compared("put", lambda keys: here.store.batch_put_from(keys, addresses, sizes))
        copier = here.store._engine.device_copier
        assert copier is not None
        with here.store.session(kept) as session:
            places = [device_address(session, key) for key in kept]
        for way in ("get", "put"):
            pairs = zip(addresses, places, strict=True)
            fragments = [(a, p, size) if way == "get" else (p, a, size) for a, p in pairs]
            times = here.seconds(lambda _, f=fragments: copier.copy(f, device=0).wait(), 15, 3)
            here.row(f"{way}, the same {count} copies alone", total, times, rates[way])
        here.remove(kept)
