"""How checks are shown: verify's and doctor's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from egmctl.cli.output import Output

__all__ = ["show_checks"]


def show_checks(output: Output, document: Mapping[str, Any]) -> None:
    """``document["checks"]``: each with id, status (pass, warn, fail, skip, unknown), observed, expected, hint."""
    checks = document["checks"]
    names = [f"{check['kind']}: {check['id']}" if check.get("kind") else check["id"] for check in checks]
    output.table(
        ("check", "status", "observed"),
        [(name, check["status"], check["observed"]) for name, check in zip(names, checks, strict=True)],
    )
    for name, check in zip(names, checks, strict=True):
        if check["status"] in ("fail", "warn", "unknown"):
            output.line()
            output.line(f"{name}: {check['status']}")
            for label, part in (("seen", "observed"), ("expected", "expected"), ("do", "hint")):
                if check[part]:
                    output.line(f"  {label}: {check[part]}")
    output.line()
    statuses = [check["status"] for check in checks]
    output.line(", ".join(f"{statuses.count(s)} {s}" for s in dict.fromkeys(statuses)) or "no checks")
