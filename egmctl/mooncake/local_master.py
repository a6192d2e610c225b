"""A ``mooncake_master`` of one's own on free loopback ports, for a demonstration or a measurement on one host."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from types import TracebackType

from egmctl.errors import EgmError, FailedError
from egmctl.mooncake.admin import AdminClient
from egmctl.mooncake.master import MasterClient
from egmctl.mooncake.wheel import find_master_binary

__all__ = ["LocalMaster"]

_START_SECONDS = 20.0


class LocalMaster:
    """``with LocalMaster() as master:`` - serving when entered, gone when left.

    Raises `PreflightError` where no Master is installed and `FailedError` when it does not come up.
    """

    host = "127.0.0.1"

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile(prefix="egmctl-master-")  # noqa: SIM115 - lives as long as this object
        self.address = self.admin_address = ""

    @property
    def pid(self) -> int:
        """Of its process; 0 when it does not run."""
        return self._process.pid if self._process is not None else 0

    def __enter__(self) -> LocalMaster:
        binary = str(find_master_binary())
        for _ in range(5):
            rpc, admin = _free_ports(2)
            self.address, self.admin_address = f"{self.host}:{rpc}", f"{self.host}:{admin}"
            self._process = subprocess.Popen(
                [
                    binary,
                    "--logtostderr",
                    f"--rpc_address={self.host}",
                    f"--rpc_port={rpc}",
                    f"--metrics_host={self.host}",
                    f"--metrics_port={admin}",
                    *self._flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
            if self._serves():
                return self
            self._end()
        tail = os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace").strip().splitlines()[-1:]
        self._log.close()
        raise FailedError(
            f"mooncake_master did not come up: {''.join(tail)[:300]}",
            where=binary,
            hint="run it by hand to see what it wants; libibverbs1, libnuma1 and libcurl4 must be installed",
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._log.close()

    def _serves(self) -> bool:
        deadline = time.monotonic() + _START_SECONDS
        while self._process is not None and self._process.poll() is None and time.monotonic() < deadline:
            try:
                with MasterClient(self.address, timeout=1.0) as client:
                    client.service_ready()
                AdminClient(self.admin_address).segments_detail()
                return True
            except EgmError:
                time.sleep(0.02)
        return False

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((LocalMaster.host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
