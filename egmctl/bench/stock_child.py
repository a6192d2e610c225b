"""``python -m egmctl.bench.stock_child``: an unmodified stock Mooncake client, driven over stdin and stdout.

Requests and answers are JSON lines. The wheel prints to stdout as it likes, so answers go to the descriptor that was
stdout at the start, and what the wheel prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

from egmctl.bench.pattern import digest, pattern

__all__ = ["main"]


class _Client:
    """One ``MooncakeDistributedStore`` with one registered buffer."""

    def __init__(self) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        self._buffer = (ctypes.c_char * 0)()

    def setup(self, host: str, metadata: str, master: str, workspace: int) -> int:
        code: int = self._store.setup(host, metadata, 0, workspace, "tcp", "", master)
        return code

    def reserve(self, nbytes: int) -> int:
        """A registered buffer of ``nbytes`` for what follows."""
        if len(self._buffer) >= nbytes:
            return 0
        if len(self._buffer):
            self._store.unregister_buffer(ctypes.addressof(self._buffer))
        self._buffer = (ctypes.c_char * nbytes)()
        code: int = self._store.register_buffer(ctypes.addressof(self._buffer), nbytes)
        return code

    def put(self, keys: list[str], nbytes: int) -> dict[str, Any]:
        """Each object holds the pattern of its own key; filling the buffer is not timed."""
        self.reserve(nbytes)
        taken, codes = [], []
        for key in keys:
            ctypes.memmove(self._buffer, pattern(key, nbytes), nbytes)
            began = time.perf_counter_ns()
            codes.append(int(self._store.put_from(key, ctypes.addressof(self._buffer), nbytes)))
            taken.append(time.perf_counter_ns() - began)
        return {"ns": taken, "codes": codes}

    def get(self, keys: list[str], nbytes: int, check: bool) -> dict[str, Any]:
        """Times and codes (bytes got, or an error below zero), with digests when asked."""
        self.reserve(nbytes)
        taken, codes, digests = [], [], []
        for key in keys:
            began = time.perf_counter_ns()
            codes.append(int(self._store.get_into(key, ctypes.addressof(self._buffer), nbytes)))
            taken.append(time.perf_counter_ns() - began)
            if check:
                digests.append(digest(memoryview(self._buffer).cast("B")[: max(0, codes[-1])]))
        return {"ns": taken, "codes": codes, "digests": digests}


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    client = _Client()
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("do")
        try:
            answer = {"answer": getattr(client, operation)(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
