"""A consumer in a process of its own: `EgmStore` unchanged, driven over a pair of pipes, its buffers on a GPU or not.

`Consumer` is the tests' half; ``python -m tests.fabric.consumer`` the program. It knows of the provider what the Master
and the descriptor say, and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any

from tests.support.master import REPOSITORY

__all__ = ["Consumer", "ConsumerError"]


class ConsumerError(Exception):
    """What a call raised there: ``code`` of the error, and its text."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Consumer:
    """``with`` closes its store and waits for its end, so that its report of leaks is written."""

    def __init__(
        self, master: str, env: dict[str, str], *, metadata: str = "P2PHANDSHAKE", devices: tuple[int, ...] = (0, 1)
    ) -> None:
        settings = json.dumps({"master": master, "metadata": metadata, "devices": devices})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fabric.consumer", settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            cwd=REPOSITORY,
        )
        self.pid = self._process.pid
        try:
            self._answer()
        except BaseException:
            self._process.kill()
            self.close()
            raise

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> int:
        """Its exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            return self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            self._process.wait(10)
            self._process.stdout.close()

    def call(self, op: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def put(self, key: str, value: bytes, where: str) -> int:
        """Put from a buffer that is ``device0``, ``device1``, ``pinned`` or ``pageable``."""
        return int(self.call("put", keys=[key], values=[value.hex()], where=where)[0])

    def get(self, key: str, where: str) -> bytes:
        return bytes.fromhex(self.call("get", keys=[key], where=where)[0])

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConsumerError("ended", f"exit {self._process.wait(10)}")
        answer = json.loads(line)
        if "error" in answer:
            raise ConsumerError(*answer["error"])
        return answer["result"]


# The program.

SPACE = 8 << 20


class _Program:
    def __init__(self, settings: dict[str, Any]) -> None:
        from egmctl.consumer import EgmStore
        from egmctl.memory.driver import get_driver

        self.devices = settings["devices"]
        self.driver = get_driver()
        self.store = EgmStore.connect(settings["master"], devices=self.devices, metadata_server=settings["metadata"])
        self.buffers: dict[str, int] = {}

    def buffer(self, where: str) -> int:
        """A registered buffer of `SPACE` bytes there."""
        if where not in self.buffers:
            if where.startswith("device"):
                self.driver.use_device(int(where[6:]))
                address = self.driver.mem_alloc(SPACE)
            elif where == "pinned":
                self.driver.use_device(self.devices[0])
                address = self.driver.host_alloc(SPACE)
            else:
                import ctypes

                self.kept = ctypes.create_string_buffer(SPACE)
                address = ctypes.addressof(self.kept)
            self.store.register_buffer(address, SPACE)
            self.buffers[where] = address
        return self.buffers[where]

    def move(self, where: str, address: int, data: bytes | None, nbytes: int = 0) -> bytes:
        """Fill a part of a buffer, or read it, without the store."""
        import ctypes

        if not where.startswith("device"):
            if data is not None:
                ctypes.memmove(address, data, len(data))
            return ctypes.string_at(address, nbytes)
        self.driver.use_device(int(where[6:]))
        block = (
            ctypes.create_string_buffer(data, len(data)) if data is not None else ctypes.create_string_buffer(nbytes)
        )
        pair = (address, ctypes.addressof(block)) if data is not None else (ctypes.addressof(block), address)
        self.driver.memcpy(*pair, len(block))
        return block.raw

    def put(self, keys: list[str], values: list[str], where: str) -> list[int]:
        base = self.buffer(where)
        data = [bytes.fromhex(value) for value in values]
        places = [base + sum(map(len, data[:at])) for at in range(len(data))]
        for place, one in zip(places, data, strict=True):
            self.move(where, place, one)
        return [_or_raise(each) for each in self.store.batch_put_from(keys, places, [len(one) for one in data])]

    def get(self, keys: list[str], where: str) -> list[str]:
        base = self.buffer(where)
        room = SPACE // len(keys)
        places = [base + room * at for at in range(len(keys))]
        sizes = self.store.batch_get_into(keys, places, [room] * len(keys))
        return [self.move(where, at, None, _or_raise(size)).hex() for at, size in zip(places, sizes, strict=True)]

    def exists(self, key: str) -> bool:
        return self.store.exists(key)

    def remove(self, key: str) -> None:
        self.store.remove(key, force=True)

    def mapped(self) -> int:
        """Chunks that are imported now."""
        return self.store._engine.mappings.count

    def close(self) -> None:
        self.store.close()
        for where, address in self.buffers.items():
            if where.startswith("device"):
                self.driver.use_device(int(where[6:]))
                self.driver.mem_free(address)
            elif where == "pinned":
                self.driver.use_device(self.devices[0])
                self.driver.host_free(address)


def _or_raise(result: Any) -> int:
    if isinstance(result, Exception):
        raise result
    return int(result)


def main() -> None:
    from egmctl import seams
    from egmctl.errors import EgmError

    seams.load()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        program = _Program(json.loads(sys.argv[1]))
    except EgmError as error:
        print(json.dumps({"error": [error.code, str(error)]}), file=out, flush=True)
        return
    print(json.dumps({"result": None}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"result": getattr(program, request.pop("op"))(**request)}
        except EgmError as error:
            answer = {"error": [error.code, str(error)]}
        print(json.dumps(answer), file=out, flush=True)
    program.close()


if __name__ == "__main__":
    main()
