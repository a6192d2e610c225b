"""Ctrl-C while egmctl starts: the imports are most of what a short command does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# As the installed command does it, but that one module's import comes with an interrupt: as it is found, in the
# finalizer of something that its finding used (importlib has such ones), in a name that a class sets (enum has).
START = """
import signal, sys
_, module, how, *rest = sys.argv

class Finding:
    def find_spec(self, name, path, target=None):
        if name == module:
            sys.meta_path.remove(self)
            globals()[how]()

def plainly():
    signal.raise_signal(signal.SIGINT)

class Used:
    def __del__(self):
        plainly()
        for _ in range(100):
            pass

def finalizer():
    Used()

class Name:
    def __set_name__(self, owner, name):
        plainly()

def naming():
    type("Named", (), {"name": Name()})

sys.meta_path.insert(0, Finding())
from egmctl.__main__ import run
sys.argv[1:] = rest
sys.exit(run())
"""

Done = subprocess.CompletedProcess[str]


def start(module: str, how: str, state: Path, *, ignoring: bool = False) -> Done:
    def inherit() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignoring else signal.SIG_DFL)

    return subprocess.run(
        [sys.executable, "-c", START, module, how, "status", "--state-dir", str(state)],
        env={**os.environ, "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=inherit,
    )


@pytest.mark.parametrize("how", ["plainly", "finalizer", "naming"])
@pytest.mark.parametrize("module", ["egmctl.cli.main", "egmctl.cli.output", "typer", "egmctl.cli.commands.status"])
def test_an_interrupt_during_the_imports_ends_it_without_a_word(module: str, how: str, state: Path) -> None:
    done = start(module, how, state)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_first_import_of_all_is_covered_too(state: Path) -> None:
    done = start("egmctl.cli.starting", "plainly", state)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("how", ["plainly", "naming"])
def test_in_a_command_an_interrupt_can_still_be_handled(how: str, state: Path) -> None:
    done = start("egmctl.provider.commands", how, state)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "egmctl: interrupted\n")


def test_interrupts_that_are_ignored_stay_ignored(state: Path) -> None:
    assert start("typer", "plainly", state, ignoring=True).returncode == 0
    assert start("egmctl.provider.commands", "plainly", state, ignoring=True).returncode == 0
