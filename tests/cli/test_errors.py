"""What a person sees when something goes wrong: never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from egmctl.cli.output import printable
from tests.cli.conftest import Result

Egmctl = Callable[..., Result]

SEAM = """
import os, signal, sys
def install():
    import egmctl.topology
    def fail(*_args, **_named):
        raise {what}
    egmctl.topology.read_topology = fail
"""


@pytest.fixture
def failing(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """An environment in which reading the topology raises ``what``."""

    def make(what: str) -> dict[str, str]:
        (tmp_path / "failing_seam.py").write_text(SEAM.format(what=what))
        return {"EGMCTL_SEAMS": "failing_seam:install", "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)}

    return make


def test_an_unforeseen_exception_is_one_clear_line_and_a_log(
    egmctl: Egmctl, failing: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    result = egmctl("topology", "--json", env=failing("KeyError('lost')"))
    assert result.code == 1
    assert result.stderr.startswith("egmctl: error: this is a defect in egmctl: KeyError: 'lost'")
    assert "Traceback" not in result.stderr
    (log,) = tmp_path.glob("egmctl-defect-*.log")
    assert "Traceback" in log.read_text()
    assert str(log) in result.document["hint"]


def test_very_verbose_shows_the_traceback_instead(egmctl: Egmctl, failing: Callable[[str], dict[str, str]]) -> None:
    result = egmctl("-vv", "topology", env=failing("KeyError('lost')"))
    assert result.code == 1
    assert "Traceback" in result.stderr


def test_an_operating_system_error_carries_its_name_and_number(
    egmctl: Egmctl, failing: Callable[[str], dict[str, str]]
) -> None:
    result = egmctl("topology", env=failing("OSError(28, 'No space left on device', '/some/where')"))
    assert result.code == 1
    assert "No space left on device (ENOSPC 28)" in result.stderr
    assert "where: /some/where" in result.stderr


def test_an_interrupt_is_quiet(egmctl: Egmctl, failing: Callable[[str], dict[str, str]]) -> None:
    result = egmctl("topology", env=failing("KeyboardInterrupt"))
    assert result.code == 130
    assert result.stderr == "egmctl: interrupted\n"


def test_output_that_nobody_reads_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "egmctl", "topology", "--json"], stdout=writer, stderr=subprocess.PIPE, timeout=60
    )
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 1


def test_a_full_disk_behind_stdout_is_said() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "egmctl", "topology"], stdout=full, stderr=subprocess.PIPE, timeout=60, text=True
        )
    assert done.returncode == 1
    assert "ENOSPC" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", ["1", "2", "1 2"])
def test_closed_streams_are_no_defect(closed: str) -> None:
    redirections = " ".join(f"{fd}>&-" for fd in closed.split())
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m egmctl topology {redirections}', sys.executable], capture_output=True, timeout=60
    )
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


GARBAGE = [
    ("plan", "/dev/null"),
    ("plan", "/"),
    ("plan", "\x1b[31m"),
    ("plan", ""),
    ("plan", b"\xff\xfe"),
    ("topology", "--from", "/dev/null"),
    ("topology", "--sysfs-root", "/nonexistent"),
    ("topology", "--from", "x", "--sysfs-root", "y"),
    ("provision", "/dev/null"),
    ("mount", "../../etc/passwd"),
    ("mount", "no-such-pool"),
    ("teardown", "no-such-pool"),
    ("teardown", "a\nb"),
    ("status", "no-such-pool"),
    ("verify", "no-such-pool"),
    ("bench", "no-such-pool"),
    ("bench", "no-such-pool", "--block", "-1"),
    ("teardown",),
    ("teardown", "dev", "--all"),
    ("teardown", "dev", "--grace", "-1"),
    ("teardown", "dev", "--grace", "nan"),
    ("doctor", "--for", "paper"),
    ("--state-dir", "/proc/1/nothing", "mount", "dev"),
]


@pytest.mark.parametrize("arguments", GARBAGE)
def test_garbage_is_refused_in_words(egmctl: Egmctl, arguments: tuple[str | bytes, ...]) -> None:
    result = egmctl(*arguments, "--json")
    assert result.code in (2, 3)
    assert "Traceback" not in result.stderr
    assert "defect" not in result.stderr
    assert "\x1b" not in result.stderr
    assert result.document["exit"] == result.code


def test_control_characters_are_shown_not_obeyed() -> None:
    assert printable("pool \x1b[2J\x9b\u202e\ud800 é") == "pool \\x1b[2J\\x9b\\u202e\\ud800 é"


def test_a_state_dir_that_is_a_file_is_not_an_empty_list_of_pools(egmctl: Egmctl, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = egmctl("status", "--json", "--state-dir", str(tmp_path / "file"))
    assert result.code == 2
    assert result.document["where"] == str(tmp_path / "file")
