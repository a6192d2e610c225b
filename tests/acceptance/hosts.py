"""A host: a state dir, the commands run on it, what its pools are made of, and what is left of them afterwards."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from egmctl.ledger import PoolRecord, is_running, read_only
from egmctl.mooncake.admin import AdminClient
from egmctl.paths import Paths
from tests.support.master import Master

__all__ = ["Footprint", "Host", "Result", "assert_error", "listed", "until"]

MIB = 1 << 20


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document that stdout holds."""
        found = json.loads(self.stdout)
        assert isinstance(found, dict)
        return found


def assert_error(result: Result, code: int, *, what: str, where: str, do: str) -> dict[str, Any]:
    """That ``result`` of a command with --json is an error of the contract, to people and as a document; the document.

    ``what``, ``where`` and ``do`` are patterns for its three parts.
    """
    said = result.stderr
    assert result.code == code, said
    for word in ("Traceback", "defect", 'File "'):
        assert word not in said, said
    document = result.document
    assert document["schema"] == "egmctl/error/1"
    assert document["exit"] == code
    assert document["code"]
    assert set(document) <= {"schema", "code", "message", "where", "hint", "exit", "facts"}
    for part, pattern in (("message", what), ("where", where), ("hint", do)):
        assert re.search(pattern, document[part]), f"{part} {document[part]!r} has no {pattern!r}"
    flat = " ".join(said.split())
    for label, part in (("egmctl: error:", "message"), ("where:", "where"), ("do:", "hint")):
        assert f"{label} {' '.join(document[part].split())}" in flat, said
    return document


