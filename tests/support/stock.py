"""Unmodified stock Mooncake, in processes of its own: a Store client, and a bare Transfer Engine.

The same file is the parent's half (`StockClient`, `StockEngine`) and the program (``stock.py client|engine ...``) that
imports the wheel and nothing of egmctl. They speak JSON lines over a pair of pipes, bytes in base64; every call has a
time limit, and the process always ends.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

__all__ = ["StockClient", "StockEngine", "StockError", "StockTimeout"]


class StockError(Exception):
    """The process ended, or its call raised."""


class StockTimeout(StockError):
    """No answer within the time limit; the process may still be at it."""


class _Stock:
    """A stock process; ``with`` ends it. Settings go in at the start."""

    def __init__(self, role: str, *settings: str, environment: dict[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile(prefix="egmctl-stock-")  # noqa: SIM115 - lives as long as this object
        from_child, child_writes = os.pipe()
        child_reads, to_child = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), role, str(child_reads), str(child_writes), *settings],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, "MC_LOG_LEVEL": "WARNING", **(environment or {})},
                pass_fds=(child_reads, child_writes),
            )
        except BaseException:
            os.close(from_child)
            os.close(to_child)
            self._log.close()
            raise
        finally:
            os.close(child_reads)
            os.close(child_writes)
        self._read, self._write = from_child, to_child
        os.set_blocking(self._write, False)
        self._buffer = bytearray()
        self._number = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        """What it printed so far."""
        return os.pread(self._log.fileno(), 1 << 22, 0).decode(errors="replace")

    def call(self, op: str, *, timeout: float = 30.0, **arguments: Any) -> Any:
        """One call in the process; answers to calls that timed out are dropped."""
        self._number += 1
        deadline = time.monotonic() + timeout
        self._send(json.dumps({"n": self._number, "op": op, **arguments}).encode() + b"\n", deadline)
        while True:
            answer = json.loads(self._line(deadline))
            if answer["n"] != self._number:
                continue
            if "error" in answer:
                raise StockError(answer["error"])
            return answer["result"]

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([], [self._write], [], left)[1]:
                raise StockTimeout("the stock process takes no calls")
            try:
                view = view[os.write(self._write, view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise StockError(f"the stock process is gone:\n{self.log()[-2000:]}") from None

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise StockTimeout("no answer from the stock process in time")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise StockError(f"the stock process ended:\n{self.log()[-2000:]}")
            self._buffer += piece
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = bytearray(rest)
        return bytes(line)

    def close(self) -> None:
        """End it, gently first (a clean exit removes what it put at a metadata server)."""
        if self._read < 0:
            return
        os.close(self._write)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()
        os.close(self._read)
        self._read = self._write = -1
        self._log.close()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StockClient(_Stock):
    """`MooncakeDistributedStore`, set up as a pure client: it lends no memory. ``metadata`` as in a spec."""

    def __init__(
        self,
        master: str,
        *,
        metadata: str = "P2PHANDSHAKE",
        host: str = "127.0.0.1",
        local_buffer: int = 32 << 20,
        protocol: str = "tcp",
        timeout: float = 60.0,
        environment: dict[str, str] | None = None,
    ) -> None:
        super().__init__("client", environment=environment)
        try:
            code = self.call(
                "setup",
                host=host,
                metadata=metadata,
                local_buffer=local_buffer,
                protocol=protocol,
                master=master,
                timeout=timeout,
            )
            if code != 0:
                raise StockError(f"setup: {code}\n{self.log()[-2000:]}")
        except BaseException:
            self.close()
            raise

    def put(self, key: str, value: bytes, *, timeout: float = 30.0) -> int:
        """The wheel's own answer: 0, or a negative error code."""
        code: int = self.call("put", key=key, value=base64.b64encode(value).decode(), timeout=timeout)
        return code

    def get(self, key: str, *, timeout: float = 45.0) -> bytes:
        """The object's bytes; empty when it cannot be had, as the wheel answers it."""
        return base64.b64decode(self.call("get", key=key, timeout=timeout))

    def exists(self, key: str, *, timeout: float = 10.0) -> int:
        """1, 0, or a negative error code."""
        code: int = self.call("exists", key=key, timeout=timeout)
        return code

    def size(self, key: str, *, timeout: float = 10.0) -> int:
        """Bytes of an object, or a negative error code."""
        code: int = self.call("size", key=key, timeout=timeout)
        return code

    def remove(self, key: str, *, force: bool = False, timeout: float = 10.0) -> int:
        code: int = self.call("remove", key=key, force=force, timeout=timeout)
        return code


