"""A seam: the process kills itself at the step that EGMCTL_TEST_KILL names ("site:occurrence:before|after")."""

from __future__ import annotations

import os
import signal
from typing import Any

from egmctl.steps import watch


class Killer:
    def __init__(self, place: str) -> None:
        self.site, number, self.when = place.rsplit(":", 2)
        self.number = int(number)
        self.seen = 0

    def before(self, site: str, detail: dict[str, Any]) -> None:
        if site == self.site:
            self.seen += 1
            self._perhaps("before")

    def after(self, site: str, detail: dict[str, Any], error: BaseException | None) -> None:
        if site == self.site:
            self._perhaps("after")

    def _perhaps(self, when: str) -> None:
        if when == self.when and self.seen == self.number:
            os.kill(os.getpid(), signal.SIGKILL)


def install() -> None:
    watch(Killer(os.environ["EGMCTL_TEST_KILL"]))
