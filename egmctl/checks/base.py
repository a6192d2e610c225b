"""What a check is: a name, the memory kinds it matters to, and a run that returns what it saw.

A check never raises for what it finds; all run, then all are reported. What did not run is ``skip``, and what could
not be learnt is ``unknown``: neither is ever ``pass``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from egmctl.errors import EgmError

__all__ = ["Check", "CheckResult", "Status", "ok", "run_checks"]

Status = Literal["pass", "warn", "fail", "skip", "unknown"]
Facts_contra = TypeVar("Facts_contra", contravariant=True)
Facts = TypeVar("Facts")


@dataclass(frozen=True)
class CheckResult:
    """One finding. ``expected`` says what would have passed, ``hint`` what to do about it."""

    id: str
    status: Status
    observed: str
    expected: str = ""
    hint: str = ""

    def document(self) -> dict[str, Any]:
        """As it stands in the JSON of ``doctor`` and ``verify``."""
        return asdict(self)


class Check(Protocol, Generic[Facts_contra]):
    """One check over the facts it is given (a machine for ``doctor``, a pool for ``verify``)."""

    id: ClassVar[str]

    def run(self, facts: Facts_contra) -> Iterable[CheckResult]: ...


def run_checks(
    checks: Sequence[Check[Facts]], facts: Facts, told: Callable[[CheckResult], None] | None = None
) -> list[CheckResult]:
    """Run every check in order, telling each finding as it comes; an error that a check lets out is its failure."""
    results: list[CheckResult] = []
    for check in checks:
        found: list[CheckResult] = []
        try:
            found.extend(check.run(facts))
        except EgmError as error:
            found.append(CheckResult(check.id, "fail", str(error), hint=error.hint))
        results.extend(found)
        for result in found:
            if told is not None:
                told(result)
    return results


def ok(results: Iterable[CheckResult]) -> bool:
    """Whether nothing failed."""
    return all(result.status != "fail" for result in results)
