"""``python -m egmctl.bench.stock_child``: an unmodified stock Mooncake client, driven over stdin and stdout.

Requests and answers are JSON lines. The wheel prints to stdout as it likes, so answers go to the descriptor that was
stdout at the start, and what the wheel prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from egmctl.bench.buffers import Buffer, make_buffer
from egmctl.bench.pattern import digest, pattern

__all__ = ["main"]


class _Client:
    """One ``MooncakeDistributedStore`` with one registered buffer, in host memory or on a GPU."""

    def __init__(self) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        self._device: int | None = None
        self._held: Buffer | None = None

    def setup(self, host: str, metadata: str, master: str, workspace: int, device: int | None = None) -> int:
        self._device = device
        code: int = self._store.setup(host, metadata, 0, workspace, "tcp", "", master)
        return code

    def reserve(self, nbytes: int) -> int:
        """A registered buffer of ``nbytes`` for what follows."""
        held = self._held
        if held is not None and held.nbytes >= nbytes:
            return 0
        if held is not None:
            self._store.unregister_buffer(held.address)
            held.close()
        held = self._held = make_buffer(nbytes, self._device)
        code: int = self._store.register_buffer(held.address, nbytes)
        return code

    def _buffer(self, nbytes: int) -> Buffer:
        code = self.reserve(nbytes)
        if code != 0 or self._held is None:
            raise RuntimeError(f"register_buffer returned {code}")
        return self._held

    def put(self, keys: list[str], nbytes: int) -> dict[str, Any]:
        """Each object holds the pattern of its own key; filling the buffer is not timed."""
        buffer = self._buffer(nbytes)
        taken, codes = [], []
        for key in keys:
            buffer.fill(pattern(key, nbytes))
            began = time.perf_counter_ns()
            codes.append(int(self._store.put_from(key, buffer.address, nbytes)))
            taken.append(time.perf_counter_ns() - began)
        return {"ns": taken, "codes": codes}

    def get(self, keys: list[str], nbytes: int, check: bool) -> dict[str, Any]:
        """Times and codes (bytes got, or an error below zero), with digests when asked."""
        buffer = self._buffer(nbytes)
        taken, codes, digests = [], [], []
        for key in keys:
            began = time.perf_counter_ns()
            codes.append(int(self._store.get_into(key, buffer.address, nbytes)))
            taken.append(time.perf_counter_ns() - began)
            if check:
                digests.append(digest(buffer.content(max(0, codes[-1]))))
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
