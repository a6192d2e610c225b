"""Seams for egmctl's processes: each is named in ``EGMCTL_SEAMS`` by a test of this folder."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from egmctl import steps


class _Squeeze:
    """At the fifth piece of memory, the cgroup's limit comes down to little more than what is used."""

    def __init__(self) -> None:
        self.pieces = 0

    def before(self, site: str, detail: dict[str, Any]) -> None:
        if site != "memory.shm.populate":
            return
        self.pieces += 1
        if self.pieces == 5:
            folder = Path(os.environ["EGMCTL_TEST_CGROUP"])
            used = int((folder / "memory.usage_in_bytes").read_text())
            (folder / "memory.limit_in_bytes").write_text(str(used + (24 << 20)))

    def after(self, site: str, detail: dict[str, Any], error: BaseException | None) -> None:
        pass


def squeeze() -> None:
    steps.watch(_Squeeze())


class _Slow:
    """Every step takes a little, so that a signal at a random moment meets each of them sometimes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def before(self, site: str, detail: dict[str, Any]) -> None:
        time.sleep(self.seconds)

    def after(self, site: str, detail: dict[str, Any], error: BaseException | None) -> None:
        pass


def slow() -> None:
    """And a mark is left that the command has begun: an interrupt before that meets Python's own start."""
    mark = os.environ.get("EGMCTL_TEST_MARK")
    if mark:
        Path(mark).touch()
    steps.watch(_Slow(float(os.environ["EGMCTL_TEST_SLOW"])))
