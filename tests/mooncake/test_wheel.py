"""Which wheel is installed and what it can do: the real one, and folders that stand for others."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from egmctl.errors import PreflightError
from egmctl.mooncake import wheel
from egmctl.mooncake.wheel import find_master_binary, require_nvlink, require_transfer_engine, wheel_info


@pytest.fixture(autouse=True)
def _probe_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "_known", None)
    monkeypatch.delenv("EGMCTL_MOONCAKE_MASTER", raising=False)
    return


def other_wheel(
    folder: Path, monkeypatch: pytest.MonkeyPatch, engine: str, distribution: str = "mooncake-transfer-engine-cuda13"
) -> None:
    """A `mooncake` module of our own stands before the installed one, here and in child processes."""
    (folder / "mooncake").mkdir()
    (folder / "mooncake" / "__init__.py").touch()
    (folder / "mooncake" / "engine.py").write_text(engine)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(wheel, "_installed", lambda: (distribution, "0.3.14"))


def test_the_installed_wheel_is_found_with_its_version_and_flavour() -> None:
    info = wheel_info()
    assert info.importable
    assert info.distribution == "mooncake-transfer-engine-non-cuda"
    assert info.flavour == "non-cuda"
    assert info.version is not None
    assert info.version[0].isdigit()
    assert info.has_nvlink is False
    assert info.missing_libraries == ()
    assert require_transfer_engine() == info


def test_finding_out_does_not_import_the_wheel_into_this_process() -> None:
    code = (
        "import sys; from egmctl.mooncake.wheel import *; assert wheel_info().importable; find_master_binary();"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'mooncake']"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_second_question_costs_nothing() -> None:
    wheel_info()
    began = time.monotonic()
    for _ in range(1000):
        wheel_info()
    assert time.monotonic() - began < 0.1


def test_a_wheel_without_nvlink_is_refused_where_nvlink_is_needed() -> None:
    with pytest.raises(PreflightError, match="SUPPORT_MNNVL") as caught:
        require_nvlink()
    assert caught.value.exit_code == 3
    assert "arm64" in caught.value.hint


def test_a_wheel_with_nvlink_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_wheel(tmp_path, monkeypatch, "SUPPORT_MNNVL = True\nSUPPORT_CUDA = True\n")
    info = require_nvlink()
    assert (info.has_nvlink, info.has_cuda, info.flavour) == (True, True, "cuda13")


def test_a_wheel_that_does_not_say_whether_it_has_nvlink_is_unknown_not_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_wheel(tmp_path, monkeypatch, "print('noise on stdout')\n")
    assert wheel_info().importable
    assert wheel_info().has_nvlink is None


def test_without_a_wheel_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "_installed", lambda: (None, None))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nonexistent")
    for need in (require_transfer_engine, find_master_binary, require_nvlink):
        with pytest.raises(PreflightError) as caught:
            need()
        assert caught.value.exit_code == 3
        assert "pip install 'egmctl[mooncake]'" in caught.value.hint


@pytest.mark.parametrize(
    ("library", "hint"),
    [
        ("libibverbs.so.1", "apt-get install libibverbs1 libnuma1 libcurl4"),
        ("libnuma.so.1", "apt-get install libibverbs1 libnuma1 libcurl4"),
        ("libcurl.so.4", "apt-get install libibverbs1 libnuma1 libcurl4"),
        ("libcuda.so.1", "NVIDIA's driver"),
        ("libstrange.so.3", "libstrange.so.3"),
    ],
)
def test_a_missing_system_library_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, hint: str
) -> None:
    text = f"{library}: cannot open shared object file: No such file or directory"
    other_wheel(tmp_path, monkeypatch, f"raise ImportError({text!r})\n")
    assert wheel_info().missing_libraries == (library,)
    with pytest.raises(PreflightError, match=library) as caught:
        require_transfer_engine()
    assert hint in caught.value.hint
    assert caught.value.facts["missing_libraries"] == [library]
    assert "0.3.14" in caught.value.where


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("import os; os._exit(7)", "exit 7"),
        ("raise RuntimeError('broken')", "RuntimeError: broken"),
        ("raise SystemExit(3)", "SystemExit"),
    ],
)
def test_a_wheel_that_crashes_at_import_crashes_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, said: str
) -> None:
    other_wheel(tmp_path, monkeypatch, engine)
    with pytest.raises(PreflightError, match=said) as caught:
        require_transfer_engine()
    assert caught.value.hint


def test_a_wheel_that_hangs_at_import_is_given_up_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_wheel(tmp_path, monkeypatch, "import time; time.sleep(60)")
    began = time.monotonic()
    with pytest.raises(PreflightError, match="more than 1 s"):
        require_transfer_engine(timeout=1)
    assert time.monotonic() - began < 5


def test_the_masters_program_is_the_wheels_own_and_runs() -> None:
    binary = find_master_binary()
    assert binary.name == "mooncake_master"
    assert "site-packages" in str(binary)
    assert os.access(binary, os.X_OK)


def test_another_masters_program_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "my_master"
    mine.write_text("#!/bin/sh\n")
    monkeypatch.setenv("EGMCTL_MOONCAKE_MASTER", str(mine))
    with pytest.raises(PreflightError, match="not a program") as caught:
        find_master_binary()
    assert "chmod" in caught.value.hint
    mine.chmod(0o755)
    assert find_master_binary() == mine
