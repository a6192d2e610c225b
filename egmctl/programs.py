"""Asking another program something, with a limit that holds: also when it, or what it has started, cannot be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress

__all__ = ["ask_program"]

KILL_SECONDS = 2.0
"""How long one that was killed is waited for: a driver may not let go of it."""


def ask_program(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[bytes]:
    """What it says on both streams, and its exit status; it reads nothing.

    Raises `OSError` when it cannot be started, and `subprocess.TimeoutExpired` after ``seconds``: then it and all that
    it has started are killed.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        told, complaints = process.communicate(timeout=seconds)
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            # Whenever it does end, no zombie is to stay.
            threading.Thread(target=process.wait, name="reaper", daemon=True).start()
        raise
    finally:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    return subprocess.CompletedProcess(command, process.returncode, told, complaints)
