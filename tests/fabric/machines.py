"""A machine with a model of the CUDA driver: its environment for every process of a test, and what they left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from egmctl.memory.base import MemoryKind
from egmctl.paths import Paths
from tests.model.config import Config, Device, Fault
from tests.provider.pools import end_agents
from tests.support.master import REPOSITORY, Master

__all__ = ["CHUNK", "GPUS", "Host", "new_host"]

CHUNK = 16 << 20

# Every node of the model must be one of the machine that runs the tests, for plans are made for that.
GPUS = (Device("0008:01:00.0", 0), Device("0009:01:00.0", 0))


@dataclass
class Host:
    """One host: the model's folder is its memory, ``paths`` its ledger and sockets. Processes see it through `env`."""

    config: Config
    paths: Paths
    folder: Path

    @property
    def leaks_file(self) -> Path:
        return self.folder / "leaks.jsonl"

    @property
    def calls_file(self) -> Path:
        return self.folder / "calls.jsonl"

    def env(self, *faults: Fault, **changes: Any) -> dict[str, str]:
        """The environment of a process of this host, where these calls fail."""
        config = replace(self.config, faults=list(faults), **changes)
        return {
            **os.environ,
            **config.to_env(),
            "EGMCTL_STATE_DIR": str(self.paths.state),
            "PYTHONPATH": str(REPOSITORY),
        }

    def spec(self, master: Master, kind: MemoryKind, name: str = "tray", *, chunks: int = 2, **mooncake: str) -> Path:
        """A spec of ``chunks`` chunks of 16 MiB, written to a file."""
        settings = {
            "protocol": "nvlink" if kind == "cuda-fabric" else "tcp",
            "local_hostname": "127.0.0.1",
            "master_server_addr": master.address,
            "master_admin_addr": master.admin_address,
            **mooncake,
        }
        lines = [
            "[pool]",
            f'name = "{name}"',
            f'memory = "{kind}"',
            "enable_egm_store_pool = true",
            f"global_segment_size = {chunks * CHUNK}",
            'max_chunk_size = "16MiB"',
            'local_buffer_size = "1MiB"',
            "lease_ttl = 1",
            "client_expiry = 3",
            "[mooncake]",
            *(f'{key} = "{value}"' for key, value in settings.items()),
        ]
        path = self.folder / f"{name}.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def egmctl(self, *arguments: str, faults: tuple[Fault, ...] = (), timeout: float = 120) -> tuple[int, Any]:
        """The command line with ``--json``: exit status and document (the error's, when it failed)."""
        command = [sys.executable, "-m", "egmctl", "--json", *arguments]
        done = subprocess.run(
            command, env=self.env(*faults), capture_output=True, timeout=timeout, check=False, cwd=REPOSITORY
        )
        lines = done.stdout.decode().strip()
        try:
            document = json.loads(lines)
        except ValueError:
            raise AssertionError(f"{arguments}: exit {done.returncode}, {lines!r}\n{done.stderr.decode()}") from None
        return done.returncode, document

    def ended(self) -> list[dict[str, Any]]:
        """The reports of the processes of this host that have ended and had used the driver."""
        if not self.leaks_file.exists():
            return []
        return [json.loads(line) for line in self.leaks_file.read_text().splitlines()]

    def leaks(self) -> list[dict[str, Any]]:
        """Of those, the ones that left something."""
        return [report for report in self.ended() if report["total"]]

    def memory(self) -> list[str]:
        """Allocations that exist on this host."""
        return sorted(path.name for path in self.config.directory.iterdir() if path.name.startswith("alloc-"))


@contextmanager
def new_host(tmp_path: Path, **config: Any) -> Iterator[Host]:
    """A host of one NUMA node and two GPUs, gone with its agents when left."""
    folder = tmp_path / "host"
    folder.mkdir(parents=True)
    paths = Paths.resolve(folder / "state")
    settings: dict[str, Any] = {"nodes": (0,), "devices": GPUS, **config}
    model = Config(directory=folder / "memory", leaks=folder / "leaks.jsonl", log=folder / "calls.jsonl", **settings)
    model.directory.mkdir()
    try:
        yield Host(model, paths, folder)
    finally:
        end_agents(paths)
        shutil.rmtree(paths.runtime, ignore_errors=True)
