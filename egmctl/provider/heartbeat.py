"""The heartbeat: one thread with a connection of its own that pings the Master on time and does nothing else.

Late pings cost every segment of the pool, so nothing else runs here: others act on what a ping's answer means.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from egmctl.ledger import SegmentId
from egmctl.mooncake.master import NEED_REMOUNT, MasterClient

__all__ = ["Heartbeat", "Pulse"]


@dataclass(frozen=True)
class Pulse:
    """What the pings have shown. Times are of the monotonic clock, ``inf``-free: None when it never happened."""

    sent: int = 0
    missed: int = 0
    failures: int = 0
    last_contact: float | None = None
    need_remount_since: float | None = None
    status: int | None = None
    error: str = ""


class Heartbeat:
    """Pings ``master`` as ``client`` from `start` to `stop`, except while `pause`\\ d."""

    def __init__(self, master: str, client: SegmentId, *, interval: float = 1.0, timeout: float = 3.0) -> None:
        self.master = master
        self.client = client
        self._interval = interval
        self._connection = MasterClient(master, timeout=timeout)
        self._gate = threading.Lock()  # held while a ping is in flight
        self._mutex = threading.Lock()
        self._pulse = Pulse()
        self._settled = 0.0
        self._paused = False
        self._turned = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No ping is sent after this returns. Twice is success."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._connection.close()

    def pause(self) -> None:
        """No ping is sent after this returns, until `resume`."""
        self._paused = True
        with self._gate:
            pass

    def resume(self) -> None:
        self._paused = False

    def pulse(self) -> Pulse:
        with self._mutex:
            return self._pulse

    def quiet_for(self) -> float:
        """Seconds since the thread last came round: short as long as it lives, whatever the Master does."""
        return time.monotonic() - self._turned

    def settled(self) -> None:
        """The segments were mounted just now: what pings sent before this moment said of them is history."""
        with self._mutex:
            self._settled = time.monotonic()
            self._pulse = replace(self._pulse, need_remount_since=None)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            self._turned = time.monotonic()
            with self._gate:
                if not self._paused:
                    self._ping()
            # A ping that took long is followed by the next at once, but never by a burst of those that were missed.
            due = max(due + self._interval, time.monotonic())

    def _ping(self) -> None:
        started = time.monotonic()
        try:
            status = self._connection.ping(self.client)
        except Exception as error:  # this thread outlives whatever a ping can raise
            with self._mutex:
                self._pulse = replace(
                    self._pulse,
                    sent=self._pulse.sent + 1,
                    missed=self._pulse.missed + 1,
                    failures=self._pulse.failures + 1,
                    error=str(error),
                )
            return
        with self._mutex:
            since = self._pulse.need_remount_since
            if status != NEED_REMOUNT:
                since = None
            elif since is None and started >= self._settled:
                since = time.monotonic()
            self._pulse = replace(
                self._pulse,
                sent=self._pulse.sent + 1,
                failures=0,
                last_contact=started,
                need_remount_since=since,
                status=status,
                error="",
            )
