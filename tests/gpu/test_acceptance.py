"""The acceptance program itself: rehearsed on the model everywhere, and run small where there is a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from egmctl.memory.driver import CudaError, get_driver
from tests.support.master import REPOSITORY, MasterMissing, find_binary

FIGURES = (
    "provisioning goes at",
    "free memory is back",
    "with a foreign importer",
    "once the importer",
    "contract suite",
)


def claims(tmp_path: Path, *options: str) -> dict[str, Any]:
    try:
        find_binary("0.3.14")
        version = "0.3.14"
    except MasterMissing:
        version = "0.3.13"
    command = [sys.executable, "-m", "tests.gpu.acceptance", "--out", str(tmp_path), "--master", version, *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, timeout=280, check=False)
    document = json.loads((tmp_path / "acceptance.json").read_text())
    failed = {name: phase["error"] for name, phase in document["phases"].items() if "error" in phase}
    assert failed == {}, done.stdout.decode()
    return {claim["claim"]: claim for claim in document["claims"]}


def test_every_claim_that_is_no_figure_holds_on_the_model(tmp_path: Path) -> None:
    phases = "documents,fabric,warm,life,held,rate"
    found = claims(
        tmp_path, "--model", "--bytes=32MiB", "--chunk=16MiB", "--rate-bytes=32MiB", "--rounds=1", f"--phases={phases}"
    )
    assert len(found) >= 12
    assert [name for name, claim in found.items() if not claim["holds"] and not name.startswith(FIGURES)] == []


@pytest.mark.gpu
def test_every_claim_holds_on_this_gpu_host(tmp_path: Path) -> None:
    try:
        gpus = get_driver().device_count()
    except CudaError as error:
        pytest.skip(f"no CUDA driver here: {error.message}")
    found = claims(tmp_path, "--bytes=8GiB", "--chunk=2GiB", "--rate-bytes=8GiB", "--rounds=3")
    wrong = [name for name, claim in found.items() if not claim["holds"]]
    if gpus < 2:
        wrong = [name for name in wrong if "second GPU" not in name]
    assert wrong == []
