"""A small selection of the fault campaign (the whole is ``make faults``), and what the harness itself must notice."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.invariants import premature_releases, repetitions, undurable
from tests.faults.sites import EXEMPT, all_sites, unexercised
from tests.support.master import MasterMissing, find_binary

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)
def test_every_step_fails_once_and_every_record_is_followed_by_a_kill_and_nothing_is_left(tmp_path: Path) -> None:
    try:
        find_binary("0.3.14")
        version = "0.3.14"
    except MasterMissing:
        version = "0.3.13"
    out = tmp_path / "faults.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--quick", "--version", version, "--out", str(out)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    numbers = json.loads(out.read_text())
    assert numbers["faults"]["fail"] > 80
    assert numbers["kills_survived"] == numbers["kills"] > 20
    assert (numbers["leaks"], numbers["premature_releases"], numbers["undurable_acts"]) == (0, 0, 0)


@pytest.mark.timeout(600)
def test_a_random_walk_over_several_pools_ends_clean() -> None:
    from tests.faults.walk import walk_with_fakes

    walk = walk_with_fakes(600, seed=11)
    assert walk.wrong == []
    assert sum(walk.faults.values()) > 10
    assert sum(walk.disturbances.values()) > 5
    assert walk.done["mount"] > 50


def test_a_step_that_no_run_passes_is_found_and_so_is_one_whose_name_is_no_literal(tmp_path: Path) -> None:
    sites = set(all_sites())
    assert unexercised(sites) == {}
    assert list(unexercised(sites - {"memory.shm.seal"})) == ["memory.shm.seal"]
    assert sites >= set(EXEMPT)
    (tmp_path / "new.py").write_text("def f(name):\n    with step(name):\n        pass\n")
    with pytest.raises(ValueError, match=r"new.py:2: the site of a step is no literal"):
        all_sites(tmp_path)
    (tmp_path / "new.py").write_text("step('a.b')\nstep('a.b')\n")
    with pytest.raises(ValueError, match=r"new.py:2: a.b stands at .*new.py:1 already"):
        all_sites(tmp_path)


def event(site: str, phase: str, t: int, **detail: Any) -> dict[str, Any]:
    more = {"error": ""} if phase == "after" else {}
    return {"site": site, "phase": phase, "t": t, "pid": 1, "label": "agent@0", "detail": detail, **more}


MOUNT, UNMOUNT, RELEASE = "mooncake.master.mount_segment", "mooncake.master.unmount_segment", "memory.shm.unmap"


def test_memory_released_under_a_segment_or_a_descriptor_is_noticed() -> None:
    mounted = [event(MOUNT, "before", 1, segment=[1, 2]), event(MOUNT, "after", 2, segment=[1, 2])]
    release = event(RELEASE, "before", 9, chunk=0)
    assert len(premature_releases([*mounted, release])) == 1
    unanswered = [event(MOUNT, "before", 1, segment=[1, 2]), {**mounted[1], "error": "MasterTimeout"}]
    assert len(premature_releases([*unanswered, release])) == 1
    refused = [event(MOUNT, "before", 1, segment=[1, 2]), {**mounted[1], "error": "MasterRefused"}]
    assert premature_releases([*refused, release]) == []
    unmounted = [*mounted, event(UNMOUNT, "before", 3, segment=[1, 2]), event(UNMOUNT, "after", 4, segment=[1, 2])]
    assert premature_releases([*unmounted, release]) == []
    assert len(premature_releases([event("provider.publish", "after", 1), release])) == 1
    withdrawn = [event("provider.publish", "after", 1), event("provider.unpublish", "after", 2)]
    assert premature_releases([*withdrawn, release]) == []


def test_an_act_before_its_record_and_a_step_done_twice_are_noticed() -> None:
    assert undurable([{**event(MOUNT, "before", 1, segment=[1, 2]), "undurable": "segment"}])
    done = [event(UNMOUNT, "before", 1, segment=[1, 2]), event(UNMOUNT, "after", 2, segment=[1, 2])]
    record = event("ledger.commit", "after", 3, what="unmounted")
    again = event(UNMOUNT, "before", 4, segment=[1, 2])
    assert repetitions([*done, again]) == []  # it was not on record yet
    assert len(repetitions([*done, record, again])) == 1


def test_what_was_not_reached_is_tried_again_unless_it_is_no_place_of_its_scenario(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.faults import __main__ as program
    from tests.faults.campaign import Job, Outcome, Place

    real = Place("engine", "agent@0", "te.spawn", 2, "")
    chance = Place("engine", "agent@0", "te.spawn", 3, "")
    seen: list[list[object]] = []

    def in_parallel(tasks: list[object], **how: object) -> list[tuple[object, object]]:
        seen.append(tasks)
        if tasks == ["engine"]:
            return [("engine", ([real], {"te.spawn"}, {}))]
        return [(job, Outcome(job, reached=True)) for job in tasks]  # type: ignore[arg-type]

    monkeypatch.setattr(program, "in_parallel", in_parallel)
    options = argparse.Namespace(version="0.3.14", jobs=1)
    outcomes = [Outcome(Job(real, "lost"), reached=False), Outcome(Job(chance, "lost"), reached=False)]
    after = program._looked_at_again(options, outcomes, [])
    assert seen == [["engine"], [Job(real, "lost")]]
    assert [(one.reached, one.missed) for one in after] == [(True, False), (False, False)]
