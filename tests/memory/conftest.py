"""Prints what the contract suite saw on the model and on the real driver, side by side, where both ran."""

from __future__ import annotations

from typing import Any

import pytest

Seen = tuple[str, str, str, str]  # case, side, what it saw, why the real driver may differ


def _observations(terminalreporter: Any) -> list[tuple[Seen, bool]]:
    found: list[tuple[Seen, bool]] = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "call":
                values: list[Any] = [value for key, value in report.user_properties if key == "contract"]
                found.extend((tuple(value), report.passed) for value in values)
    return found


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows: dict[str, dict[str, str]] = {}
    reasons: dict[str, str] = {}
    for (name, side, seen, why), passed in _observations(terminalreporter):
        rows.setdefault(name, {})[side] = seen + ("" if passed else "  (FAILED)")
        if why:
            reasons[name] = why
    if not any("real" in row for row in rows.values()):
        return
    write = terminalreporter.write_line
    terminalreporter.section("the driver's contract: case | model | real driver")
    same = 0
    for name, row in sorted(rows.items()):
        model, real = row.get("model", "-"), row.get("real", "-")
        same += model == real
        mark = "  " if model == real else "!="
        write(f"{mark} {name} | {model} | {real}" + (f" | {reasons[name]}" if name in reasons else ""))
    write(f"{same} of {len(rows)} the same")
