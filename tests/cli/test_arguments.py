"""Where options may stand, what wrong usage says, and what help costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from egmctl.cli.groups import COMMANDS
from tests.cli.conftest import Result

Egmctl = Callable[..., Result]


@pytest.mark.parametrize(
    "arguments", [("--json", "topology"), ("topology", "--json"), ("-q", "topology", "--json", "-v")]
)
def test_global_options_are_accepted_before_and_after_the_command(egmctl: Egmctl, arguments: tuple[str, ...]) -> None:
    result = egmctl(*arguments)
    assert result.code == 0
    assert result.document["schema"] == "egmctl/topology/1"


def test_the_state_dir_is_taken_from_either_side_of_the_command(egmctl: Egmctl, tmp_path: Path) -> None:
    (tmp_path / "seen.db").write_text("no ledger, but it is listed")
    assert egmctl("status", "--json").document["pools"] == []
    for arguments in (("--state-dir", str(tmp_path), "status"), ("status", f"--state-dir={tmp_path}")):
        assert [pool["name"] for pool in egmctl(*arguments, "--json").document["pools"]] == ["seen"]


def test_a_global_option_that_is_another_options_value_is_left_to_it(egmctl: Egmctl, tmp_path: Path) -> None:
    result = egmctl("topology", "--save", "--json", cwd=tmp_path)
    assert result.code == 0
    assert (tmp_path / "--json").is_file()
    assert not result.stdout.startswith("{")


def test_after_two_dashes_nothing_is_an_option(egmctl: Egmctl, tmp_path: Path) -> None:
    result = egmctl("plan", "--", "--json", cwd=tmp_path)
    assert result.code == 2
    assert result.stdout == ""
    assert "where: --json" in result.stderr


def test_version_is_one_line_wherever_it_stands(egmctl: Egmctl) -> None:
    assert egmctl("--version").stdout == egmctl("plan", "--version").stdout == "egmctl 0.1.0\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_and_the_global_options(egmctl: Egmctl, command: str) -> None:
    result = egmctl(command, "--help")
    assert result.code == 0
    assert "Examples" in result.stdout
    assert f"egmctl {command}" in result.stdout.partition("Examples")[2]
    for option in ("--state-dir", "--json", "-v", "-q", "--version"):
        assert option in result.stdout
    assert result.stderr == ""


def test_root_help_names_every_command_and_exit_code(egmctl: Egmctl) -> None:
    text = egmctl("--help").stdout
    for command, summary in COMMANDS.items():
        assert f"  {command} " in text
        assert summary.split(",")[0][:30] in text
    for code in range(8):
        assert f"{code} " in text.partition("Exit status")[2]


def test_without_arguments_help_goes_to_stderr_and_usage_was_wrong(egmctl: Egmctl) -> None:
    result = egmctl()
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: egmctl")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("plna",), "did you mean 'plan'"),
        (("plan",), "SPEC"),
        (("plan", "--outt", "x", "spec"), "--out"),
        (("plan", "a", "b"), "b"),
        (("topology", "--save"), "--save"),
        (("--json",), "command"),
        (("teardown", "--grace", "soon", "dev"), "soon"),
    ],
)
def test_wrong_usage_exits_2_in_three_parts_and_as_a_document(
    egmctl: Egmctl, arguments: tuple[str, ...], says: str
) -> None:
    result = egmctl(*arguments)
    assert result.code == 2
    assert result.stderr.startswith("egmctl: error: ")
    assert says in result.stderr
    assert "  do: see egmctl" in result.stderr
    document = egmctl("--json", *arguments).document
    assert (document["schema"], document["code"], document["exit"]) == ("egmctl/error/1", "usage", 2)
    assert document["message"]
    assert document["hint"]


HEAVY = ("cuda", "pynvml", "mooncake", "sqlite3", "numpy", "psutil", "asyncio", "multiprocessing", "rich.console")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plan", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    program = (
        "import sys, egmctl.cli.main as m; code = m.main(sys.argv[1:]);"
        "print(*sorted(sys.modules), sep='\\n', file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    modules = set(done.stderr.split())
    assert "egmctl.cli.main" in modules
    assert not modules & set(HEAVY)
    own = {m for m in modules if m.startswith("egmctl.")}
    wanted = {
        "egmctl.cli",
        "egmctl.cli.main",
        "egmctl.cli.groups",
        "egmctl.cli.output",
        "egmctl.cli.starting",
        "egmctl.errors",
        "egmctl.seams",
    }
    if arguments[0] != "plan":
        assert own == wanted


def _cpu(arguments: list[str]) -> float:
    """The least user and system seconds of a few runs: the one least disturbed by neighbours."""

    def once() -> float:
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return usage.ru_utime + usage.ru_stime

    return min(once() for _ in range(7))


def test_help_costs_at_most_twice_the_cpu_of_importing_typer_and_rich() -> None:
    help_text = _cpu([sys.executable, "-m", "egmctl", "--help"])
    imports = _cpu([sys.executable, "-c", "import typer, rich"])
    assert help_text <= 2 * imports, f"{help_text:.3f} s against {imports:.3f} s"


@pytest.mark.parametrize("command", ["topology", "status"])
def test_json_leaves_stdout_with_exactly_one_document_even_when_verbose(egmctl: Egmctl, command: str) -> None:
    result = egmctl(command, "--json", "-vv")
    assert result.code == 0
    assert json.loads(result.stdout)["schema"] == f"egmctl/{command}/1"
