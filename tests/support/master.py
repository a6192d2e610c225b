"""A real `mooncake_master` on free loopback ports, for tests: short lives, restarts on the same ports, signals.

Ports are taken from below the kernel's ephemeral range, so that no outgoing connection takes one while a Master is
being restarted, and a client that knocks at a dead Master's port cannot connect to itself.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

__all__ = ["ALL_VERSIONS", "Master", "MasterMissing", "find_binary", "free_port"]

ALL_VERSIONS = ("0.3.13", "0.3.14")
REPOSITORY = Path(__file__).resolve().parents[2]
_FIRST_PORT, _LAST_PORT = 18000, 31999


class MasterMissing(Exception):
    """The binary of the version asked for is not on this machine."""


def find_binary(version: str) -> Path:
    """The `mooncake_master` of "0.3.13" (this environment's wheel) or "0.3.14" (`EGMCTL_MASTER_0314`, or `.cache`)."""
    if version == "0.3.13":
        spec = importlib.util.find_spec("mooncake")  # of a top-level module: finds, does not import
        places = list(spec.submodule_search_locations or ()) if spec else []
        if not places:
            raise MasterMissing("no mooncake wheel is installed here")
        path = Path(places[0]) / "mooncake_master"
    elif version == "0.3.14":
        given = os.environ.get("EGMCTL_MASTER_0314")
        path = Path(given) if given else REPOSITORY / ".cache/mooncake-0.3.14/mooncake/mooncake_master"
    else:
        raise ValueError(version)
    if not os.access(path, os.X_OK):
        raise MasterMissing(f"no Master {version} at {path}")
    return path


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    source = random.SystemRandom()
    while len(found) < count:
        port = source.randint(_FIRST_PORT, _LAST_PORT)
        if port in found:
            continue
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found


def free_port() -> int:
    """A port that is free now and that the kernel gives to nobody who does not ask for it."""
    return _free_ports(1)[0]


def _listening(pid: int) -> set[int]:
    """The TCP ports on which process ``pid`` itself listens."""
    inodes = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


class Master:
    """``with Master("0.3.14") as master:`` - running when entered, gone when left, whatever happened in between.

    ``lease_ttl`` in seconds; ``client_ttl`` seconds until a silent client's segments are gone on 0.3.13, and until it
    is suspected on 0.3.14, where they are gone ``suspicion_ttl`` seconds later (None: the Master's own defaults).
    ``flags`` are added as given. `flags` may be changed before a `restart`.
    """

    def __init__(
        self,
        version: str = "0.3.13",
        *,
        lease_ttl: float | None = 2.0,
        client_ttl: int | None = None,
        suspicion_ttl: int | None = None,
        http_metadata: bool = False,
        flags: tuple[str, ...] = (),
    ) -> None:
        self.version = version
        self.binary = find_binary(version)
        self.lease_ttl = lease_ttl
        self.client_ttl = client_ttl
        self.suspicion_ttl = suspicion_ttl
        self.http_metadata = http_metadata
        self.flags = flags
        self.host = "127.0.0.1"
        self.rpc_port = self.metrics_port = self.http_port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile(prefix="egmctl-master-")  # noqa: SIM115 - lives as long as this object

    @property
    def address(self) -> str:
        """``host:port`` of the RPC server."""
        return f"{self.host}:{self.rpc_port}"

    @property
    def admin_address(self) -> str:
        """``host:port`` of the admin HTTP server."""
        return f"{self.host}:{self.metrics_port}"

    @property
    def metadata_url(self) -> str:
        """The HTTP metadata server, when it was asked for."""
        return f"http://{self.host}:{self.http_port}/metadata"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the Master was not started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """What it has written so far, over all its starts."""
        self._log.flush()
        return os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")

    def __enter__(self) -> Master:
        try:
            for attempt in range(5):
                self.rpc_port, self.metrics_port, self.http_port = _free_ports(3)
                if self._start(give_up=attempt == 4):
                    break
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start it (again) on the same ports, and wait until it serves."""
        if not self.alive:
            deadline = time.monotonic() + 20
            while not self._start(give_up=time.monotonic() > deadline):
                time.sleep(0.2)

    def kill(self) -> None:
        """SIGKILL, as a crash would be."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that takes more than 10 s."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: it holds its connections and answers nobody. Returns when every thread of it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            states = [
                (Path(task.path) / "stat").read_text().rpartition(")")[2].split()[0]
                for task in os.scandir(f"/proc/{self.pid}/task")
            ]
            if set(states) == {"T"}:
                return
            time.sleep(0.005)
        raise RuntimeError(f"the Master's threads did not stop: {states}")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        self._log.close()

    def _command(self) -> list[str]:
        command = [
            str(self.binary),
            "--logtostderr",
            f"--rpc_address={self.host}",
            f"--rpc_port={self.rpc_port}",
            f"--metrics_host={self.host}",
            f"--metrics_port={self.metrics_port}",
            "--rpc_thread_num=2",
        ]
        if self.http_metadata:
            command += [
                "--enable_http_metadata_server=true",
                f"--http_metadata_server_host={self.host}",
                f"--http_metadata_server_port={self.http_port}",
            ]
        if self.lease_ttl is not None:
            command.append(f"--default_kv_lease_ttl={round(self.lease_ttl * 1000)}ms")
        if self.version == "0.3.13":
            if self.client_ttl is not None:
                command.append(f"--client_ttl={self.client_ttl}")
        else:
            if self.client_ttl is not None:
                command.append(f"--client_active_ttl_sec={self.client_ttl}")
            if self.suspicion_ttl is not None:
                command.append(f"--client_suspicion_ttl_sec={self.suspicion_ttl}")
        return [*command, *self.flags]

    def _start(self, *, give_up: bool) -> bool:
        self._process = subprocess.Popen(
            self._command(), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, close_fds=True
        )
        wanted = {self.rpc_port, self.metrics_port} | ({self.http_port} if self.http_metadata else set())
        deadline = time.monotonic() + 30
        # Only ports that this very process listens on count: somebody else's answer would prove nothing.
        while self.alive and time.monotonic() < deadline:
            if wanted <= _listening(self._process.pid):
                return True
            time.sleep(0.01)
        self.kill()
        if give_up:
            raise RuntimeError(f"the Master {self.version} did not come up:\n{self.log()[-4000:]}")
        return False

    def _end(self, number: signal.Signals) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(number)
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