class StockEngine(_Stock):
    """A `TransferEngine` over tcp, with one registered buffer of ``nbytes``."""

    def __init__(
        self,
        *,
        metadata: str = "P2PHANDSHAKE",
        name: str = "127.0.0.1",
        nbytes: int = 1 << 20,
        timeout: float = 30.0,
        environment: dict[str, str] | None = None,
    ) -> None:
        super().__init__("engine", environment=environment)
        try:
            code = self.call("setup", metadata=metadata, name=name, nbytes=nbytes, timeout=timeout)
            if code != 0:
                raise StockError(f"initialize: {code}\n{self.log()[-2000:]}")
        except BaseException:
            self.close()
            raise

    def port(self) -> int:
        """Of its handshake."""
        port: int = self.call("port")
        return port

    def buffer(self) -> int:
        """The address of its registered buffer, in its own process."""
        address: int = self.call("buffer")
        return address

    def first_buffer_address(self, segment: str, *, timeout: float = 70.0) -> int:
        """What the stock engine reads from a peer's descriptor; 0 when it has no buffer that it can use."""
        address: int = self.call("first", segment=segment, timeout=timeout)
        return address

    def write(self, segment: str, address: int, value: bytes, *, timeout: float = 60.0) -> int:
        """Write to a peer's memory; 0 or a negative code."""
        encoded = base64.b64encode(value).decode()
        code: int = self.call("write", segment=segment, address=address, value=encoded, timeout=timeout)
        return code

    def read(self, segment: str, address: int, nbytes: int, *, timeout: float = 60.0) -> bytes | None:
        """Read a peer's memory; None when the transfer failed."""
        found = self.call("read", segment=segment, address=address, nbytes=nbytes, timeout=timeout)
        return None if found is None else base64.b64decode(found)


# The program: nothing below runs in the tests' own process.


def _client() -> dict[str, Any]:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    return {
        "setup": lambda r: store.setup(r["host"], r["metadata"], 0, r["local_buffer"], r["protocol"], "", r["master"]),
        "put": lambda r: store.put(r["key"], base64.b64decode(r["value"])),
        "get": lambda r: base64.b64encode(store.get(r["key"])).decode(),
        "exists": lambda r: store.is_exist(r["key"]),
        "size": lambda r: store.get_size(r["key"]),
        "remove": lambda r: store.remove(r["key"], r["force"]),
    }


def _engine() -> dict[str, Any]:
    import ctypes

    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    buffers: list[Any] = []

    def setup(request: dict[str, Any]) -> int:
        buffers.append(ctypes.create_string_buffer(request["nbytes"]))
        code: int = engine.initialize(request["name"], request["metadata"], "tcp", "")
        return code or engine.register_memory(ctypes.addressof(buffers[0]), request["nbytes"])

    def write(request: dict[str, Any]) -> int:
        value = base64.b64decode(request["value"])
        ctypes.memmove(buffers[0], value, len(value))
        code: int = engine.transfer_sync_write(
            request["segment"], ctypes.addressof(buffers[0]), request["address"], len(value)
        )
        return code

    def read(request: dict[str, Any]) -> str | None:
        nbytes = request["nbytes"]
        code = engine.transfer_sync_read(request["segment"], ctypes.addressof(buffers[0]), request["address"], nbytes)
        return None if code else base64.b64encode(ctypes.string_at(buffers[0], nbytes)).decode()

    return {
        "setup": setup,
        "port": lambda r: engine.get_rpc_port(),
        "buffer": lambda r: ctypes.addressof(buffers[0]),
        "first": lambda r: engine.get_first_buffer_address(r["segment"]),
        "write": write,
        "read": read,
    }


def _program() -> None:
    role, reads, writes = sys.argv[1:4]
    calls = {"client": _client, "engine": _engine}[role]()
    with os.fdopen(int(reads), "rb") as source, os.fdopen(int(writes), "wb") as sink:
        for line in source:
            request = json.loads(line)
            answer: dict[str, Any] = {"n": request["n"]}
            try:
                answer["result"] = calls[request["op"]](request)
            except Exception as error:
                answer["error"] = f"{type(error).__name__}: {error}"
            sink.write(json.dumps(answer).encode() + b"\n")
            sink.flush()


if __name__ == "__main__":
    # This folder's own modules must not stand before anybody else's; and the process ends with the tests'.
    sys.path.pop(0)
    _program()
