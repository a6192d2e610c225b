"""The program that measures the consumer works, and what it checks besides speed holds: all of it on the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.master import REPOSITORY, MasterMissing, find_binary


def rehearse(tmp_path: Path, *parts: int) -> list[dict[str, Any]]:
    """Rows of a rehearsal of these parts; the program's end is judged as well."""
    try:
        newer = find_binary("0.3.14")
    except MasterMissing as missing:
        pytest.skip(str(missing))
    target = tmp_path / "figures.json"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.benchmarks.consumer_h200",
            "--rehearse",
            "--only",
            ",".join(map(str, parts)),
            "--json",
            str(target),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "EGMCTL_MOONCAKE_MASTER": str(newer)},
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(target.read_text())["results"]
    assert {row["part"] for row in rows} == set(parts)
    assert not [row for row in rows if row["good"] is False]
    return rows


def test_every_figure_can_be_measured_and_its_bytes_are_right(tmp_path: Path) -> None:
    rows = rehearse(tmp_path, 1, 2, 3, 4)
    assert len([row for row in rows if row["target"] is not None]) >= 16


def test_a_provider_killed_and_started_anew_at_the_same_address_never_yields_wrong_bytes(tmp_path: Path) -> None:
    same, across, untouched, gets = rehearse(tmp_path, 6)
    assert same["addresses_before"] == same["addresses_after"]
    assert same["old_segments_listed"] > 0
    assert across["wrong"] == 0
    assert sum(across["counts"].values()) >= 1000
    assert untouched["good"]
    assert gets["gets"] >= 800


def test_threads_and_processes_put_and_get_without_growth(tmp_path: Path) -> None:
    for row in rehearse(tmp_path, 7):
        assert row["grown"]["descriptors"] <= 0
        assert row["grown"]["imports"] <= 0
