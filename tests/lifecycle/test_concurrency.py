"""Many at one pool: commands in processes of their own, agents, and locks that nobody holds."""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

from egmctl.ledger import holder_of
from egmctl.paths import Paths
from egmctl.provider import pool_status
from tests.lifecycle.support import command, start_command, write_plan
from tests.provider.pools import agents, listed, nothing_left, small_plan, until
from tests.support.master import Master

SECONDS = 25.0


def test_the_six_commands_racing_on_one_pool_exclude_each_other_and_end_clean(
    quick_master: Master, tmp_path: Path, state: Path
) -> None:
    paths = Paths.resolve(state)
    plan = str(write_plan(small_plan(quick_master), tmp_path))
    spec = tmp_path / "spec.toml"
    spec.write_text(
        '[pool]\nname = "dev"\nmemory = "shm"\nenable_egm_store_pool = true\nglobal_segment_size = "32MiB"\n'
        f'[mooncake]\nlocal_hostname = "127.0.0.1"\nmaster_server_addr = "{quick_master.address}"\n'
    )
    commands = {
        "plan": ("plan", str(spec)),
        "provision": ("provision", plan),
        "mount": ("mount", "dev"),
        "verify": ("verify", "dev", "--json"),
        "bench": ("bench", "dev", "--count", "4", "--block", "64KiB"),
        "teardown": ("teardown", "dev", "--now"),
    }
    outcomes: Counter[tuple[str, int]] = Counter()
    defects: list[str] = []
    most = 0
    deadline = time.monotonic() + SECONDS
    bag = [*commands, "provision", "mount", "provision", "mount"]

    def work(seed: int) -> None:
        source = random.Random(seed)
        while time.monotonic() < deadline:
            name = source.choice(bag)
            code, out, said = command(paths, *commands[name])
            outcomes[name, code] += 1
            unknown = code == 2 and "pool dev" not in said  # a pool that is not there, never the words
            wrong = code not in (0, 1, 2, 4, 5, 7) or unknown or "Traceback" in said or "defect" in said
            if code == 7:  # records may differ while others change them; bytes never
                checks = json.loads(out).get("checks", []) if name == "verify" else []
                wrong = wrong or name != "verify" or any("differs" in str(c.get("observed")) for c in checks)
            if wrong:
                defects.append(f"{name}: {code}\n{out[-500:]}\n{said}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        most = max(most, len(agents(paths)))
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert not defects, "\n\n".join(defects[:3])
    assert {name for name, _ in outcomes} == set(commands), outcomes
    assert any(outcomes[name, 0] for name in ("provision", "mount")), outcomes
    until(lambda: command(paths, "teardown", "dev", "--now")[0] == 0, 60)
    until(lambda: not agents(paths))
    assert pool_status(paths) == []
    assert listed(quick_master) == []
    assert nothing_left(paths) == []


def test_of_many_agents_that_start_at_once_one_owns_the_pool(quick_master: Master, tmp_path: Path, state: Path) -> None:
    paths = Paths.resolve(state)
    plan = str(write_plan(small_plan(quick_master), tmp_path))
    processes = [start_command(paths, "provision", plan, "--json") for _ in range(6)]
    codes = []
    for process in processes:
        _, said = process.communicate(timeout=90)
        codes.append(process.returncode)
        assert "Traceback" not in said
    assert set(codes) <= {0, 5}, codes
    assert 0 in codes
    until(lambda: len(agents(paths)) == 1)
    (entry,) = pool_status(paths)
    assert entry["state"] == "provisioned"
    holder = holder_of(paths.lock("dev"))
    assert holder is not None
    assert holder.pid == entry["agent_pid"] == agents(paths)[0].pid
    assert command(paths, "teardown", "dev", "--now")[0] == 0
    assert nothing_left(paths) == []


def test_two_agents_in_the_foreground_cannot_have_the_same_pool(
    quick_master: Master, tmp_path: Path, state: Path
) -> None:
    paths = Paths.resolve(state)
    plan = str(write_plan(small_plan(quick_master), tmp_path))
    first = start_command(paths, "provision", plan, "--foreground")
    try:
        until(lambda: [entry["state"] for entry in pool_status(paths)] == ["provisioned"], 30)
        code, _, said = command(paths, "provision", plan, "--foreground")
        # With the same plan the pool is there already, and its agent is the first one.
        assert code in (0, 5), said
        assert pool_status(paths)[0]["agent_pid"] == first.pid
        other = str(write_plan(small_plan(quick_master, chunks=3), tmp_path))
        code, _, said = command(paths, "provision", other, "--foreground")
        assert code == 5
        assert str(first.pid) in said
        first.terminate()
        first.communicate(timeout=30)
        assert first.returncode == 0
    finally:
        first.kill()
        first.communicate()
    assert nothing_left(paths) == []


def test_a_lock_file_that_nobody_holds_keeps_nobody_out(quick_master: Master, tmp_path: Path, state: Path) -> None:
    paths = Paths.resolve(state)
    plan = str(write_plan(small_plan(quick_master), tmp_path))
    stale = {"pid": 1, "started": 0, "command": "egmctl", "since": 0.0, "doing": "the pool's agent"}
    paths.lock("dev").write_text(json.dumps(stale))
    assert command(paths, "provision", plan)[0] == 0
    assert command(paths, "teardown", "dev", "--now")[0] == 0
    assert nothing_left(paths) == []


def test_a_lock_that_a_living_process_holds_is_respected_and_its_holder_named(
    quick_master: Master, tmp_path: Path, state: Path
) -> None:
    paths = Paths.resolve(state)
    plan = str(write_plan(small_plan(quick_master), tmp_path))
    with subprocess.Popen(["flock", str(paths.lock("dev")), "sleep", "60"]) as holder:
        try:
            until(lambda: holder_of(paths.lock("dev")) is not None)
            code, _, said = command(paths, "provision", plan)
            assert code == 5, said
            assert "owned by" in said
        finally:
            holder.terminate()
    paths.lock("dev").unlink()
