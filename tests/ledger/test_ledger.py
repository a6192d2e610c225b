from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from egmctl.errors import PreflightError
from egmctl.ledger import (
    ChunkRow,
    Ledger,
    LedgerUnreadable,
    LedgerWriteError,
    SegmentRow,
    boot_id,
    is_running,
    read_events,
    read_only,
    start_time,
)
from egmctl.steps import watch

BIG = (2**64 - 1, 2**63 + 5)


def create(path: Path, name: str = "dev", chunks: int = 3) -> Ledger:
    rows = [ChunkRow(index, 0, 16 << 20, None, "planned") for index in range(chunks)]
    return Ledger.create(path, who="test", name=name, plan={"pool": name}, chunks=rows, nonce="n1", client=BIG)


def segment(chunk: int, number: int, **changes: Any) -> SegmentRow:
    row: dict[str, Any] = {
        "id": (BIG[0], number),
        "chunk": chunk,
        "master": "m:1",
        "client": BIG,
        "name": f"e:1/numa0/{chunk}",
        "endpoint": "e:1",
        "base": 1 << 45,
        "size": 16 << 20,
        "protocol": "tcp",
    }
    return SegmentRow(**{**row, **changes})


def test_what_is_recorded_is_what_is_read_by_the_owner_and_by_others(tmp_path: Path) -> None:
    ledger = create(tmp_path / "dev.db")
    with ledger.record("mount begins", master="m:1"):
        ledger.add_segments([segment(0, 1), segment(1, 2)])
        ledger.set_chunks("mapped", [0, 1], {0: 1 << 45, 1: (1 << 45) + (16 << 20)})
        ledger.set_pool(state="mounting", master="m:1")
        ledger.put_resource("engine", "te", "present", pid=7)
    with ledger.record("mounted"):
        ledger.set_segments("mounted", [(BIG[0], 1)])
        ledger.put_resource("engine", "te", "removed")
    record = read_only(tmp_path / "dev.db")
    assert record == ledger.pool()
    assert record is not None
    assert [(row.id, row.state) for row in record.segments] == [((BIG[0], 1), "mounted"), ((BIG[0], 2), "mounting")]
    assert record.client == BIG
    assert record.masters == ("m:1",)
    assert [row.index for row in record.live_chunks] == [0, 1]
    assert record.resources[0].detail == {"pid": 7}
    assert record.resources[0].state == "removed"
    assert [event.what for event in read_events(tmp_path / "dev.db")] == ["provision begins", "mount begins", "mounted"]
    ledger.close()


def test_the_files_are_the_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        create(tmp_path / "dev.db").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "dev.db").stat().st_mode) == 0o600


def test_each_commit_is_synced_with_a_rollback_journal(tmp_path: Path) -> None:
    ledger = create(tmp_path / "dev.db")
    assert ledger._db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert ledger._db.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA
    ledger.close()


def test_a_change_is_on_disk_when_the_record_returns_even_if_the_process_is_killed_at_once(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import os
        from pathlib import Path
        from egmctl.ledger import Ledger
        ledger = Ledger.create(Path({str(tmp_path / "dev.db")!r}), who="t", name="dev", plan={{}}, chunks=[])
        with ledger.record("about to"):
            ledger.set_pool(state="mounting")
        with ledger.record("never recorded"):
            ledger.set_pool(state="ready")
            os.kill(os.getpid(), 9)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == -9, done.stderr
    record = read_only(tmp_path / "dev.db")
    assert record is not None
    assert record.state == "mounting"


def test_a_ledger_whose_writer_was_killed_in_the_middle_of_a_commit_reads_as_before_it(tmp_path: Path) -> None:
    path = tmp_path / "dev.db"
    create(path).close()
    program = textwrap.dedent(
        f"""
        import os, sqlite3
        db = sqlite3.connect({str(path)!r}, isolation_level=None)
        db.execute("PRAGMA cache_size = 1")
        db.execute("BEGIN")
        db.execute("UPDATE pool SET state = 'ready'")
        db.executemany("INSERT INTO event (at, who, what, detail) VALUES (0, ?, '', '{{}}')", [("x" * 4000,)] * 200)
        os.kill(os.getpid(), 9)
        """
    )
    subprocess.run([sys.executable, "-c", program], timeout=60)
    assert path.with_name("dev.db-journal").exists()  # hot: the next reader rolls it back
    record = read_only(path)
    assert record is not None
    assert record.state == "provisioning"


def test_a_new_life_of_a_pool_starts_with_new_rows_and_keeps_its_events(tmp_path: Path) -> None:
    ledger = create(tmp_path / "dev.db", chunks=5)
    with ledger.record("gone"):
        ledger.add_segments([segment(0, 1)])
        ledger.set_pool(state="gone")
    ledger.close()
    again = create(tmp_path / "dev.db", chunks=2)
    record = again.pool()
    assert (len(record.chunks), record.segments, record.state) == (2, (), "provisioning")
    assert [event.what for event in read_events(tmp_path / "dev.db")] == [
        "provision begins",
        "gone",
        "provision begins",
    ]
    again.close()


def test_a_change_that_fails_half_way_changes_nothing(tmp_path: Path) -> None:
    ledger = create(tmp_path / "dev.db")
    with pytest.raises(ValueError, match="no_such_column"), ledger.record("half"):
        ledger.set_pool(state="ready", no_such_column=1)
    assert ledger.pool().state == "provisioning"
    ledger.close()


@pytest.mark.parametrize(("version", "word"), [(99, "newer"), (0, "older")])
def test_a_ledger_of_another_schema_is_refused_by_number(tmp_path: Path, version: int, word: str) -> None:
    create(tmp_path / "dev.db").close()
    with sqlite3.connect(tmp_path / "dev.db") as db:
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    for act in (read_only, lambda path: Ledger.open(path, who="t"), create):
        with pytest.raises(LedgerUnreadable, match=f"schema {version}") as caught:
            act(tmp_path / "dev.db")
        assert word in caught.value.hint


def test_another_programs_database_is_not_touched(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "dev.db")
    db.execute("CREATE TABLE theirs (a)")
    db.commit()
    db.close()
    before = (tmp_path / "dev.db").read_bytes()
    with pytest.raises(LedgerUnreadable, match="another program"):
        create(tmp_path / "dev.db")
    assert (tmp_path / "dev.db").read_bytes() == before


@pytest.mark.parametrize(
    "damage", [b"not a database at all, and long enough to be one" * 40, b"SQLite format 3\0" + b"x" * 600]
)
def test_a_corrupted_ledger_is_refused_with_what_to_do(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "dev.db").write_bytes(damage)
    with pytest.raises(LedgerUnreadable) as caught:
        read_only(tmp_path / "dev.db")
    assert caught.value.exit_code == 3
    assert "move it away" in caught.value.hint
    with pytest.raises(PreflightError):
        create(tmp_path / "dev.db")
    assert (tmp_path / "dev.db").read_bytes() == damage


@pytest.mark.parametrize("length", [100, 5000, 9000])
def test_a_ledger_cut_short_is_refused_not_misread(tmp_path: Path, length: int) -> None:
    ledger = create(tmp_path / "dev.db", chunks=400)
    ledger.close()
    data = (tmp_path / "dev.db").read_bytes()
    assert len(data) > length
    (tmp_path / "dev.db").write_bytes(data[:length])
    with pytest.raises(LedgerUnreadable):
        read_only(tmp_path / "dev.db")


def test_a_file_whose_making_was_cut_short_holds_no_pool_and_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "dev.db").touch()
    assert read_only(tmp_path / "dev.db") is None
    create(tmp_path / "dev.db").close()
    assert read_only(tmp_path / "dev.db") is not None


