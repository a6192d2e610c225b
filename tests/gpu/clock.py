"""A seam that writes how long each step of a process took: one JSON line a step to ``EGMCTL_CLOCK``."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

from egmctl import steps

__all__ = ["install"]


class _Clock:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._began = threading.local()

    def before(self, site: str, detail: dict[str, Any]) -> None:
        setattr(self._began, site, time.perf_counter())

    def after(self, site: str, detail: dict[str, Any], error: BaseException | None) -> None:
        took = time.perf_counter() - getattr(self._began, site)
        os.write(self._fd, json.dumps({"pid": os.getpid(), "site": site, "s": took}).encode() + b"\n")


def install() -> None:
    steps.watch(_Clock(os.environ["EGMCTL_CLOCK"]))
