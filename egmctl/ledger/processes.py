"""Is that process still the one we wrote down? A pid alone is reused; with its start time and the boot id it is not."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["await_end", "boot_id", "is_running", "start_time"]


def boot_id() -> str:
    """The kernel's random id of this boot, ``""`` where /proc does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which ``pid`` started; None when it is gone or a zombie (field 22, proc(5))."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rfind(")") + 2 :].split()
    if len(fields) < 20 or fields[0] == "X" or (fields[0] == "Z" and not _has_threads(pid)):
        return None
    return int(fields[19])


def _has_threads(pid: int) -> bool:
    """Whether threads of a process whose first one has ended still run: until then it keeps its files and locks."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def is_running(pid: int | None, started: int | None) -> bool:
    """Whether the process that had ``pid`` and started at ``started`` still runs."""
    if not pid:
        return False
    now = start_time(pid)
    return now is not None and (started is None or now == started)


def await_end(pid: int, started: int | None, patience: float = 15.0) -> bool:
    """Whether that process has ended, after giving it some time to."""
    deadline = time.monotonic() + patience
    while is_running(pid, started):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True
