"""The measured fragment size at which the engine takes over is kept for the machine it was measured on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from egmctl.consumer.copy import make_copier
from egmctl.consumer.copy.options import DEFAULT_KERNEL_BELOW, CopyOptions, Thresholds
from tests.consumer.copy.conftest import Machine, ModelMachine


def test_calibration_is_remembered_by_the_next_copier(machine: Machine) -> None:
    copier = machine.copier()
    try:
        measured = copier.calibrate()
    finally:
        copier.close()
    assert measured.saved
    assert 16 << 10 <= measured.get <= 2 << 20
    assert 16 << 10 <= measured.put <= 2 << 20
    again = Thresholds(machine.driver, 0, machine.options())
    assert (again.kernel_below("get"), again.kernel_below("put")) == (measured.get, measured.put)


def test_what_another_gpu_or_driver_measured_is_not_used(model: ModelMachine) -> None:
    Thresholds(model.driver, 0, model.options()).save({"get": 12345, "put": 54321})
    document = json.loads(model.cache.read_text())
    document["kernel_below"] = {f"other {key}": value for key, value in document["kernel_below"].items()}
    model.cache.write_text(json.dumps(document))
    assert Thresholds(model.driver, 0, model.options()).kernel_below("get") == DEFAULT_KERNEL_BELOW


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kernel_below": 3}', '{"kernel_below": {"x|get": "y"}}', "\xff"])
def test_a_cache_that_cannot_be_read_counts_as_none_and_can_be_replaced(model: ModelMachine, text: str) -> None:
    model.cache.write_bytes(text.encode("latin-1"))
    thresholds = Thresholds(model.driver, 0, model.options())
    assert thresholds.kernel_below("put") == DEFAULT_KERNEL_BELOW
    assert thresholds.save({"put": 4096})
    assert Thresholds(model.driver, 0, model.options()).kernel_below("put") == 4096


def test_a_cache_that_cannot_be_written_is_said_and_the_measurement_used(model: ModelMachine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    thresholds = Thresholds(model.driver, 0, CopyOptions(cache=tmp_path / "file" / "copy.json"))
    assert thresholds.save({"get": 77}) is False
    assert thresholds.kernel_below("get") == 77


def test_a_threshold_that_is_given_wins_over_a_measured_one(model: ModelMachine) -> None:
    Thresholds(model.driver, 0, model.options()).save({"get": 12345, "put": 54321})
    assert Thresholds(model.driver, 0, model.options(kernel_below=1)).kernel_below("get") == 1


def test_the_cache_lies_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert CopyOptions().cache_path == tmp_path / "egmctl" / "copy.json"


def test_only_what_is_not_known_is_measured(model: ModelMachine) -> None:
    copier = make_copier(model.driver, [0, 1], model.options(), kernels=model.kernels)
    assert copier.calibrate_unknown() == [0], "the second one is of the same kind"
    assert copier.calibrate_unknown() == []
    copier.close()
    for changes in ({}, {"kernel_below": 5}, {"strategy": "engine"}):
        other = model.copier(**changes)
        assert other.calibrate_unknown() == []
        other.close()
    model.cache.unlink()
    fixed = model.copier(kernel_below=5)
    assert fixed.calibrate_unknown() == []
    fixed.close()
    assert not model.cache.exists()