def test_a_folder_that_cannot_be_written_is_a_preflight_error(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        (tmp_path / "ro").mkdir(mode=0o500)
        path = tmp_path / "ro" / "dev.db"
    else:  # root writes anywhere, but not where there is no folder
        path = Path("/proc/egmctl/dev.db")
    with pytest.raises(PreflightError, match="cannot be written") as caught:
        create(path)
    assert "--state-dir" in caught.value.hint


def test_a_commit_that_fails_is_reported_as_such_and_leaves_the_record_as_it_was(tmp_path: Path) -> None:
    ledger = create(tmp_path / "dev.db")

    class Full:
        def before(self, site: str, detail: dict[str, Any]) -> None:
            if site == "ledger.commit":
                raise OSError(28, "No space left on device")

        def after(self, site: str, detail: dict[str, Any], error: BaseException | None) -> None: ...

    watch(Full())
    try:
        with pytest.raises(LedgerWriteError, match="No space left") as caught, ledger.record("mounted"):
            ledger.set_pool(state="ready")
    finally:
        watch(None)
    assert caught.value.exit_code == 4
    assert ledger.pool().state == "provisioning"
    with ledger.record("mounted"):
        ledger.set_pool(state="ready")
    assert ledger.pool().state == "ready"
    ledger.close()


def test_a_thousand_chunks_are_recorded_in_few_syncs_and_little_time(tmp_path: Path) -> None:
    commits = []

    class Count:
        def before(self, site: str, detail: dict[str, Any]) -> None:
            commits.append(site)

        def after(self, site: str, detail: dict[str, Any], error: BaseException | None) -> None: ...

    watch(Count())
    try:
        ledger = create(tmp_path / "dev.db", chunks=1000)
        with ledger.record("mount begins"):
            ledger.add_segments([segment(index, index) for index in range(1000)])
        with ledger.record("mounted"):
            ledger.set_segments("mounted", [(BIG[0], index) for index in range(1000)])
    finally:
        watch(None)
    assert commits.count("ledger.commit") == 3
    assert len(ledger.pool().live_segments) == 1000
    ledger.close()


def test_a_pid_is_the_same_process_only_with_the_same_start() -> None:
    assert boot_id()
    mine = start_time(os.getpid())
    assert mine is not None
    assert is_running(os.getpid(), mine)
    assert not is_running(os.getpid(), mine + 1)
    assert not is_running(0, None)
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(child.pid, start_time(child.pid))  # a zombie is gone
    child.wait()


def test_a_ledger_that_is_being_written_for_long_is_not_called_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("egmctl.ledger.store.LOCK_SECONDS", 0.2)
    path = tmp_path / "dev.db"
    create(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as owner:
        owner.execute("BEGIN EXCLUSIVE")
        with pytest.raises(LedgerUnreadable, match="owner has been writing it") as caught:
            read_only(path)
        assert "move it away" not in caught.value.hint
        owner.execute("ROLLBACK")
    assert read_only(path) is not None
