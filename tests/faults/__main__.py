"""The whole of it, with the table at the end; see ``--help``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.faults.campaign import BY_NAME, Job, Outcome, Place, as_row, in_parallel, jobs_of, quick_selection, save
from tests.faults.report import summary, table
from tests.faults.sites import unexercised


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="each step failing once, a kill after each record")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="at a time")
    parser.add_argument("--version", default="0.3.14", help="of the Master")
    parser.add_argument("--scenario", action="append", default=[], metavar="NAME")
    parser.add_argument("--site", default="", metavar="PREFIX")
    parser.add_argument("--mode", action="append", default=[])
    parser.add_argument("--walk", type=int, default=0, metavar="N", help="operations of the random walk as well")
    parser.add_argument("--real-walk", type=int, default=0, metavar="N", help="the same with real Masters")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the numbers and all runs, as JSON")
    parser.add_argument("--list", action="store_true", help="what would be injected")
    return parser.parse_args()


def main() -> int:
    options = _options()
    began = time.monotonic()
    problems: list[str] = []
    jobs, seen = _enumerate(options, problems)
    print(f"{len(seen)} sites, {len(jobs)} faults to inject ({time.monotonic() - began:.0f} s)", flush=True)
    if options.list:
        print(*jobs, *problems, sep="\n")
        return 0
    outcomes = _inject(options, jobs, problems, began)
    walks = _walk(options)
    numbers = summary(seen, outcomes, problems, walks, time.monotonic() - began)
    print(table(numbers))
    for problem in problems:
        print(f"PROBLEM {problem}")
    if options.out is not None:
        save(options.out, {"schema": "egmctl/faults/1", **numbers, "runs": [as_row(one) for one in outcomes]})
    return 1 if problems or numbers["wrong"] else 0


def _enumerate(options: argparse.Namespace, problems: list[str]) -> tuple[list[Job], set[str]]:
    """Every step in the source that belongs to a pool's life has to be passed by a run without faults."""
    names = options.scenario or [name for name, one in BY_NAME.items() if one.quick or not options.quick]
    found: dict[str, list[Job]] = {}
    seen: set[str] = set()
    for name, result in in_parallel(names, version=options.version, workers=options.jobs):
        if isinstance(result, str):
            problems.append(f"{name}, without a fault: {result}")
            continue
        places, sites, wrong = result
        seen |= sites
        problems += [f"{name}, without a fault: {sort}: {'; '.join(text)}" for sort, text in wrong.items()]
        found[name] = jobs_of(BY_NAME[name], places)
    if not options.scenario:
        problems += [f"no run passes {site} ({where})" for site, where in unexercised(seen).items()]
    jobs = [job for name in names for job in found.get(name, [])]
    jobs = [job for job in jobs if job.place.site.startswith(options.site)]
    jobs = [job for job in jobs if not options.mode or job.mode in options.mode]
    return (quick_selection(jobs) if options.quick else jobs), seen


def _inject(options: argparse.Namespace, jobs: list[Job], problems: list[str], began: float) -> list[Outcome]:
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
    return _looked_at_again(options, outcomes, problems)


def _looked_at_again(options: argparse.Namespace, outcomes: list[Outcome], problems: list[str]) -> list[Outcome]:
    """What was not reached: a step that the run without a fault had to repeat, on a busy machine, and that another one
    passes less often is no place of its scenario. The others are tried once more."""
    missed = [one for one in outcomes if one.missed]
    names = sorted({one.job.place.scenario for one in missed})
    again: dict[Job, Outcome] = {}
    places: dict[str, set[Place]] = {}
    for name, result in in_parallel(names, version=options.version, workers=options.jobs) if names else ():
        places[name] = set() if isinstance(result, str) else {job.place for job in jobs_of(BY_NAME[name], result[0])}
        if isinstance(result, str):
            problems.append(f"{name}, without a fault once more: {result}")
    for one in missed:
        one.moot = one.job.place not in places[one.job.place.scenario]
    jobs = [one.job for one in missed if not one.moot]
    for job, result in in_parallel(jobs, version=options.version, workers=options.jobs) if jobs else ():
        if not isinstance(result, str):
            again[job] = result
    return [again.get(one.job, one) for one in outcomes]


def _walk(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    from tests.faults.walk import walk_with_fakes, walk_with_real_masters

    walks = {}
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # agents of this process speak there
        if options.walk:
            walks["small Masters"] = walk_with_fakes(options.walk).document()
        if options.real_walk:
            walks["real Masters"] = walk_with_real_masters(options.real_walk, version=options.version).document()
    return walks


if __name__ == "__main__":
    sys.exit(main())
