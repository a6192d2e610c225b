"""The seam of the fault harness: writes down every step of every process of a run, and spoils one of them.

``EGMCTL_SEAMS=tests.faults.watcher:install`` with ``EGMCTL_FAULT`` (JSON) in the environment:

    trace    file to which a line is appended for each step's begin and end, of all processes, by the monotonic clock
    ledger   the pool's ledger; at each act on the outside world it is asked whether it names that act durably
    command  what the harness calls the command that this process belongs to
    fault    {label, site, nth, mode}, or nothing
    stop     {"masters": [pid, ...]} processes that a hang at the Master or the metadata server stops

A label is ``role@command``: the role is cli, agent, te (the Transfer Engine child) or probe (of a memory kind). Modes:
fail (the act is not done), lost (it is done, and said to have failed), hang, kill-before, kill-after.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from egmctl.steps import watch
from tests.faults.failures import failure

__all__ = ["MASTER_SITES", "Watcher", "can_hang", "install", "role_of"]

MASTER_SITES = (
    "mooncake.master.",
    "mooncake.rpc.",
    "mooncake.admin.",
    "metadata.",
    "provider.listing.",
    "provider.probe.put_start",
    "provider.probe.put_end",
    "provider.probe.locate",
    "provider.probe.remove",
    "provider.probe.revoke",
)
SLEEPER_SITES = ("te.spawn", "wheel.probe", "memory.probe.run", "provider.launch.spawn")
CHILD_SITES = ("te.hello", "te.register", "te.stop")
AGENT_SITES = ("provider.control.connect", "provider.control.ask")


def can_hang(site: str) -> bool:
    """Whether the act waits for somebody else: a server, a socket's other end, a process."""
    return site.startswith(MASTER_SITES) or site in (*SLEEPER_SITES, *CHILD_SITES, *AGENT_SITES)


def role_of(argv0: str) -> str:
    for ending, role in (("provider/agent.py", "agent"), ("te_child.py", "te"), ("memory/probe.py", "probe")):
        if argv0.endswith(ending):
            return role
    return "cli"


