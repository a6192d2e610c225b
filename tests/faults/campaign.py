"""Finds the steps, spoils each in every way, cleans up, and looks at what is left: ``python -m tests.faults``."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from egmctl.ledger import is_running
from tests.faults.invariants import violations
from tests.faults.residue import residue
from tests.faults.scenarios import SCENARIOS, Scenario, Unready
from tests.faults.scenarios import _Over as Over
from tests.faults.sites import NO_HANG
from tests.faults.watcher import can_hang
from tests.faults.world import POOL, Finished, Run, World

__all__ = ["MODES", "Job", "Outcome", "Place", "carry_out", "clean_run", "jobs_of", "preload", "quick_selection"]

MODES = ("fail", "lost", "hang", "kill-before", "kill-after")
TRIES = 40
CLEAN_SECONDS = 60.0
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
RACING = (
    "mooncake.master.ping",
    "mooncake.rpc.connect",
    "mooncake.master.query_segment_status_by_id",
    "mooncake.admin.segments_detail",
)
"""Steps whose number differs from run to run: pings, and looks that are taken while something is waited for."""


@dataclass(frozen=True)
class Place:
    """One occurrence of a step in a clean run of a scenario; ``what`` is what a ledger commit records."""

    scenario: str
    label: str
    site: str
    nth: int
    what: str = ""


@dataclass(frozen=True)
class Job:
    place: Place
    mode: str


@dataclass
class Outcome:
    job: Job
    reached: bool = False
    moot: bool = False
    killed: bool = False
    problems: dict[str, list[str]] = field(default_factory=dict)
    clean_seconds: float = 0.0
    seconds: float = 0.0
    codes: list[int] = field(default_factory=list)
    note: str = ""

    @property
    def missed(self) -> bool:
        """Whether the fault should have come up and did not."""
        return not self.reached and not self.moot and self.job.place.site not in RACING


def preload() -> None:
    """Import what commands import, so that a forked one starts at once."""
    import egmctl.cli.commands.mount
    import egmctl.cli.commands.provision
    import egmctl.cli.commands.status
    import egmctl.cli.commands.teardown
    import egmctl.cli.groups
    import egmctl.cli.main
    import egmctl.planning
    import egmctl.provider.commands
    import egmctl.provider.launch
    import egmctl.provider.recover
    import egmctl.topology  # noqa: F401


@contextmanager
def playing(world: World, scenario: Scenario, fault: dict[str, Any] | None) -> Iterator[Run]:
    run = Run(world, fault=fault)
    if scenario.model:
        run.seams = ",".join(filter(None, ["tests.model.driver:install", scenario.seams]))
        run.environment["EGMCTL_MODEL_DIR"] = str(run.model)
        run.environment["EGMCTL_MODEL"] = json.dumps({"leaks": str(run.folder / "leaks")})
    try:
        yield run
    finally:
        run.close()


def clean_run(world: World, scenario: Scenario) -> tuple[list[Place], set[str], dict[str, list[str]]]:
    """Without a fault: the places in its window in their order, all sites passed, and what was wrong even so."""
    with playing(world, scenario, None) as run:
        scenario.play(run)
        problems = violations(run.events(), world.expiry)
        left = residue(run)
        if left:
            problems["left"] = left
        events = run.events()
        moments = [moment for moment, _ in run.marks]
        begin, end = moments[0], moments[-1]
        places = [
            Place(scenario.name, line["label"], line["site"], line["nth"], str(line["detail"].get("what", "")))
            for line in events
            if line["phase"] == "before" and begin <= line["t"] <= end
        ]
        return places, {line["site"] for line in events}, problems


def chosen(scenario: Scenario, places: Iterable[Place]) -> list[tuple[Place, bool]]:
    """The first and the last occurrence of each step in each process (of ledger commits, of each thing recorded), and
    whether it is the first."""
    first: dict[tuple[str, str, str], Place] = {}
    last: dict[tuple[str, str, str], Place] = {}
    for place in places:
        if scenario.wants(place.label, place.site, place.what):
            key = (place.label, place.site, place.what)
            first.setdefault(key, place)
            last[key] = place
    found = []
    for key, place in first.items():
        found.append((place, True))
        if last[key] != place and place.site not in RACING:
            found.append((last[key], False))
    return found


def jobs_of(scenario: Scenario, places: Iterable[Place]) -> list[Job]:
    """All modes for first occurrences. For last ones those that depend on how much was done before: a request that
    hangs fails as any other, and a kill before the last of several comes after the one before it."""
    jobs = []
    for place, is_first in chosen(scenario, places):
        for mode in MODES if is_first else ("fail", "lost", "kill-after"):
            if mode == "hang" and (not can_hang(place.site) or place.site in NO_HANG):
                continue
            jobs.append(Job(place, mode))
    return jobs


def quick_selection(jobs: Iterable[Job]) -> list[Job]:
    """Each step once, failing, and a kill after each thing the ledger records."""
    chosen_jobs = []
    failed: set[tuple[str, str]] = set()
    killed: set[str] = set()
    for job in jobs:
        place = job.place
        if job.mode == "fail" and (place.site, place.what) not in failed:
            failed.add((place.site, place.what))
            chosen_jobs.append(job)
        if job.mode == "kill-after" and place.what and place.what not in killed:
            killed.add(place.what)
            chosen_jobs.append(job)
    return chosen_jobs


def carry_out(world: World, job: Job) -> Outcome:
    """One scenario with one fault, cleaned up after, and looked at."""
    scenario = BY_NAME[job.place.scenario]
    began = time.monotonic()
    outcome = Outcome(job)
    fault = {"label": job.place.label, "site": job.place.site, "nth": job.place.nth, "mode": job.mode}
    problems = outcome.problems
    with playing(world, scenario, fault) as run:
        try:
            scenario.play(run)
        except Over:
            pass
        except Unready as error:
            problems["unready"] = [str(error)]
        commands = list(run.finished)
        problems_of_codes = [sentence for done in commands[-1:] for sentence in contract(run, done)]
        run.resume()
        world.revive()  # a Master that is down keeps a pool pending for as long as it is
        outcome.clean_seconds = clean_up(run, problems)
        hit = run.hit()
        outcome.reached = hit is not None
        outcome.moot = any(line["phase"] == "moot" for line in run.events())
        outcome.killed = hit is not None and job.mode.startswith("kill")
        outcome.codes = [done.code for done in run.finished]
        if problems_of_codes:
            problems["contract"] = problems_of_codes
        told = [sentence for done in run.finished for sentence in manners(done)]
        if told:
            problems["manners"] = told
        if run.extra.get("not recovered"):
            problems["not recovered"] = [run.extra["not recovered"]]
        left = residue(run)
        if left:
            problems["left"] = left
        problems.update(violations(run.events(), world.expiry))
        if problems:
            outcome.note = story(run)
    if problems or job.mode == "hang":
        # What the next run finds must be nothing of this one.
        with_left = problems.get("left") or problems.get("stuck")
        if with_left:
            world.scrap()
    outcome.seconds = time.monotonic() - began
    return outcome


def clean_up(run: Run, problems: dict[str, list[str]]) -> float:
    """``egmctl teardown`` until it says 0; how long that took."""
    began = time.monotonic()
    for number in range(TRIES):
        done = run.command("teardown", POOL, "--now", label=f"clean{number}")
        if done.code == 0:
            return time.monotonic() - began
        if done.code == 2 and run.record() is None:
            return time.monotonic() - began  # nothing was ever begun, or all is forgotten
        if done.code not in (1, 4, 5):
            problems.setdefault("contract", []).append(f"teardown: exit {done.code}: {done.stderr.strip()[-300:]}")
        if time.monotonic() - began > CLEAN_SECONDS:
            break
        time.sleep(0.1)
    problems["stuck"] = [f"not clean after {time.monotonic() - began:.0f} s: {run.finished[-1].stderr.strip()[-500:]}"]
    return time.monotonic() - began


def manners(done: Finished) -> list[str]:
    """What no command may ever do."""
    wrong = []
    name = " ".join(done.argv[:2])
    if done.late:
        wrong.append(f"{name} ({done.label}) did not come back by itself")
    if "Traceback" in done.stderr or "defect in egmctl" in done.stderr:
        wrong.append(f"{name} ({done.label}): {done.stderr.strip()[-600:]}")
    if not done.killed and not done.late and done.code not in range(8):
        wrong.append(f"{name} ({done.label}): exit {done.code}")
    if done.code not in (0, *(() if not done.killed else (done.code,))) and not done.late and not done.killed:
        document = done.document()
        if document.get("schema") != "egmctl/error/1" or not document.get("message"):
            wrong.append(f"{name} ({done.label}): exit {done.code} without an error document: {done.stdout[-200:]!r}")
    return wrong


def contract(run: Run, done: Finished) -> list[str]:
    """Whether a command's exit code says what the ledger and the agent say."""
    if done.killed or done.late:
        return []
    record = run.record()
    state = "none" if record is None else record.state
    alive = record is not None and is_running(record.agent_pid, record.agent_started)
    command = done.argv[0]
    expected: dict[tuple[str, int], tuple[str, ...]] = {
        ("provision", 0): ("ready", "degraded") if "--mount" in done.argv else ("provisioned",),
        ("provision", 1): ("none", "gone"),
        ("provision", 3): ("none", "gone"),
        ("provision", 4): ("cleanup-pending", "tearing-down", "provisioning", "mounting", "provisioned", "ready"),
        ("mount", 0): ("ready", "degraded"),
        ("mount", 1): ("provisioned", done.before),  # undone, or not begun
        ("mount", 3): ("provisioned", done.before),
        ("mount", 4): ("cleanup-pending", "mounting", "tearing-down", "provisioned", "degraded", "ready"),
        ("teardown", 0): ("gone", "none"),
    }
    allowed = expected.get((command, done.code))
    wrong = []
    if allowed is not None and state not in allowed:
        wrong.append(f"{command} says exit {done.code}, the ledger {state}: {done.stderr.strip()[-300:]}")
    if command == "provision" and "--mount" in done.argv and done.code in (1, 3) and state == "provisioned" and alive:
        wrong.clear()  # provisioned, and the mount failed and was undone: the pool stays, as it says
    if (command, done.code) == ("teardown", 0) and alive:
        wrong.append("teardown says exit 0 and the agent lives")
    return wrong


