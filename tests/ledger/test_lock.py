from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from egmctl.errors import BusyError, PreflightError
from egmctl.ledger import OwnerLock, holder_of

HOLD = """
import sys, time
from pathlib import Path
from egmctl.ledger import OwnerLock
lock = OwnerLock.acquire(Path(sys.argv[1]), "dev", "provisioning")
print("held", flush=True)
time.sleep(60)
"""


def hold(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_owner_is_refused_and_told_who_since_when_doing_what(tmp_path: Path) -> None:
    process = hold(tmp_path / "dev.lock")
    try:
        with pytest.raises(BusyError, match=f"process {process.pid}.* since .*provisioning") as caught:
            OwnerLock.acquire(tmp_path / "dev.lock", "dev", "teardown")
        assert caught.value.exit_code == 5
        assert caught.value.facts["pid"] == process.pid
        holder = holder_of(tmp_path / "dev.lock")
        assert holder is not None
        assert holder.pid == process.pid
    finally:
        process.kill()
        process.communicate()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    process = hold(tmp_path / "dev.lock")
    process.kill()
    process.communicate()
    assert (tmp_path / "dev.lock").exists()
    assert holder_of(tmp_path / "dev.lock") is None
    OwnerLock.acquire(tmp_path / "dev.lock", "dev", "teardown").release()


def test_a_released_lock_leaves_no_file_and_can_be_taken_again(tmp_path: Path) -> None:
    lock = OwnerLock.acquire(tmp_path / "dev.lock", "dev", "teardown")
    assert (tmp_path / "dev.lock").stat().st_mode & 0o777 == 0o600
    lock.release()
    lock.release()
    assert not (tmp_path / "dev.lock").exists()
    OwnerLock.acquire(tmp_path / "dev.lock", "dev", "teardown").release()


def test_a_child_that_outlives_the_holder_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = OwnerLock.acquire(tmp_path / "dev.lock", "dev", "teardown")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
    try:
        lock.release()
        OwnerLock.acquire(tmp_path / "dev.lock", "dev", "teardown").release()
    finally:
        child.kill()
        child.wait()


def test_of_many_who_take_and_release_only_one_holds_at_a_time(tmp_path: Path) -> None:
    inside: list[int] = []
    worst: list[int] = []

    def work() -> None:
        for _ in range(20):
            lock = OwnerLock.acquire(tmp_path / "dev.lock", "dev", "work", patience=30)
            inside.append(1)
            worst.append(len(inside))
            inside.pop()
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(worst) == 80
    assert max(worst) == 1


def test_a_lock_that_cannot_be_made_is_a_preflight_error(tmp_path: Path) -> None:
    place = Path("/proc/egmctl.lock") if os.geteuid() == 0 else tmp_path / "missing" / "dev.lock"
    with pytest.raises(PreflightError, match="cannot open the pool's lock"):
        OwnerLock.acquire(place, "dev", "teardown")
