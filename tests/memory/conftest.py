"""Prints how many driver calls were made to fail, and the contract suite's two sides where both ran."""

from __future__ import annotations

from typing import Any

import pytest


def _properties(terminalreporter: Any, name: str) -> list[tuple[Any, bool]]:
    """What tests recorded under a name, and whether they passed."""
    found: list[tuple[Any, bool]] = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "call":
                found.extend((value, report.passed) for key, value in report.user_properties if key == name)
    return found


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for sites, _ in _properties(terminalreporter, "fault sites"):
        phases = ", ".join(f"{phase} {count}" for phase, count in sites.items())
        terminalreporter.write_line(f"driver calls made to fail, one run each: {sum(sites.values())} ({phases})")
    rows: dict[str, dict[str, str]] = {}
    reasons: dict[str, str] = {}
    for (name, side, seen, why), passed in _properties(terminalreporter, "contract"):
        rows.setdefault(name, {})[side] = seen + ("" if passed else "  (FAILED)")
        if why:
            reasons[name] = why
    rows = {name: row for name, row in rows.items() if len(row) == 2}
    if not rows:
        return
    write = terminalreporter.write_line
    terminalreporter.section("the driver's contract: case | model | real driver")
    same = 0
    for name, row in sorted(rows.items()):
        model, real = row["model"], row["real"]
        same += model == real
        mark = "  " if model == real else "!="
        write(f"{mark} {name} | {model} | {real}" + (f" | {reasons[name]}" if name in reasons else ""))
    write(f"{same} of {len(rows)} the same")