class Watcher:
    def __init__(self, settings: dict[str, Any], role: str) -> None:
        self.label = f"{role}@{settings.get('command', '')}"
        self.fault: dict[str, Any] = settings.get("fault") or {}
        self.ledger = settings.get("ledger")
        self.stop: dict[str, Any] = settings.get("stop") or {}
        self._fd = os.open(settings["trace"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._counts: dict[str, int] = {}
        self._mutex = threading.Lock()
        self._local = threading.local()
        self._fired = False
        self._child = 0

    def write(self, phase: str, site: str, detail: dict[str, Any], **more: Any) -> None:
        line = {"t": time.monotonic_ns(), "pid": os.getpid(), "label": self.label, "phase": phase, "site": site}
        data = json.dumps({**line, "detail": detail, **more}, default=str).encode() + b"\n"
        os.write(self._fd, data)  # one write: lines of several processes do not mix

    def before(self, site: str, detail: dict[str, Any]) -> None:
        with self._mutex:
            nth = self._counts[site] = self._counts.get(site, 0) + 1
        stack: list[tuple[str, int]] = self._local.__dict__.setdefault("stack", [])
        if site.startswith("te.") and detail.get("pid"):
            self._child = int(detail["pid"])
        missing = self._not_recorded(site, detail, [name for name, _ in stack])
        mode = self._mode(site, nth, ("fail", "hang", "kill-before"))
        more = {"nth": nth, **({"undurable": missing} if missing else {})}
        if mode is None:
            self.write("before", site, detail, **more)
            stack.append((site, nth))
            return
        self._fired = True
        self.write("hit", site, detail, mode=mode, **more)
        if mode == "kill-before":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "fail":
            raise failure(site)
        self._hang(site)
        self.write("before", site, detail, **more)
        stack.append((site, nth))

    def after(self, site: str, detail: dict[str, Any], error: BaseException | None) -> None:
        stack: list[tuple[str, int]] = self._local.__dict__.setdefault("stack", [])
        nth = stack.pop()[1] if stack and stack[-1][0] == site else 0
        subprocess.Popen = _POPEN  # type: ignore[misc]
        mode = self._mode(site, nth, ("lost", "kill-after"))
        outcome = "" if error is None else type(error).__name__
        self.write("after", site, detail, nth=nth, error=outcome)
        if mode is None:
            return
        if mode == "lost" and error is not None:
            self.write("moot", site, detail)  # it has failed by itself
            return
        self._fired = True
        self.write("hit", site, detail, mode=mode, nth=nth)
        if mode == "kill-after":
            os.kill(os.getpid(), signal.SIGKILL)
        raise failure(site)

    def _mode(self, site: str, nth: int, modes: tuple[str, ...]) -> str | None:
        fault = self.fault
        if self._fired or not fault or fault["site"] != site or fault["nth"] != nth or fault["label"] != self.label:
            return None
        return fault["mode"] if fault["mode"] in modes else None

    def _hang(self, site: str) -> None:
        """Whoever is about to be waited for stands still; the harness lets it go on later."""
        if site in SLEEPER_SITES:
            subprocess.Popen = _Sleeper  # type: ignore[misc]  # until this step ends
            return
        if site in CHILD_SITES:
            pids = [self._child]
        elif site in AGENT_SITES:
            pids = [int(pid) for (pid,) in self._ask("SELECT agent_pid FROM pool")]
        else:
            pids = list(self.stop.get("masters", ()))
        for pid in filter(None, pids):
            self.write("stopped", site, {"pid": pid})
            os.kill(pid, signal.SIGSTOP)
            _until_stopped(pid)

    # The ledger, as another process would find it at this moment

    def _ask(self, question: str, *values: Any) -> list[tuple[Any, ...]]:
        if not self.ledger or not os.path.exists(self.ledger):
            return []
        db = sqlite3.connect(f"file:{self.ledger}?mode=ro", uri=True, timeout=5)
        try:
            return db.execute(question, values).fetchall()
        except sqlite3.Error:
            return []
        finally:
            db.close()

    def _not_recorded(self, site: str, detail: dict[str, Any], around: list[str]) -> str:
        """What the ledger should have said durably before this act, "" when it does."""
        if self.label.startswith(("te@", "probe@")) or not self.ledger:
            return ""
        if site in (
            "mooncake.master.mount_segment",
            "mooncake.master.unmount_segment",
            "mooncake.master.graceful_unmount_segment",
        ):
            wanted = {"mount_segment": ("mounting",), "unmount_segment": ("unmounting",)}.get(
                site.rpartition(".")[2], ("draining",)
            )
            first, second = detail["segment"]
            found = self._ask("SELECT state FROM segment WHERE id = ?", f"{first:016x}-{second:016x}")
            return "" if [state for (state,) in found if state in wanted] else f"segment {wanted}, found {found}"
        if site in ("memory.shm.file", "memory.cuda.create"):
            found = self._ask("SELECT state FROM chunk WHERE idx = ?", detail["chunk"])
            return "" if found == [("creating",)] else f"chunk creating, found {found}"
        if site in ("memory.shm.unmap", "memory.cuda.unmap", "memory.shm.close", "memory.cuda.release"):
            found = self._ask("SELECT state FROM chunk WHERE idx = ?", detail["chunk"])
            return "" if found in ([("releasing",)], [("creating",)]) else f"chunk releasing, found {found}"
        kind = {
            "metadata.put": "metadata",
            "metadata.delete": "metadata",
            "te.spawn": "engine",
            "provider.control.bind": "socket",
            "handshake.bind": "handshake",
            "provider.socket.unlink": "socket",
        }.get(site)
        if kind is None or "provider.health.listen" in around:
            return ""
        found = self._ask("SELECT state FROM resource WHERE kind = ? AND state IN ('intended', 'present')", kind)
        return "" if found else f"resource {kind}"


_POPEN = subprocess.Popen


class _Sleeper(_POPEN):  # type: ignore[type-arg]
    """Whatever is to be started, something starts that never says anything and never ends."""

    def __init__(self, command: list[str], **options: Any) -> None:
        super().__init__([_sleeper(), *command[1:]], **options)


def _sleeper() -> str:
    """A program that takes any arguments and never says anything."""
    path = Path(tempfile.gettempdir()) / f"egm-sleeper-{os.geteuid()}"
    if not path.exists():
        draft = path.with_name(f"{path.name}-{os.getpid()}")
        draft.write_text("#!/bin/sh\nexec sleep 120\n")
        draft.chmod(stat.S_IRWXU)
        draft.rename(path)
    return str(path)


def _until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            states = [
                (Path(task.path) / "stat").read_text().rpartition(")")[2].split()[0]
                for task in os.scandir(f"/proc/{pid}/task")
            ]
        except OSError:
            return
        if set(states) <= {"T", "t"}:
            return
        time.sleep(0.002)


def _hurry() -> None:
    """Time limits and intervals of a quick world: what they bound is the same, the waiting shorter."""
    import functools

    from egmctl.checks import machine
    from egmctl.memory import probe
    from egmctl.mooncake import admin, metadata, transfer_engine, wheel
    from egmctl.provider import launch, pool

    patience = float(os.environ.get("EGMCTL_FAULT_PATIENCE", "4"))
    timing = functools.partial(pool.Timing, ping_interval=0.5, rpc_timeout=0.7, restart_patience=patience)
    pool.Timing = timing  # type: ignore[misc, assignment]
    launch.START_SECONDS = 5.0
    machine.Machine.probe_seconds = 4.0
    for function, seconds in (
        (transfer_engine.TransferEngineChild.start, 5.0),
        (wheel.require_transfer_engine, 4.0),
        (probe.probe, 4.0),
        (metadata.MetadataClient.__init__, 1.5),
        (admin.AdminClient.__init__, 1.5),
    ):
        function.__kwdefaults__["timeout"] = seconds  # type: ignore[index]


def install() -> None:
    settings = json.loads(os.environ["EGMCTL_FAULT"])
    role = role_of(sys.argv[0])
    if role in ("agent", "cli"):
        _hurry()
    watch(Watcher(settings, role))
