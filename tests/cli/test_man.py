"""The manual pages say what the commands say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from egmctl.cli.groups import COMMANDS
from tests.cli.conftest import Result

MAN = Path(__file__).resolve().parents[2] / "man"
PAGES = ["egmctl", *(f"egmctl-{name}" for name in COMMANDS)]
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


def test_the_committed_pages_are_those_that_the_commands_give(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(MAN / "generate.py"), str(tmp_path)], check=True, timeout=60)
    written = {page.name: page.read_text() for page in tmp_path.glob("*.1")}
    committed = {page.name: page.read_text() for page in MAN.glob("*.1")}
    assert sorted(committed) == sorted(f"{page}.1" for page in PAGES)
    assert committed == written, "run `make man`"


@pytest.mark.parametrize("page", PAGES)
def test_page_and_help_list_the_same_options(egmctl: Callable[..., Result], page: str) -> None:
    text = egmctl(*page.split("-")[1:], "--help").stdout
    listed = text.partition("\nOptions:")[2].partition("\nExamples")[0]
    in_help = {
        name for line in listed.splitlines() if line.startswith("  -") for name in OPTION.findall(line.split("  ")[1])
    }
    roff = (MAN / f"{page}.1").read_text().replace("\\-", "-")
    tags = re.findall(r"^\.TP\n(\\fB-.*)$", roff, re.MULTILINE)
    in_page = {name for tag in tags for name in re.findall(r"\\fB(-[a-z-]+)\\fR", tag)}
    assert "--help" in in_help
    assert in_page == in_help


@pytest.mark.parametrize("page", PAGES)
def test_every_page_has_the_sections_a_reader_looks_for(page: str) -> None:
    titles = re.findall(r"^\.SH (.+)$", (MAN / f"{page}.1").read_text(), re.MULTILINE)
    for title in ("NAME", "SYNOPSIS", "DESCRIPTION", "EXIT STATUS", "ENVIRONMENT", "EXAMPLES", "SEE ALSO"):
        assert title in titles


@pytest.mark.parametrize("page", ["egmctl", "egmctl-mount", "egmctl-provision"])
def test_the_pages_warn_that_the_transfer_engine_listens_everywhere(page: str) -> None:
    text = (MAN / f"{page}.1").read_text()
    assert "all network interfaces" in text.partition(".SH SECURITY")[2]


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
@pytest.mark.parametrize("page", PAGES)
def test_groff_has_nothing_to_complain_about(page: str) -> None:
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-rLL=200n", str(MAN / f"{page}.1")], capture_output=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stderr == b""
