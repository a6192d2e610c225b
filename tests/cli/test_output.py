"""What goes to which stream, with and without a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from egmctl.cli.output import Output
from egmctl.cli.progress import Progress
from egmctl.provider.progress import ProgressEvent
from tests.cli.conftest import Result

MIB = 1 << 20

WORK = """
from egmctl.cli.output import Output
from egmctl.cli.progress import Progress
from egmctl.provider.progress import ProgressEvent
output = Output()
with Progress(output) as progress:
    for done in range(11):
        progress(ProgressEvent("allocate", "allocating [bold]x", done << 20, 10 << 20, "bytes"))
    progress(ProgressEvent("check", "checking"))
output.table(("pool", "bytes"), [("[red]dev", 1)], right=(1,))
"""


def _on_a_terminal(arguments: list[str], **environment: str) -> str:
    """What a terminal receives from a process whose stdout and stderr it is."""
    leader, follower = pty.openpty()
    clean = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=follower, stderr=follower, env=clean | {"TERM": "xterm"} | environment
    )
    os.close(follower)
    received = b""
    try:
        while block := os.read(leader, 65536):
            received += block
    except OSError:  # how the end of the other side is told
        pass
    os.close(leader)
    assert process.wait(60) == 0
    return received.decode()


def test_on_a_terminal_progress_is_a_bar_and_a_table_is_drawn() -> None:
    text = _on_a_terminal(["-c", WORK])
    assert "\x1b[" in text
    assert "10 MiB of 10 MiB" in text
    assert "━" in text
    assert "allocating [bold]x" in text  # what comes from outside is not markup
    assert "[red]dev" in text


def test_with_no_color_a_terminal_gets_plain_lines() -> None:
    text = _on_a_terminal(["-c", WORK], NO_COLOR="1")
    assert "\x1b" not in text
    assert "allocating [bold]x: 10 MiB of 10 MiB" in text


def test_errors_are_coloured_on_a_terminal_only(egmctl: Callable[..., Result]) -> None:
    arguments = ["-c", "import sys; from egmctl.cli.main import main; main(['plna'])"]
    assert "\x1b[1;31megmctl: error:\x1b[0m" in _on_a_terminal(arguments)
    assert "\x1b" not in egmctl("plna").stderr


def test_away_from_a_terminal_progress_is_a_few_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(Output()) as progress:
        for done in range(1001):
            progress(ProgressEvent("allocate", f"allocating chunk {done // 100}", done * MIB, 1000 * MIB, "bytes"))
        progress(ProgressEvent("check", "checking placement"))
        progress(ProgressEvent("check", "checking placement"))
        progress(ProgressEvent("check", "checking the agent"))
    seen = capsys.readouterr()
    assert seen.out == ""
    lines = seen.err.splitlines()
    assert lines[0] == "allocating chunk 0: 0 B of 1000 MiB"
    assert lines[1].startswith("allocating chunk 10: 1000 MiB of 1000 MiB")
    assert lines[2:] == ["checking placement", "checking the agent"]


def test_quiet_says_nothing_but_results_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    output.quiet = True
    with Progress(output) as progress:
        progress(ProgressEvent("allocate", "allocating", 1, 2, "bytes"))
    output.note("a note")
    output.warn("a warning")
    output.line("a result")
    seen = capsys.readouterr()
    assert (seen.out, seen.err) == ("a result\n", "egmctl: warning: a warning\n")


def test_with_json_everything_for_a_person_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    output.json = True
    output.line("for a person")
    output.table(("a",), [("b",)])
    output.emit("status", {"pools": []}, lambda: output.line("not said"))
    seen = capsys.readouterr()
    assert seen.out == '{\n  "schema": "egmctl/status/1",\n  "pools": []\n}\n'
    assert seen.err == "for a person\na\nb\n"


def test_a_plain_table_aligns_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    Output().table(("pool", "bytes"), [("dev", 5), ("production", 1000)], right=(1,))
    assert capsys.readouterr().out == "pool        bytes\ndev             5\nproduction   1000\n"


def test_a_plan_is_shown_saved_and_refused_where_a_spec_is_wanted(
    egmctl: Callable[..., Result], tmp_path: Path
) -> None:
    spec = tmp_path / "dev.toml"
    spec.write_text(
        '[pool]\nname = "dev"\nmemory = "shm"\nenable_egm_store_pool = true\nglobal_segment_size = "40MiB"\n'
        '[mooncake]\nprotocol = "tcp"\nlocal_hostname = "127.0.0.1"\nmaster_server_addr = "127.0.0.1:50051"\n'
    )
    shown = egmctl("plan", str(spec), "--numa", "0", "--out", "plan.json", cwd=tmp_path)
    assert shown.code == 0
    assert "asked for 40 MiB, rounded down to a multiple of 16 MiB" in shown.stdout
    assert "saved to plan.json" in shown.stderr
    document = egmctl("plan", str(spec), "--numa", "0", "--json").document
    assert (document["requested_bytes"], document["effective_bytes"]) == (40 * MIB, 32 * MIB)
    assert document["chunks"] == [{"index": 0, "numa_node": 0, "bytes": 32 * MIB}]
    refused = egmctl("plan", "plan.json", cwd=tmp_path)
    assert refused.code == 2
    assert "egmctl provision plan.json" in refused.stderr
