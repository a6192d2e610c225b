"""Part 5: an unmodified Mooncake client over TCP beside the direct consumer, on the same objects."""

from __future__ import annotations

from egmctl.bench.pattern import digest, pattern
from egmctl.bench.stock import StockClient
from tests.benchmarks.store.here import Here
from tests.benchmarks.store.world import MIB, World, on_a_cpu_of_its_own

__all__ = ["against_stock"]


def against_stock(world: World) -> None:
    """512 MiB from and to HBM, each client with keys of its own to put, and the same keys to get."""
    with Here(world, 5, max(world.scale.stock, world.scale.raw)) as here:
        rates = here.raw_rates()
        size, hbm = here.scale.stock, here.hbm[0]
        device = None if world.rehearsal else 0  # the stock client knows nothing of a model
        names = [f"stock-{number}" for number in range(5)]
        with StockClient(world.master, "P2PHANDSHAKE", device=device, workspace=2 * size) as stock:
            put_ns, codes = stock.put(names, size)
            if any(codes):
                raise SystemExit(f"the stock client's puts answered {codes}")
            get_ns, codes, _ = stock.get(names, size)
            if codes != [size] * len(names):
                raise SystemExit(f"the stock client's gets answered {codes}")
            kept = "ours"
            content = pattern(kept, size)
            here.write(hbm, content)
            here.store.put_from(kept, hbm, size)
            _, _, digests = stock.get([kept], size, check=True)
            if digests != [digest(content)]:
                raise SystemExit("WRONG BYTES: the stock client got another object than was put")
        for name in names:
            here.clear(hbm, size)
            here.store.get_into(name, hbm, size)
            if digest(here.read(hbm, size).data) != digest(pattern(name, size)):
                raise SystemExit("WRONG BYTES: got another object than the stock client put")
        what = f"{size // MIB} MiB"
        place = "HBM" if device is not None else "host memory"
        theirs = {
            "get": here.row(f"stock client over TCP, get into {place}, {what}", size, [ns / 1e9 for ns in get_ns]),
            "put": here.row(f"stock client over TCP, put from {place}, {what}", size, [ns / 1e9 for ns in put_ns]),
        }
        ours: dict[str, list[float]] = {"get": [], "put": []}
        with on_a_cpu_of_its_own(world):
            ours["get"] = here.seconds(lambda n: here.store.get_into(names[n % len(names)], hbm, size))
            for turn in range(here.scale.repeats):
                key = f"ours-{turn}"
                ours["put"] += here.seconds(lambda _, key=key: here.store.put_from(key, hbm, size), 1, 0)
                here.remove([key])
        for way, times in ours.items():
            rate = here.row(f"the direct consumer, {way}, {what}, Master calls included", size, times, rates[way])
            times_theirs = rate / theirs[way]
            # From HBM the stock client goes through a buffer; into HBM it can be so fast that the link's limit is near.
            target = 20.0 if way == "put" else None
            here.rows.add(f"{way} of {what}: times the stock client's rate", ratio=times_theirs, target=target)
        here.remove([*names, kept])
