"""Asking another program: the limit holds, whatever the program does about being killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from egmctl import programs
from egmctl.memory import probe as probes
from egmctl.programs import ask_program

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def unkillable(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Process groups that a SIGKILL did not reach, as with a process in an uninterruptible driver call."""
    missed: list[int] = []
    monkeypatch.setattr(programs, "KILL_SECONDS", 0.2)
    monkeypatch.setattr(os, "killpg", lambda group, number: missed.append(group))
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: missed.append(process.pid))
    return missed


def release(missed: list[int]) -> None:
    for pid in missed:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in missed):  # a zombie exists too
        assert time.monotonic() < deadline, "nobody reaped it"
        time.sleep(0.02)


def test_one_that_answers_is_heard() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = ask_program([sys.executable, "-c", code], 30)
    assert (done.stdout, done.stderr, done.returncode) == (b"out\n", b"err\n", 3)


def test_one_that_cannot_be_killed_is_not_waited_for_and_leaves_no_zombie(unkillable: list[int]) -> None:
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        ask_program(SLEEP, 0.3)
    assert time.monotonic() - began < 5
    assert len(unkillable) == 1
    release(unkillable)


def test_a_probe_that_cannot_be_killed_is_reported_in_time(
    unkillable: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 61.5\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    began = time.monotonic()
    assert probes.probe("cuda-posix", 0, timeout=0.3).outcome == "timeout"
    assert time.monotonic() - began < 5
    release(unkillable)


def test_what_it_has_started_goes_with_it_and_does_not_prolong_the_wait() -> None:
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        ask_program(["/bin/sh", "-c", "sleep 61.25 & echo $!"], 0.5)
    assert time.monotonic() - began < 10
    pid = int(caught.value.stdout or b"0")
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
