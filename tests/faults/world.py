"""What one worker of the harness has around it: Masters with short lives, and one pool's folders for each run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from egmctl.errors import EgmError
from egmctl.ledger import PoolRecord, is_running, read_only
from egmctl.mooncake.admin import AdminClient
from egmctl.mooncake.calls import ReplicateConfig, Segment, new_uuid
from egmctl.mooncake.errors import MasterRefused
from egmctl.mooncake.master import MasterClient
from egmctl.paths import Paths
from tests.support.master import Master

__all__ = ["POOL", "TAG", "Finished", "Run", "World"]

POOL = "dev"
REPOSITORY = Path(__file__).resolve().parents[2]
TAG = "EGMCTL_FAULT_RUN"
LEASE = 0.4
HUNG_SECONDS = 25.0


class World:
    """Masters that a worker keeps from run to run, made anew when a run has left something there."""

    def __init__(self, version: str) -> None:
        self.version = version
        self._masters: dict[str, Master] = {}

    @property
    def expiry(self) -> float:
        """What a spec's ``client_expiry`` has to be for these Masters."""
        return 3.5 if self.version == "0.3.14" else 2.5

    def master(self, which: str = "first") -> Master:
        if which not in self._masters:
            master = Master(self.version, lease_ttl=LEASE, client_ttl=2, suspicion_ttl=1, http_metadata=True)
            self._masters[which] = master.__enter__()
        master = self._masters[which]
        if not master.alive:
            master.start()
        return master

    def running(self) -> list[Master]:
        return [master for master in self._masters.values() if master.alive]

    def resume(self) -> None:
        for master in self.running():
            master.resume()

    def revive(self) -> None:
        """Start again whichever is down, empty as it is then."""
        for master in self._masters.values():
            if not master.alive:
                master.start()

    def scrap(self) -> None:
        """Forget everything that Masters know."""
        for master in self._masters.values():
            master.close()
        self._masters.clear()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        self.scrap()


@dataclass
class Finished:
    """One command that has ended. ``killed`` by the injected fault, ``late`` when the harness had to end it."""

    argv: list[str]
    label: str
    code: int
    seconds: float
    stdout: str
    stderr: str
    late: bool = False
    before: str = "none"
    """The pool's state when it began."""

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL and not self.late

    def document(self) -> dict[str, Any]:
        with suppress(ValueError):
            found = json.loads(self.stdout)
            if isinstance(found, dict):
                return found
        return {}


