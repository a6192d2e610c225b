"""The one tree of errors: what failed, where, what to do next, and the exit code that says so.

Exit codes are the contract of the command line: 1 failed and undone, 2 wrong usage, 3 the machine cannot do it,
4 cleanup pending, 5 busy, 6 the plan is stale, 7 verification failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "BusyError",
    "CleanupPendingError",
    "EgmError",
    "FailedError",
    "PreflightError",
    "StalePlanError",
    "UsageError",
    "VerificationError",
]


class EgmError(Exception):
    """An error a person can act on.

    ``message`` says what failed (with the driver's or Mooncake's own name and number), ``where`` names the pool,
    chunk, node, file or endpoint, ``hint`` what to do next. ``facts`` are the same things as data, for ``--json``.
    """

    code: str = "failed"
    exit_code: ClassVar[int] = 1

    def __init__(
        self, message: str, *, where: str = "", hint: str = "", facts: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint
        self.facts: dict[str, Any] = dict(facts or {})

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message

    def document(self) -> dict[str, Any]:
        """The error as the JSON document ``egmctl/error/1``."""
        document: dict[str, Any] = {
            "schema": "egmctl/error/1",
            "code": self.code,
            "message": self.message,
            "where": self.where,
            "hint": self.hint,
            "exit": self.exit_code,
        }
        if self.facts:
            document["facts"] = self.facts
        return document


class FailedError(EgmError):
    """The work failed and what was done of it has been undone."""


class UsageError(EgmError):
    """Wrong usage, an unreadable spec or plan, an unknown pool."""

    code = "usage"
    exit_code = 2


class PreflightError(EgmError):
    """The machine cannot do it; nothing was touched."""

    code = "preflight"
    exit_code = 3


class CleanupPendingError(EgmError):
    """Something could not be undone yet; the ledger holds it and teardown can be run again."""

    code = "cleanup-pending"
    exit_code = 4


class BusyError(EgmError):
    """Another command or agent owns the pool."""

    code = "busy"
    exit_code = 5


class StalePlanError(EgmError):
    """The plan was made for another machine than this one is now."""

    code = "stale-plan"
    exit_code = 6


class VerificationError(EgmError):
    """Wrong bytes or wrong state were found."""

    code = "verification"
    exit_code = 7
