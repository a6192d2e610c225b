"""The consumer's figures on GPUs, next to the raw driver copy of the same run.

    python -m tests.benchmarks.consumer_h200 [--json FILE] [--only 1,2] [--rehearse] [--spread-master]

A real Master, a ``cuda-posix`` pool of a real agent, a stock Mooncake client; every part runs in a process of its own,
with a time limit, so that one which fails leaves the others be. The Master has one CPU: left alone it hands each
request from thread to thread over all CPUs, and on an idle virtual machine each of these takes its time to wake
(``--spread-master`` measures that). Where one thread is measured (parts 2 to 5) it has one, too. Which ones they
are is decided by how quick they are, in part 2 before each turn: on a shared host a neighbour halves the speed of
single CPUs, for seconds.

Figures are medians of repeated runs, each from the call in Python to its return, with the first ones left out. GB is
10**9 bytes. ``--rehearse`` runs all of it in small on a model of the driver: it shows that the program works, and its
figures mean nothing.

Wrong bytes anywhere end the part they were found in, and the program with 1, as does a target that is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARTS: dict[int, tuple[str, int]] = {
    1: ("large objects", 60),
    2: ("a batch", 40),
    3: ("gather and scatter", 90),
    4: ("one small object", 30),
    5: ("against the stock client", 60),
    6: ("a provider started anew", 90),
    7: ("many puts and gets", 110),
}
"""What each is about, and how many seconds it may take."""


def _part(number: int) -> Callable[[Any], None]:
    from tests.benchmarks.store import copies, entries, restart, soak, stock

    return {
        1: copies.large,
        2: copies.batches,
        3: entries.entries,
        4: entries.one_small,
        5: stock.against_stock,
        6: restart.restart,
        7: soak.soak,
    }[number]


def _run_part(number: int, world: Any) -> None:
    """In a process group of its own, which is ended when its time is up."""
    from tests.benchmarks.store.world import Rows

    what, limit = PARTS[number]
    began = time.monotonic()
    print(f"part {number}, {what} ...", file=sys.stderr, flush=True)
    said = tempfile.TemporaryFile()  # noqa: SIM115 - read when the child has ended
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.consumer_h200", "--part", str(number), "--world", world.to_json()],
        stdin=subprocess.DEVNULL,
        stderr=said,
        start_new_session=True,
    )
    try:
        code = child.wait(limit)
        problem = f"ended with {code}" if code else ""
    except subprocess.TimeoutExpired:
        problem = f"took more than {limit} s"
    if problem:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
        Rows(world, number).add(f"part {number}, {what}: {problem}", good=False, said=lines[-1:])
        print("\n".join(lines[-25:]), file=sys.stderr)
    said.close()
    print(f"part {number}: {time.monotonic() - began:.1f} s {problem}", file=sys.stderr, flush=True)


def _shown(row: dict[str, Any]) -> str:
    ratio = "" if row["ratio"] is None else f"{row['ratio']:g}"
    target = "" if row["target"] is None else f">= {row['target']:g}"
    rate = f"{row['gbps']:.2f} GB/s" if "gbps" in row else f"p50 {row['p50_us']:g} us" if "p50_us" in row else ""
    verdict = {True: "ok", False: "MISSED", None: ""}[row["good"]]
    known = {"part", "name", "ratio", "target", "good", "gbps"}
    more = ", ".join(f"{key} {value}" for key, value in row.items() if key not in known)
    return f"{row['part']} {row['name']:88s} {rate:>14} {ratio:>6} {target:>8} {verdict:6} {more}".rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--only", help="the parts to run, such as 1,2")
    parser.add_argument("--rehearse", action="store_true", help="in small, on a model of the driver")
    parser.add_argument("--spread-master", action="store_true", help="the Master is left to run on all CPUs")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--soak", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    from tests.benchmarks.store.world import Pool, World, give_a_cpu_of_its_own, rehearse_on_the_model

    if arguments.world:
        world = World(**json.loads(arguments.world))
        if arguments.soak is not None:
            from tests.benchmarks.store.soak import soak_process

            soak_process(world, arguments.soak)
        else:
            _part(arguments.part)(world)
        return 0
    if arguments.rehearse:
        rehearse_on_the_model()
    from egmctl import seams

    seams.load()
    wanted = [int(each) for each in arguments.only.split(",")] if arguments.only else list(PARTS)
    from egmctl.mooncake.local_master import LocalMaster

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, LocalMaster() as master:
        apart = not arguments.spread_master and give_a_cpu_of_its_own(master.pid)
        world = World(
            master.address,
            master.admin_address,
            arguments.rehearse,
            arguments.json + ".rows" if arguments.json else str(Path(folder, "rows")),
            master.pid if apart else 0,
        )
        Path(world.rows).write_text("")
        scale = world.scale
        with Pool("bench", master.address, master.admin_address, scale.pool, scale.chunk) as pool:
            print(f"pool ready after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
            for number in wanted:
                _run_part(number, world)
            if not pool.agent:
                print("the pool's agent has ended meanwhile", file=sys.stderr)
        rows = [json.loads(line) for line in Path(world.rows).read_text().splitlines()]
    document = {
        "schema": "egmctl/benchmark-consumer/1",
        "rehearsal": arguments.rehearse,
        "environment": {**_environment(), "master_has_a_cpu": apart},
        "seconds": round(time.monotonic() - began, 1),
        "results": rows,
    }
    text = json.dumps(document, indent=1)
    if arguments.json:
        Path(arguments.json).write_text(text + "\n")
    print("\n".join(_shown(row) for row in rows), flush=True)
    return 1 if any(row["good"] is False for row in rows) else 0


def _environment() -> dict[str, Any]:
    from egmctl.memory.driver import get_driver
    from egmctl.mooncake.wheel import wheel_info

    driver = get_driver()
    info = wheel_info()
    return {
        "gpus": [driver.device_name(device) for device in range(driver.device_count())],
        "driver": driver.version(),
        "cpus": os.cpu_count(),
        "python": sys.version.split()[0],
        "mooncake": f"{info.distribution} {info.version}",
    }


if __name__ == "__main__":
    raise SystemExit(main())
