"""A caller's current GPU stays the caller's: frameworks take it for granted that nobody else changes it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["keeps_device"]

F = TypeVar("F", bound=Callable[..., Any])


def keeps_device(method: F) -> F:
    """Leave the calling thread's current CUDA context as it was found; a thread that had none keeps what it got.

    For methods of objects with a ``_driver`` (None: no GPU, nothing to keep).
    """

    @functools.wraps(method)
    def kept(self: Any, *arguments: Any, **more: Any) -> Any:
        driver = self._driver
        if driver is None:
            return method(self, *arguments, **more)
        before = driver.current_context()
        try:
            return method(self, *arguments, **more)
        finally:
            if before and driver.current_context() != before:
                driver.set_current_context(before)

    return cast("F", kept)
