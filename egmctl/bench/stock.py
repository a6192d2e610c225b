"""An unmodified stock Mooncake client in a process of its own: what others would see of a pool, over TCP."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from egmctl.errors import FailedError

__all__ = ["StockClient"]


class StockClient:
    """``with StockClient(master, metadata) as client:`` and the process ends with it. Every call has a time limit.

    ``device`` is the GPU whose memory it puts from and gets into; None is host memory. Objects hold
    `egmctl.bench.pattern` of their key. Raises `FailedError` when the process or its ``setup`` fails.
    """

    def __init__(
        self,
        master: str,
        metadata: str,
        *,
        host: str = "127.0.0.1",
        workspace: int = 64 << 20,
        device: int | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "egmctl.bench.stock_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "GLOG_minloglevel": "3"},
        )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="stock-client", daemon=True)
        self._reader.start()
        try:
            code = self._call("setup", host=host, metadata=metadata, master=master, workspace=workspace, device=device)
        except BaseException:
            self.close()
            raise
        if code != 0:
            self.close()
            raise FailedError(
                f"the stock client's setup returned {code}",
                where=f"Master {master}",
                hint="see that the Master answers and that the wheel is of a version it accepts",
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def put(self, keys: Sequence[str], nbytes: int) -> tuple[list[int], list[int]]:
        """(nanoseconds, Mooncake's codes: 0 is success), one of each a key."""
        answer = self._call("put", keys=list(keys), nbytes=nbytes)
        return answer["ns"], answer["codes"]

    def get(self, keys: Sequence[str], nbytes: int, *, check: bool = False) -> tuple[list[int], list[int], list[str]]:
        """(nanoseconds, bytes got or codes below zero, digests when ``check``), one of each a key."""
        answer = self._call("get", keys=list(keys), nbytes=nbytes, check=check)
        return answer["ns"], answer["codes"], answer["digests"]

    def close(self) -> None:
        """End the process: gently, then not. Twice is success."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(5)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> StockClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._answers.put(line)
        self._answers.put("")

    def _call(self, operation: str, *, timeout: float = 120.0, **arguments: Any) -> Any:
        began = time.monotonic()
        try:
            if self._process.stdin is None:
                raise BrokenPipeError
            self._process.stdin.write(json.dumps({"do": operation, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=max(0.1, timeout - (time.monotonic() - began)))
        except queue.Empty:
            self._process.kill()
            raise FailedError(f"{operation}: the stock client gave no answer within {timeout:g} s") from None
        except (BrokenPipeError, ValueError):
            line = ""
        if not line:
            raise FailedError(f"{operation}: the stock client's process ended", hint="run it with GLOG_minloglevel=0")
        answer = json.loads(line)
        if "error" in answer:
            raise FailedError(f"{operation}: the stock client raised {answer['error']}")
        return answer["answer"]