def story(run: Run) -> str:
    """What a person needs to see of a run that went wrong."""
    lines = [
        f"$ egmctl {' '.join(d.argv)}  [{d.label}] exit {d.code} {d.seconds:.1f}s\n{d.stderr.strip()[-700:]}"
        for d in run.finished[:6]
    ]
    log = run.paths.log(POOL)
    if log.exists():
        lines.append("log: " + log.read_text(errors="replace")[-3000:])
    hit = run.hit()
    near = []
    for line in run.events():
        seconds = (line["t"] - hit["t"]) / 1e9 if hit else 9.0
        if -0.3 < seconds < 2 and "ping" not in line["site"]:
            more = f"{line['detail'].get('what', '')} {line.get('error', '')}"
            near.append(f"{seconds:+.3f} {line['label']} {line['phase']} {line['site']} {more}")
    return "\n".join(lines + near[-70:])


# Several at once


def _worker(version: str, jobs: Any, results: Any) -> None:
    preload()
    with World(version) as world:
        while True:
            job = jobs.get()
            if job is None:
                return
            for attempt in range(2):  # a scenario that did not come about, on a machine that others use as well
                try:
                    results.put((job, clean_run(world, BY_NAME[job]) if isinstance(job, str) else _tried(world, job)))
                    break
                except BaseException:
                    world.scrap()
                    if attempt:
                        results.put((job, traceback.format_exc()))