def until(condition: Callable[[], Any], seconds: float = 20.0, every: float = 0.05) -> Any:
    """What ``condition`` gives once it is true. Fails the test when that takes longer."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(every)


def listed(master: Master, endpoint: str = "") -> list[str]:
    """Names of the segments that the Master lists."""
    rows = AdminClient(master.admin_address).segments_detail()
    return sorted(row.name for row in rows if row.name.startswith(endpoint))


@dataclass(frozen=True)
class Footprint:
    """Everything of a pool that the machine can see."""

    pids: tuple[int, ...]
    inodes: frozenset[int]
    ports: tuple[int, ...]
    files: tuple[Path, ...]
    endpoint: str

    def remains(self, master: Master | None = None) -> list[str]:
        """What of it is still there."""
        left = [f"process {pid}" for pid in self.pids if is_running(pid, None)]
        left += [f"file {path}" for path in self.files if path.exists()]
        left += [f"process {pid} holds a chunk" for pid in sorted(_holders(self.inodes))]
        left += [f"port {port} is listened on" for port in self.ports if _listened_on(port)]
        if master is not None and master.alive and self.endpoint:
            left += [f"segment {name}" for name in listed(master, self.endpoint + "/")]
        return left


class Host:
    """``with Host() as host``: ``host.run("status")`` and so on. Left, its agents are ended and its folders removed."""

    def __init__(self, *, python: str = sys.executable, environment: dict[str, str] | None = None) -> None:
        self._python = python
        self.environment = environment or {}
        self.state = Path(tempfile.mkdtemp(prefix="egm", dir="/tmp"))
        self.paths = Paths.resolve(self.state)

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
                process.wait(5)
        shutil.rmtree(self.state, ignore_errors=True)
        shutil.rmtree(self.paths.runtime, ignore_errors=True)

    def _environ(self, more: dict[str, str] | None) -> dict[str, str]:
        ours = {"EGMCTL_STATE_DIR": str(self.state), "NO_COLOR": "1"}
        return {**os.environ, **ours, **self.environment, **(more or {})}

    def run(self, *arguments: str, env: dict[str, str] | None = None, timeout: float = 120) -> Result:
        """``egmctl`` with these arguments, to its end."""
        done = subprocess.run(
            [self._python, "-m", "egmctl", *arguments],
            env=self._environ(env),
            capture_output=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        return Result(done.returncode, done.stdout.decode(), done.stderr.decode())

    def start(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """The same, while the test goes on."""
        return subprocess.Popen(
            [self._python, "-m", "egmctl", *arguments],
            env=self._environ(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def spec(
        self, master: Master | str, name: str = "dev", chunks: int = 2, *, text: str | None = None, **changes: Any
    ) -> str:
        """The path of a spec: ``chunks`` of 16 MiB, leases of 1 s. ``changes`` by key; None leaves a key out."""
        path = self.state / f"{name}.toml"
        if text is not None:
            path.write_text(text)
            return str(path)
        pool: dict[str, Any] = {
            "name": name,
            "memory": "shm",
            "enable_egm_store_pool": True,
            "egm_numa_nodes": "0",
            "global_segment_size": chunks * 16 * MIB,
            "max_chunk_size": "16MiB",
            "lease_ttl": 1,
            "client_expiry": 4,
        }
        mooncake: dict[str, Any] = {"protocol": "tcp", "local_hostname": "127.0.0.1"}
        if isinstance(master, Master):
            mooncake |= {"master_server_addr": master.address, "master_admin_addr": master.admin_address}
        else:
            mooncake["master_server_addr"] = master
        for key, value in changes.items():
            table = mooncake if key in ("local_hostname", "metadata_server", "master_admin_addr") else pool
            table[key] = value
        lines = []
        for heading, table in (("pool", pool), ("mooncake", mooncake)):
            lines.append(f"[{heading}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in table.items() if value is not None]
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    def ready(self, master: Master, name: str = "dev", chunks: int = 2, **changes: Any) -> dict[str, Any]:
        """Provision and mount a pool; its status."""
        result = self.run("provision", self.spec(master, name, chunks, **changes), "--mount", "--json")
        assert result.code == 0, result.stderr
        pool: dict[str, Any] = result.document["pool"]
        assert pool["ready"]
        return pool

    def status(self, name: str = "dev") -> dict[str, Any]:
        result = self.run("status", name, "--json")
        assert result.code == 0, result.stderr
        (pool,) = result.document["pools"]
        assert isinstance(pool, dict)
        return pool

    def record(self, name: str = "dev") -> PoolRecord:
        record = read_only(self.paths.ledger(name))
        assert record is not None
        return record

    def footprint(self, name: str = "dev") -> Footprint:
        """Of a pool whose agent lives."""
        record = self.record(name)
        engines = [row.detail for row in record.resources if row.kind == "engine" and row.state == "present"]
        pids = [record.agent_pid, *(int(detail["pid"]) for detail in engines)]
        ports = [int(detail["data_port"]) for detail in engines]
        if record.endpoint:
            ports.append(int(record.endpoint.rpartition(":")[2]))
        inodes = _chunk_inodes(record.agent_pid)
        assert len(inodes) == len(record.chunks)
        assert all(_listened_on(port) for port in ports)
        files = (self.paths.socket(name), self.paths.lock(name))
        assert all(path.exists() for path in files)
        return Footprint(tuple(pids), inodes, tuple(ports), files, record.endpoint)

    def processes(self) -> list[psutil.Process]:
        """All processes that any command on this host started, and that are left."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get("EGMCTL_STATE_DIR") == str(self.state):
                    found.append(process)
        return found

    def left(self) -> list[str]:
        """Processes, sockets and locks of this host."""
        left = [f"process {process.pid}" for process in self.processes()]
        for folder, pattern in ((self.paths.runtime, "*"), (self.state, "*.lock")):
            left += [str(path) for path in folder.glob(pattern)]
        return left


def _chunk_inodes(pid: int) -> frozenset[int]:
    """Inodes of the chunks that a process maps."""
    found = set()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/memfd:egm-chunk" in line:
                found.add(int(line.split(None, 5)[4]))
    return frozenset(found)


def _holders(inodes: frozenset[int]) -> set[int]:
    """Processes that map one of these files or hold it open."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        if _chunk_inodes(int(entry.name)) & inodes:
            found.add(int(entry.name))
        with suppress(OSError):
            for fd in (entry / "fd").iterdir():
                with suppress(OSError):
                    if "/memfd:egm-chunk" in os.readlink(fd) and fd.stat().st_ino in inodes:
                        found.add(int(entry.name))
    return found


def _listened_on(port: int) -> bool:
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return any(row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port for row in rows)
