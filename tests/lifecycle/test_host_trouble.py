"""What a host can do to a pool: a full disk, no memory, a ledger that cannot be read, a reboot, a clock that jumps."""

from __future__ import annotations

import ast
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

import egmctl
from egmctl.errors import CleanupPendingError, PreflightError
from egmctl.ledger import LedgerUnreadable, is_running, read_only, start_time
from egmctl.paths import Paths
from egmctl.provider import forget, mount_pool, pool_status, provision, teardown_pool
from egmctl.provider.rescue import rescue_path
from tests.lifecycle.support import command, mounted, put, start_command, write_plan
from tests.provider.pools import agents, listed, mapped_here, nothing_left, run, small_plan, until
from tests.support.master import Master

REPOSITORY = Path(__file__).resolve().parents[2]


# A full disk


@contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[None]:
    """A file system of its own, with that much room, at ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k,mode=700", "tmpfs", str(folder)],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this process may not mount a small file system to fill: {error}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def fill(folder: Path, leave: int = 0) -> Path:
    """A file that takes all room but ``leave`` bytes."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    size = max(0, filler.stat().st_size - leave)
    os.truncate(filler, size)
    return filler


@pytest.mark.parametrize("leave", [0, 4096, 16384])
def test_a_ledger_without_room_is_refused_before_anything_is_allocated(
    quick_master: Master, paths: Paths, leave: int
) -> None:
    with small_disk(paths.state, 256):
        filler = fill(paths.state, leave)
        with pytest.raises(PreflightError, match=r"ledger|lock|log|room|space") as caught:
            provision(small_plan(quick_master), paths, mount=True)
        assert caught.value.exit_code == 3
        until(lambda: not agents(paths))
        assert listed(quick_master) == []
        assert nothing_left(paths) == []
        filler.unlink()
        provision(small_plan(quick_master), paths, mount=True)
        teardown_pool("dev", paths, now=True)


def test_a_disk_that_fills_up_later_is_shouted_and_nothing_is_lost(
    quick_master: Master, tmp_path: Path, state: Path
) -> None:
    plan = write_plan(small_plan(quick_master), tmp_path)
    cli = Paths.resolve(state)
    with small_disk(state, 512):
        try:
            code, _, said = command(cli, "provision", str(plan), "--mount")
            assert code == 0, said
            pid = json.loads(command(cli, "status", "dev", "--json")[1])["pools"][0]["agent_pid"]
            filler = fill(state)
            code, _, said = command(cli, "teardown", "dev", "--now")
            assert code == 4, said
            note = rescue_path(cli.runtime, "dev")
            assert "what is owned is written to" in said
            assert str(note) in said
            written = json.loads(note.read_text())
            assert len(written["segments"]) == len(written["memory"]) == 2
            assert note.stat().st_mode & 0o777 == 0o600
            assert is_running(pid, None)  # and with it the memory
            assert len(listed(quick_master)) == 2
            filler.unlink()
            code, _, said = command(cli, "teardown", "dev", "--now")
            assert code == 0, said
            assert not note.exists()
            assert listed(quick_master) == []
            assert nothing_left(cli) == []
        finally:
            command(cli, "teardown", "dev", "--now", "--abandon")


# No memory


@contextmanager
def memory_cgroup() -> Iterator[Path]:
    folder = Path("/sys/fs/cgroup/memory") / f"egmctl-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup of one's own can be made here: {error}")
    try:
        if not (folder / "memory.limit_in_bytes").exists():
            pytest.skip("this is no memory cgroup of version 1")
        yield folder
    finally:
        deadline = time.monotonic() + 10
        while folder.exists() and time.monotonic() < deadline:
            with suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.05)


def in_cgroup(folder: Path) -> Callable[[], None]:
    def join() -> None:
        with open(folder / "cgroup.procs", "w") as file:
            file.write("0")

    return join


def test_memory_that_runs_out_in_the_middle_of_a_provision_is_undone_and_said(
    quick_master: Master, tmp_path: Path, state: Path
) -> None:
    plan = write_plan(small_plan(quick_master, chunks=24), tmp_path)
    cli = Paths.resolve(state)
    with memory_cgroup() as cgroup:
        environment = {
            "EGMCTL_SEAMS": "tests.lifecycle.seams:squeeze",
            "EGMCTL_TEST_CGROUP": str(cgroup),
            "PYTHONPATH": str(REPOSITORY),
        }
        code, out, said = command(
            cli, "provision", str(plan), "--json", preexec_fn=in_cgroup(cgroup), environment=environment
        )
        failures = int((cgroup / "memory.failcnt").read_text())
        assert failures > 0, "the limit was never met"
        assert code == 1, said
        error = json.loads(out)
        assert "memory" in error["message"] + error["hint"]
        assert "undone" in error["message"] + said
    until(lambda: not agents(cli))
    assert pool_status(cli) == []
    assert nothing_left(cli) == []


