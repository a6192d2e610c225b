"""Running egmctl as a person would: a process of its own, with a state dir of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Result"]


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document that stdout holds."""
        found = json.loads(self.stdout)
        assert isinstance(found, dict)
        return found


@pytest.fixture
def state() -> Iterator[Path]:
    """A short-named folder for a state dir, private and gone afterwards."""
    folder = tempfile.mkdtemp(prefix="egm", dir="/tmp")
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def egmctl(state: Path) -> Callable[..., Result]:
    """``egmctl("plan", "spec.toml", env={...})`` -> `Result`, with ``EGMCTL_STATE_DIR`` set to `state`."""

    def run(*arguments: str | bytes, env: dict[str, str] | None = None, **options: Any) -> Result:
        environment = {**os.environ, "EGMCTL_STATE_DIR": str(state), "NO_COLOR": "1", **(env or {})}
        done = subprocess.run(
            [sys.executable, "-m", "egmctl", *arguments],
            env=environment,
            capture_output=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
            **options,
        )
        return Result(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run
