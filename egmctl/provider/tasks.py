"""Copy and move tasks that a Master assigns to the owner of a segment (drain jobs, replica repair).

None is carried out: an agent owns memory and runs no transfers. Each is reported failed as soon as it is fetched, so
that whatever waits for it ends. A Master hands a task out once; one that was fetched and never reported would keep its
job running until the Master's own time limit (``--processing_task_timeout_sec``, 300 s).
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from egmctl.errors import EgmError

if TYPE_CHECKING:
    from egmctl.provider.pool import Pool

__all__ = ["REFUSAL", "Tasks"]

REFUSAL = "the provider of this segment (egmctl) carries out no copy or move tasks; the object stays where it is"
"""What the Master is told, and shows whoever asks about the task."""

INTERVAL = 1.0
"""Seconds between two looks; a Master of 0.3.14 schedules the units of a drain job every half second."""

BATCH = 64
ROUNDS = 32
"""Batches of one look: a Master that never runs out of tasks does not keep the worker."""


class Tasks:
    """The worker's look for tasks. It never waits for a Master that does not answer pings."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._next = 0.0

    def refuse(self, *, now: bool = False) -> bool:
        """Fetch what is waiting and report it failed, at most once every `INTERVAL` unless ``now``.

        Always False, so that it can be the condition of a wait. Trouble with the Master is the pings' to tell.
        """
        live = self._pool.live
        heartbeat = None if live is None else live.heartbeat
        if heartbeat is None or (not now and time.monotonic() < self._next):
            return False
        self._next = time.monotonic() + INTERVAL
        pulse = heartbeat.pulse()
        if pulse.failures or pulse.last_contact is None:
            return False
        link = self._pool.link(heartbeat.master)
        try:
            for _ in range(ROUNDS):
                found = link.refuse_tasks(heartbeat.client, REFUSAL, BATCH)
                if not found:
                    break
                self._pool.meters.count("tasks_refused", found)
                print(f"{time.strftime('%H:%M:%S')} {found} copy or move task(s) refused", file=sys.stderr, flush=True)
        except EgmError as error:
            print(f"tasks of {heartbeat.master}: {error.message}", file=sys.stderr, flush=True)
        return False