def test_more_than_the_cgroup_leaves_is_refused_with_the_numbers(
    quick_master: Master, tmp_path: Path, state: Path
) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(
        '[pool]\nname = "dev"\nmemory = "shm"\nenable_egm_store_pool = true\nglobal_segment_size = "512MiB"\n'
        f'[mooncake]\nlocal_hostname = "127.0.0.1"\nmaster_server_addr = "{quick_master.address}"\n'
    )
    cli = Paths.resolve(state)
    with memory_cgroup() as cgroup:
        (cgroup / "memory.limit_in_bytes").write_text(str(256 << 20))
        code, out, said = command(cli, "provision", str(spec), "--json", preexec_fn=in_cgroup(cgroup))
    assert code == 3, said
    assert "512 MiB" in json.loads(out)["message"]
    assert not cli.ledger("dev").exists()


# A ledger that cannot be read


def newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 2")


def older(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 0")


def corrupted(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100:4000] = os.urandom(3900)
    path.write_bytes(data)


def emptied_of_tables(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE segment")


@pytest.mark.parametrize("damage", [newer, older, corrupted, emptied_of_tables])
def test_a_ledger_that_cannot_be_read_is_refused_by_every_command_and_left_alone(
    quick_master: Master, paths: Paths, damage: Callable[[Path], None]
) -> None:
    plan = small_plan(quick_master)
    report = provision(plan, paths, mount=True)
    os.kill(report["agent_pid"], signal.SIGKILL)
    until(lambda: not is_running(report["agent_pid"], None))
    path = paths.ledger("dev")
    whole = path.read_bytes()
    damage(path)
    damaged = path.read_bytes()
    attempts: dict[str, Callable[[], object]] = {
        "provision": lambda: provision(plan, paths),
        "mount": lambda: mount_pool("dev", paths),
        "teardown": lambda: teardown_pool("dev", paths, now=True),
        "forget": lambda: forget("dev", paths),
        "status of it": lambda: pool_status(paths, "dev"),
    }
    for name, attempt in attempts.items():
        with pytest.raises(LedgerUnreadable) as caught:
            attempt()
        assert (caught.value.exit_code, caught.value.where) == (3, str(path)), name
        assert caught.value.hint, name
    (entry,) = pool_status(paths)
    assert (entry["state"], entry["cleanup_pending"]) == ("unreadable", True)
    assert path.read_bytes() == damaged
    assert not agents(paths)
    path.write_bytes(whole)
    assert teardown_pool("dev", paths)["state"] == "gone"
    assert listed(quick_master) == []


# A reboot


def test_after_a_reboot_the_agent_is_gone_whoever_has_its_pid_now_and_nobody_else_is_harmed(
    quick_master: Master, paths: Paths
) -> None:
    report = provision(small_plan(quick_master), paths, mount=True)
    os.kill(report["agent_pid"], signal.SIGKILL)
    until(lambda: not is_running(report["agent_pid"], None) and not is_running(report["te_child"]["pid"], None))
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        # As it is found after a reboot: another boot's id, and its pids and start times are other processes' now.
        with closing(sqlite3.connect(paths.ledger("dev"))) as db, db:
            db.execute(
                "UPDATE pool SET boot_id = 'of-the-boot-before', agent_pid = ?, agent_started = ?",
                (bystander.pid, start_time(bystander.pid)),
            )
            detail = json.dumps({"pid": bystander.pid, "started": start_time(bystander.pid), "data_port": 1})
            db.execute("UPDATE resource SET detail = ? WHERE kind = 'engine'", (detail,))
        paths.lock("dev").write_text("the lock of the boot before")
        (entry,) = pool_status(paths)
        assert (entry["state"], entry["agent_alive"], entry["agent_pid"]) == ("cleanup-pending", False, None)
        with pytest.raises(CleanupPendingError):
            mount_pool("dev", paths)
        assert teardown_pool("dev", paths)["state"] == "gone"
        assert bystander.poll() is None
    finally:
        bystander.communicate()
    record = read_only(paths.ledger("dev"))
    assert record is not None
    assert {row.state for row in record.chunks} == {"lost"}
    assert listed(quick_master) == []
    assert nothing_left(paths) == []


def test_a_pid_that_another_process_has_now_is_not_taken_for_the_agent(quick_master: Master, paths: Paths) -> None:
    report = provision(small_plan(quick_master), paths, mount=True)
    os.kill(report["agent_pid"], signal.SIGKILL)
    until(lambda: not is_running(report["agent_pid"], None))
    with closing(sqlite3.connect(paths.ledger("dev"))) as db, db:
        db.execute("UPDATE pool SET agent_pid = ?", (os.getpid(),))  # with the dead one's start
    (entry,) = pool_status(paths)
    assert entry["agent_alive"] is False
    assert teardown_pool("dev", paths)["state"] == "gone"
    assert listed(quick_master) == []


# A clock that jumps


@pytest.mark.parametrize("jump", [-86400 * 365, +86400 * 365])
def test_a_clock_that_jumps_changes_no_lease_no_grace_and_no_expiry(
    quick_master: Master, paths: Paths, monkeypatch: pytest.MonkeyPatch, jump: int
) -> None:
    real = time.time
    offset = 0.0
    monkeypatch.setattr(time, "time", lambda: real() + offset)
    with mounted(quick_master, paths, lease_ttl=1.5) as agent:
        put(quick_master, agent, "k", b"k" * 100)
        offset = jump
        began = time.monotonic()
        quick_master.restart()
        until(lambda: agent.pool.state == "degraded")
        until(lambda: agent.pool.state == "ready", 20)
        assert time.monotonic() - began >= 1.5
        put(quick_master, agent, "k", b"k" * 100)
        offset = -jump
        began = time.monotonic()
        run(agent, "teardown", lambda task: agent.pool.teardown(task, 1.0))
        assert 2.5 <= time.monotonic() - began < 8
        assert agent.pool.state == "gone"
        assert mapped_here() == 0


DISPLAYED_ONLY = {
    "ledger/lock.py",  # since when a lock is held
    "ledger/store.py",  # when something was recorded
    "provider/rescue.py",  # when the note was written
    "provider/task.py",  # since when a command works
}


def test_the_wall_clock_is_read_only_to_be_shown() -> None:
    found = set()
    root = Path(egmctl.__file__).parent
    for path in root.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            wall = (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and (node.value.id, node.attr) in {("time", "time"), ("time", "time_ns"), ("time", "CLOCK_REALTIME")}
            )
            if wall or (isinstance(node, ast.ImportFrom) and node.module == "time"):
                found.add(str(path.relative_to(root)))
    assert found == DISPLAYED_ONLY


# A network file system


def test_a_state_folder_on_a_network_file_system_is_warned_of_by_provision(
    quick_master: Master, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("egmctl.checks.host.file_system", lambda path, proc: "nfs4")
    report = provision(small_plan(quick_master), paths)
    assert any("network file system (nfs4)" in text and "--state-dir" in text for text in report["warnings"])
    assert any("nfs4" in text for text in pool_status(paths, "dev")[0]["warnings"])
    teardown_pool("dev", paths, now=True)


# Nobody to tell


def test_an_agent_in_the_foreground_outlives_whoever_read_what_it_says(
    quick_master: Master, tmp_path: Path, state: Path
) -> None:
    plan = write_plan(small_plan(quick_master), tmp_path)
    cli = Paths.resolve(state)
    process = start_command(cli, "provision", str(plan), "--mount", "--foreground", "--json")
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        until(lambda: [entry["state"] for entry in pool_status(cli)] == ["ready"], 30)
        quick_master.kill()  # something to say
        until(lambda: pool_status(cli)[0]["state"] == "degraded")
        quick_master.start()
        until(lambda: pool_status(cli)[0]["state"] == "ready", 20)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        assert pool_status(cli) == []
        assert listed(quick_master) == []
    finally:
        process.kill()
        process.wait(10)


def test_a_full_disk_under_the_log_ends_neither_the_agent_nor_its_tending(quick_master: Master, paths: Paths) -> None:
    with small_disk(paths.state, 512):
        report = provision(small_plan(quick_master), paths, mount=True)
        log = paths.log("dev")
        with log.open("ab") as file:  # to the end of a page, which leaves no room for another word
            file.write(b"\n" * (-log.stat().st_size % 4096))
        fill(paths.state)
        quick_master.kill()
        until(lambda: pool_status(paths)[0]["state"] == "degraded")
        quick_master.start()  # what follows cannot be recorded: the pool stays degraded and says why
        until(lambda: "could not record" in pool_status(paths)[0]["reason"], 20)
        assert is_running(report["agent_pid"], None)
        (paths.state / "filler").unlink()
        until(lambda: pool_status(paths)[0]["state"] == "ready", 20)
        assert teardown_pool("dev", paths, now=True)["state"] == "gone"
        assert listed(quick_master) == []
