"""``python -m tests.faults [--quick SHARD/OF] [--jobs N] [--scenario NAME] [--site PREFIX] [--out FILE]``"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.faults.campaign import BY_NAME, Job, Outcome, as_row, in_parallel, jobs_of, save
from tests.faults.report import summary, table
from tests.faults.sites import unexercised


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--quick", metavar="SHARD/OF", help="a small selection, in parts")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--version", default="0.3.14")
    parser.add_argument("--scenario", action="append", default=[])
    parser.add_argument("--site", default="")
    parser.add_argument("--mode", action="append", default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    names = options.scenario or list(BY_NAME)
    problems: list[str] = []
    jobs: list[Job] = []
    seen: set[str] = set()
    for name, result in in_parallel(names, version=options.version, workers=options.jobs):
        if isinstance(result, str):
            problems.append(f"{name}, clean: {result}")
            continue
        places, sites, wrong = result
        seen |= sites
        problems += [f"{name}, clean: {sort}: {'; '.join(found)}" for sort, found in wrong.items()]
        jobs += jobs_of(BY_NAME[name], places)
    if not options.scenario:
        problems += [f"no run passes {site} ({where})" for site, where in unexercised(seen).items()]
    jobs = [job for job in jobs if job.place.site.startswith(options.site)]
    jobs = [job for job in jobs if not options.mode or job.mode in options.mode]
    print(f"{len(seen)} sites, {len(jobs)} faults to inject ({time.monotonic() - began:.0f} s)", flush=True)
    if options.list:
        for job in jobs:
            print(job)
        return 0
    outcomes: list[Outcome] = []
    for job, result in in_parallel(jobs, version=options.version, workers=options.jobs):
        if isinstance(result, str):
            problems.append(f"{job}: {result}")
            continue
        outcomes.append(result)
        if result.problems:
            place = job.place
            where = f"{place.scenario}: {place.label} {place.site} #{place.nth} {place.what} {job.mode}"
            print(f"WRONG {where}: {result.problems}", flush=True)
            if options.out is None:
                print(result.note, flush=True)
        if len(outcomes) % 50 == 0:
            print(f"{len(outcomes)} of {len(jobs)} ({time.monotonic() - began:.0f} s)", flush=True)
    numbers = summary(seen, outcomes, problems, time.monotonic() - began)
    print(table(numbers))
    for problem in problems:
        print(f"PROBLEM {problem}")
    if options.out is not None:
        save(options.out, {"schema": "egmctl/faults/1", **numbers, "runs": [as_row(one) for one in outcomes]})
    return 1 if problems or numbers["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
