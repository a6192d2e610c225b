"""The record of what was published under a fixed port outlives pools, and is never guessed at."""

from __future__ import annotations

from pathlib import Path

import pytest

from egmctl.errors import PreflightError
from egmctl.paths import Paths
from egmctl.provider.remembered import recall, remember


@pytest.fixture
def here(tmp_path: Path) -> Paths:
    (tmp_path / "state").mkdir()
    return Paths(tmp_path / "state", tmp_path / "run")


def test_ranges_are_kept_for_each_endpoint_and_joined(here: Paths) -> None:
    assert recall(here, "a:1") == []
    remember(here, "a:1", [(200, 300), (100, 200)])
    remember(here, "a:1", [(150, 250), (400, 500)])
    remember(here, "a:2", [(1, 2)])
    assert recall(here, "a:1") == [(100, 300), (400, 500)]
    assert recall(here, "a:2") == [(1, 2)]


@pytest.mark.parametrize("damage", [b"", b"{", b"{}", b'{"ranges": [[1]]}', b'{"ranges": 3}'])
def test_a_damaged_record_is_refused_and_neither_ignored_nor_replaced(here: Paths, damage: bytes) -> None:
    remember(here, "a:1", [(1, 2)])
    (path,) = here.state.iterdir()
    path.write_bytes(damage)
    with pytest.raises(PreflightError, match="cannot be read") as caught:
        recall(here, "a:1")
    assert str(path) in caught.value.where
    with pytest.raises(PreflightError):
        remember(here, "a:1", [(3, 4)])
    assert path.read_bytes() == damage


def test_a_record_that_cannot_be_written_is_said(here: Paths) -> None:
    here.state.rmdir()
    with pytest.raises(PreflightError, match="cannot write down"):
        remember(here, "a:1", [(1, 2)])
