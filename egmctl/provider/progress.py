"""How far long work is, as values that travel: from the agent over a pipe or its control socket to whoever watches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Progress", "ProgressEvent", "silent"]


@dataclass(frozen=True)
class ProgressEvent:
    """``stage`` names the part of the work, ``text`` says it to a person; ``done`` of ``total`` in ``unit``
    ("bytes", "chunks", "seconds", or "" when only the text counts)."""

    stage: str
    text: str
    done: int = 0
    total: int = 0
    unit: str = ""

    def document(self) -> dict[str, Any]:
        return {"event": "progress", **asdict(self)}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> ProgressEvent:
        """Tolerant of what another version adds or leaves out."""
        stage, text, unit = (str(document.get(key, "")) for key in ("stage", "text", "unit"))
        done, total = (value if isinstance(value := document.get(key), int) else 0 for key in ("done", "total"))
        return cls(stage, text, done, total, unit)


Progress = Callable[[ProgressEvent], None]


def silent(event: ProgressEvent) -> None:
    """Nobody watches."""
