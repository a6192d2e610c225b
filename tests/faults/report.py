"""The table at the end."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.faults.campaign import MODES, Outcome

__all__ = ["summary", "table"]


def summary(
    seen: set[str],
    outcomes: list[Outcome],
    problems: list[str],
    walks: dict[str, dict[str, Any]],
    seconds: float,
) -> dict[str, Any]:
    reached = [one for one in outcomes if one.reached]
    missed = [one for one in outcomes if one.missed]
    injected = Counter(one.job.mode for one in reached)
    worst = max(reached, key=lambda one: one.clean_seconds, default=None)
    wrong = [one for one in outcomes if one.problems]
    return {
        "sites": len(seen),
        "places": len({one.job.place for one in outcomes}),
        "faults": {mode: injected[mode] for mode in MODES},
        "injected": len(reached),
        "kills_survived": sum(one.killed and not one.problems for one in reached),
        "kills": sum(one.killed for one in reached),
        "leaks": sum("left" in one.problems or "stuck" in one.problems for one in outcomes),
        "premature_releases": sum("premature" in one.problems for one in outcomes),
        "undurable_acts": sum("undurable" in one.problems for one in outcomes),
        "repeated_steps": sum("repeated" in one.problems for one in outcomes),
        "wrong": len(wrong) + len(missed) + sum(bool(walk["wrong"]) for walk in walks.values()),
        "walks": walks,
        "not_reached": [f"{one.job.place} {one.job.mode}" for one in missed],
        "worst_seconds_to_clean": round(worst.clean_seconds, 1) if worst else 0.0,
        "worst_at": f"{worst.job.place.site} ({worst.job.mode}, {worst.job.place.scenario})" if worst else "",
        "problems": problems,
        "seconds": round(seconds),
    }


def table(numbers: dict[str, Any]) -> str:
    rows = [("sites enumerated", numbers["sites"]), ("places spoiled", numbers["places"])]
    rows += [(f"faults injected, {mode}", count) for mode, count in numbers["faults"].items()]
    rows += [
        ("faults injected, all", numbers["injected"]),
        ("kills survived", f"{numbers['kills_survived']} of {numbers['kills']}"),
        ("leaks", numbers["leaks"]),
        ("premature releases", numbers["premature_releases"]),
        ("acts before their record", numbers["undurable_acts"]),
        ("done steps repeated", numbers["repeated_steps"]),
        ("runs with anything wrong", numbers["wrong"]),
        ("worst time to clean", f"{numbers['worst_seconds_to_clean']} s, {numbers['worst_at']}"),
    ]
    for name, walk in numbers["walks"].items():
        faults = sum(walk["faults"].values())
        troubles = sum(walk["disturbances"].values())
        ended = "ends clean" if not walk["wrong"] else f"WRONG: {walk['wrong']}"
        told = f"{walk['operations']} operations, {faults} faults, {troubles} troubles of a Master: {ended}"
        rows.append((f"random walk, {name}", told))
    rows.append(("took", f"{numbers['seconds']} s"))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    lines += [f"not reached: {one}" for one in numbers["not_reached"]]
    return "\n".join(lines)
