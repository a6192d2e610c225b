"""Telling systemd how an agent in the foreground is, by sd_notify(3), without its library.

What is sent: ``READY=1`` once the command's goal is reached (provisioned, or with ``--mount`` ready), ``STATUS=`` with
the pool's state whenever it changes, ``EXTEND_TIMEOUT_USEC=`` while provisioning, mounting or tearing down goes on
(zeroing a TiB takes minutes; a start time limit is for starts that hang), ``WATCHDOG=1`` at half the unit's
``WatchdogSec`` as long as the worker and the heartbeat live, and ``STOPPING=1`` when the end begins. Without
``NOTIFY_SOCKET`` nothing happens. A unit, ``/etc/systemd/system/egmctl@.service``::

    [Unit]
    Description=egmctl pool %i
    After=network-online.target nvidia-imex.service
    Wants=network-online.target

    [Service]
    Type=notify
    ExecStart=/usr/bin/egmctl provision /etc/egmctl/%i.toml --mount --foreground
    # What an agent that was killed has left behind goes first. The dash: there may be nothing.
    ExecStartPre=-/usr/bin/egmctl teardown %i --now
    WatchdogSec=5min
    # SIGTERM tears down with the default grace. A second one would be "at once".
    KillMode=mixed
    TimeoutStopSec=5min
    Restart=on-failure
    # 2 wrong spec, 3 the machine cannot do it, 6 the plan is stale: trying again does not help.
    RestartPreventExitStatus=2 3 6
    LimitMEMLOCK=infinity

    [Install]
    WantedBy=multi-user.target
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress

__all__ = ["Notifier"]

TICK = 1.0
EXTENSION = 60.0
"""Seconds that each sign of progress asks for."""


class Notifier:
    """Speaks for this process. Its variables are taken out of ``environ``, so that no child
    speaks in its name. ``watchdog_s`` is how long systemd waits for a sign of life, None when it does not."""

    def __init__(self, environ: MutableMapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._address = _address(environ.pop("NOTIFY_SOCKET", ""))
        self.watchdog_s = _watchdog(environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", ""))
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._mutex = threading.Lock()
        self._stopping = False
        self._status = ""

    @property
    def wanted(self) -> bool:
        """Whether anybody listens."""
        return self._address is not None

    def watch(self, status: Callable[[], str], busy: Callable[[], bool], trouble: Callable[[], str]) -> Notifier:
        """Start telling: ``status`` in words, whether long work is ``busy``, and what is stuck (``trouble``, "" when
        nothing is). All three are called about once a second on a thread of their own, and must not block. Ends with
        `close`, or as a context manager."""
        if self.wanted and self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(status, busy, trouble), name="notify", daemon=True)
            self._thread.start()
        return self

    def __enter__(self) -> Notifier:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def ready(self) -> None:
        """The goal of the command is reached."""
        self._send("READY=1")

    def stopping(self) -> None:
        """The end has begun. Said once."""
        with self._mutex:
            first, self._stopping = not self._stopping, True
        if first:
            self._send("STOPPING=1")

    def close(self) -> None:
        """No more is said. Twice is success."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _run(self, status: Callable[[], str], busy: Callable[[], bool], trouble: Callable[[], str]) -> None:
        interval = TICK if self.watchdog_s is None else min(TICK, self.watchdog_s / 2)
        fed = -1e9
        while True:
            stuck = trouble()
            self._tell_status(f"stuck: {stuck}" if stuck else status())
            if not stuck:
                if busy():
                    self._send(f"EXTEND_TIMEOUT_USEC={int(EXTENSION * 1e6)}")
                now = time.monotonic()
                if self.watchdog_s is not None and now - fed >= self.watchdog_s / 2 - interval / 2:
                    fed = now
                    self._send("WATCHDOG=1")
            if self._ended.wait(interval):
                return

    def _tell_status(self, text: str) -> None:
        line = " ".join(text.split())[:500]
        if line != self._status:
            self._status = line
            self._send(f"STATUS={line}")

    def _send(self, text: str) -> None:
        if self._address is None:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(1.0)  # a manager that does not read must not hold up a pool
            sock.sendto(text.encode(), self._address)


def _address(text: str) -> str | None:
    """A path, or an abstract name (``@name``); anything else is not for us."""
    if text.startswith("@") and len(text) > 1:
        return "\0" + text[1:]
    return text if text.startswith("/") else None


def _watchdog(microseconds: str, pid: str) -> float | None:
    """Seconds, when systemd expects signs of life and from this process."""
    if not microseconds.isascii() or not microseconds.isdigit() or int(microseconds) == 0:
        return None
    if pid and pid != str(os.getpid()):
        return None
    return int(microseconds) / 1e6
