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
    output.table(("check", "status", "observed"), [(c["id"], c["status"], c.get("observed", "")) for c in checks])
    for check in checks:
        if check["status"] in ("fail", "warn", "unknown"):
            output.line()
            output.line(f"{check['id']}: {check['status']}")
            for label in ("observed", "expected", "hint"):
                if check.get(label):
                    output.line(f"  {'do' if label == 'hint' else label}: {check[label]}")
    output.line()
    statuses = [check["status"] for check in checks]
    output.line(", ".join(f"{statuses.count(s)} {s}" for s in dict.fromkeys(statuses)) or "no checks")
