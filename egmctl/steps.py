"""Every act on the outside world goes through a named step, so that it can be traced, and made to fail, in tests.

In production nothing watches and a step costs one attribute look-up. A test installs a `Watcher`, in its own process or
through `egmctl.seams` in a child, which records the order of steps and may raise, hang or kill before or after any.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

__all__ = ["Watcher", "step", "watch"]


class Watcher(Protocol):
    """Told of each step; what it raises from ``before`` is what the step fails with."""

    def before(self, site: str, detail: dict[str, Any]) -> None: ...

    def after(self, site: str, detail: dict[str, Any], error: BaseException | None) -> None: ...


_watcher: Watcher | None = None


def watch(watcher: Watcher | None) -> None:
    """Install the watcher of this process, or none."""
    global _watcher
    _watcher = watcher


class step:  # lower case, since it reads as a statement: with step("ledger.commit"): ...
    """``with step("memory.shm.populate", chunk=3):`` around one act.

    ``site`` is a string literal, dotted, unique to the place in the code: the fault harness finds all of them by
    reading the source and fails when one is never exercised. ``detail`` never holds a handle.
    """

    __slots__ = ("detail", "site")

    def __init__(self, site: str, **detail: Any) -> None:
        self.site = site
        self.detail = detail

    def __enter__(self) -> step:
        if _watcher is not None:
            _watcher.before(self.site, self.detail)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _watcher is not None:
            _watcher.after(self.site, self.detail, error)