@dataclass
class Run:
    """One pool from nothing to nothing: its folders, its trace, the commands on it."""

    world: World
    fault: dict[str, Any] | None = None
    seams: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="egm", dir="/tmp"))
        self.folder.chmod(0o711)  # a spec's group has to get to the sockets in it
        self.state = self.folder / "state"
        # Where the command line puts its sockets, within our own folder where that can be chosen.
        self.environment = {"XDG_RUNTIME_DIR": str(self.folder), **self.environment}
        base = Path("/run/egmctl") if os.geteuid() == 0 else self.folder / "egmctl"
        self.paths = Paths(self.state, base / hashlib.sha256(os.fsencode(self.state)).hexdigest()[:12])
        self.trace = self.folder / "trace"
        self.model = self.folder / "model"
        self.tag = self.folder.name
        self.commands = 0
        self.finished: list[Finished] = []
        self.marks: list[tuple[int, str]] = []
        self.extra: dict[str, Any] = {}
        self.children: list[subprocess.Popen[bytes]] = []

    # The spec

    def write_spec(self, spec: dict[str, dict[str, Any]]) -> Path:
        lines = []
        for table, values in spec.items():
            lines.append(f"[{table}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]
        path = self.folder / "spec.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    # Commands

    def command(self, *argv: str, timeout: float = 60.0, label: str | None = None) -> Finished:
        """One command line in a process of its own (forked: everything is imported already)."""
        label = label or str(self.commands)
        self.commands += 1
        arguments = ["--state-dir", str(self.state), "--json", *argv]
        out, err = self.folder / f"out{self.commands}", self.folder / f"err{self.commands}"
        record = self.record()
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._be_command(arguments, label, out, err)
        resumed = False

        def meanwhile(seconds: float) -> None:
            # What was made to stand still does so for longer than any limit; then even a tool without one goes on.
            nonlocal resumed
            if seconds > HUNG_SECONDS and not resumed and self.fault and self.fault["mode"] == "hang":
                resumed = True
                self.resume()

        code, late = _reap(pid, timeout, meanwhile)
        done = Finished(
            list(argv),
            label,
            code,
            time.monotonic() - began,
            out.read_text() if out.exists() else "",
            err.read_text() if err.exists() else "",
            late or resumed,
            "none" if record is None else record.state,
        )
        self.finished.append(done)
        return done

    def _be_command(self, arguments: list[str], label: str, out: Path, err: Path) -> None:
        code = 70
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for path, fd in ((out, 1), (err, 2)):
                opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                os.dup2(opened, fd)
                os.close(opened)
            import sys

            sys.argv = ["egmctl", *arguments]
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            os.environ.update(self._environment(label))
            from egmctl.cli.main import main

            code = main(arguments)
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)

    def _environment(self, label: str) -> dict[str, str]:
        settings = {
            "trace": str(self.trace),
            "ledger": str(self.paths.ledger(POOL)),
            "command": label,
            "fault": self.fault,
            "stop": {"masters": [master.pid for master in self.world.running()]},
        }
        return {
            "EGMCTL_SEAMS": ",".join(filter(None, [self.seams, "tests.faults.watcher:install"])),
            "EGMCTL_FAULT": json.dumps(settings),
            "PYTHONPATH": str(REPOSITORY),
            TAG: self.tag,
            **self.environment,
        }

    def resume(self) -> None:
        """Let go on what a hang has stopped."""
        self.world.resume()
        for line in self.events():
            if line["phase"] == "stopped":
                with suppress(ProcessLookupError):
                    os.kill(line["detail"]["pid"], signal.SIGCONT)

    # What has happened so far

    def events(self) -> list[dict[str, Any]]:
        if not self.trace.exists():
            return []
        lines = [json.loads(line) for line in self.trace.read_text().splitlines() if line]
        return sorted(lines, key=lambda line: line["t"])

    def mark(self, name: str) -> None:
        self.marks.append((time.monotonic_ns(), name))

    def hit(self) -> dict[str, Any] | None:
        return next((line for line in self.events() if line["phase"] == "hit"), None)

    def record(self) -> PoolRecord | None:
        return read_only(self.paths.ledger(POOL))

    def until(self, condition: Callable[[PoolRecord], bool], seconds: float) -> bool:
        """Whether the ledger came to say so; False as well when the agent has died meanwhile."""
        deadline = time.monotonic() + seconds
        hung_at = None
        while time.monotonic() < deadline:
            record = self.record()
            if record is None:
                return False
            if condition(record):
                return True
            if not is_running(record.agent_pid, record.agent_started):
                return False
            if self.fault and self.fault["mode"] == "hang":
                if hung_at is None and self.hit():
                    hung_at = time.monotonic()
                if hung_at is not None and time.monotonic() > hung_at + 4:
                    self.resume()
            time.sleep(0.05)
        return False

    def processes(self) -> list[int]:
        """Living processes of this run, whoever their parents are now."""
        return [pid for pid in _pids() if self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if f"{TAG}={self.tag}".encode() not in file.read().split(b"\0"):
                    return False
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            return state not in "ZX"
        except OSError:
            return False

    def close(self) -> None:
        """End what is left by force, and remove the folders."""
        self.resume()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for child in self.children:
            child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.paths.runtime, ignore_errors=True)

    # Clients of the Master, as others would be

    def put(self, keys: list[str], nbytes: int) -> None:
        client_id = new_uuid()
        with MasterClient(self.world.master().address, timeout=5) as client:
            for key in keys:
                for _ in range(20):
                    try:
                        # Pinned: a full pool would be made room in at once.
                        client.put_start(client_id, key, nbytes, ReplicateConfig(with_hard_pin=True))
                        break
                    except MasterRefused as error:
                        if error.number != -200:
                            raise
                        time.sleep(0.05)
                client.put_end(client_id, key)

    def remove(self, keys: list[str]) -> None:
        with MasterClient(self.world.master().address, timeout=5) as client:
            for key in keys:
                with suppress(MasterRefused):
                    client.remove(key, force=True)

    def mount_foreign(self, nbytes: int) -> tuple[Callable[[], bool], Callable[[], None]]:
        """A segment of somebody else's at the Master: a ping for it, and what takes it away."""
        segment = Segment(new_uuid(), "foreign", 1 << 45, nbytes, "127.0.0.1:9", "tcp", "")
        client_id = new_uuid()
        address = self.world.master().address
        with MasterClient(address, timeout=5) as client:
            client.mount_segment(segment, client_id)
            client.remount_segments([], client_id)

        def ping() -> bool:
            with MasterClient(address, timeout=5) as client, suppress(EgmError):
                client.ping(client_id)
            return True

        def away() -> None:
            with MasterClient(address, timeout=5) as client:
                client.unmount_segment(segment.id, client_id)

        return ping, away

    def listed(self) -> list[str]:
        names = []
        for master in self.world.running():
            names += [row.name for row in AdminClient(master.admin_address).segments_detail()]
        return names


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _reap(pid: int, timeout: float, meanwhile: Callable[[float], None]) -> tuple[int, bool]:
    began = time.monotonic()
    pause = 0.002
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), False
        seconds = time.monotonic() - began
        meanwhile(seconds)
        if seconds > timeout:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -signal.SIGKILL, True
        time.sleep(pause)
        pause = min(0.05, pause * 1.3)