def _tried(world: World, job: Job) -> Outcome:
    """What was only late is tried once more; whatever else is wrong stays wrong."""
    outcome = carry_out(world, job)
    return carry_out(world, job) if set(outcome.problems) == {"not recovered"} else outcome


def in_parallel(tasks: list[Any], *, version: str, workers: int) -> Iterator[tuple[Any, Any]]:
    """Each task (a scenario's name, or a job) with its result: the text of a traceback where the harness failed."""
    context = multiprocessing.get_context("fork")
    jobs, results = context.SimpleQueue(), context.SimpleQueue()
    processes = [context.Process(target=_worker, args=(version, jobs, results)) for _ in range(workers)]
    for process in processes:
        process.start()
    try:
        waiting = list(tasks)
        for task in waiting[: 2 * workers]:
            jobs.put(task)
        given = min(2 * workers, len(waiting))
        for _ in range(len(tasks)):
            yield results.get()
            if given < len(waiting):
                jobs.put(waiting[given])
                given += 1
    finally:
        for _ in processes:
            jobs.put(None)
        for process in processes:
            process.join(60)
            if process.is_alive():
                process.terminate()


def save(path: Path, document: dict[str, Any]) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft.write_text(json.dumps(document, indent=1) + "\n")
    draft.replace(path)


def as_row(outcome: Outcome) -> dict[str, Any]:
    row = asdict(outcome)
    row["job"] = {**asdict(outcome.job.place), "mode": outcome.job.mode}
    return row
