"""The driver's contract, on the model everywhere and on the real driver where there is a GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from egmctl.memory.driver import CudaError, Driver
from tests.memory.contract import CASES, make_driver, run_child, run_here

_real: Driver | None = None


def _real_driver() -> Driver:
    global _real
    if _real is None:
        try:
            _real = make_driver("real", Path())
            if _real.device_count() == 0:
                pytest.skip("no GPU here")
        except CudaError as error:
            pytest.skip(f"no CUDA driver here: {error.message}")
    return _real


@pytest.mark.parametrize("side", ["model", pytest.param("real", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("_")])
def test_the_driver(side: str, name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    one = CASES[name]
    driver = _real_driver() if side == "real" else make_driver("model", tmp_path / "machine")
    seen = run_child(side, name) if one.child else run_here(one, driver, side, tmp_path / "machine")
    record_property("contract", (name, side, seen, one.why if side == "real" and one.real is not None else ""))
    assert seen == one.expect(side)
    if side == "model":
        assert driver.leaks() == {}  # type: ignore[attr-defined]


def test_a_case_that_ends_its_process_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fatal = next(name for name, one in CASES.items() if one.child and one.expected.startswith("killed by"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_child("model", fatal) == CASES[fatal].expected
    assert list(tmp_path.iterdir()) == []
