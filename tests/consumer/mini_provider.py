"""A provider with nothing but what a consumer sees of one: real shared memory, a real handshake endpoint, a control
socket and segments at a real Master. It keeps none of a pool's rules, so that tests can break each of them.

Run as a process of its own (`MiniProvider`), since tests kill it. Orders come as lines on its standard input.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


class MiniProvider:
    """``with MiniProvider(master.address, chunks=[64 << 20]) as provider``: mounted when entered."""

    def __init__(
        self,
        master: str,
        *,
        chunks: list[int],
        port: int = 0,
        address: int | None = None,
        exclusive: bool = True,
        socket_path: str | None = None,
        mount: bool = True,
        kind: str = "shm",
        egm: bool = True,
        protocol: str = "tcp",
        host_id: str | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.environment = environment or {}
        self.options = {
            "master": master,
            "chunks": chunks,
            "port": port,
            "address": address,
            "exclusive": exclusive,
            "mount": mount,
            "kind": kind,
            "egm": egm,
            "protocol": protocol,
            "host_id": host_id,
        }
        self._own_folder = None if socket_path else tempfile.mkdtemp(prefix="egm", dir="/tmp")
        self.socket_path = socket_path or f"{self._own_folder}/s"
        self.options["socket"] = self.socket_path
        self.process: subprocess.Popen[str] | None = None
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> MiniProvider:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.consumer.mini_provider", json.dumps(self.options)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.kill()
            raise RuntimeError("the provider did not start")
        self.facts = json.loads(line)

    @property
    def endpoint(self) -> str:
        return str(self.facts["endpoint"])

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    @property
    def addresses(self) -> list[int]:
        return list(self.facts["addresses"])

    def order(self, op: str, **arguments: Any) -> Any:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        """As a crash: the Master hears nothing of it."""
        if self.process is not None:
            self.process.kill()
            self._reap()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with suppress(OSError, ValueError):
                self.order("unmount")
        self.kill()
        if self._own_folder:
            with suppress(OSError):
                os.unlink(self.socket_path)
            with suppress(OSError):
                os.rmdir(self._own_folder)

    def _reap(self) -> None:
        assert self.process is not None
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


class _Program:
    def __init__(self, options: dict[str, Any]) -> None:
        from egmctl import seams
        from egmctl.memory import ChunkSpec, provider_memory
        from egmctl.mooncake.handshake import HandshakeServer
        from egmctl.mooncake.host import host_id
        from egmctl.mooncake.master import MasterClient, Segment, new_uuid

        seams.load()
        self.options = options
        self.nonce = os.urandom(16).hex()
        self.host_id = options["host_id"] or host_id()
        self.exclusive = options["exclusive"]
        self.withdrawn: set[int] = set()
        self.watchers: list[socket.socket] = []
        self.memory = provider_memory(
            options["kind"], total_bytes=sum(options["chunks"]), address_hint=options["address"]
        )
        self.chunks = [
            self.memory.create(ChunkSpec(index, 0, nbytes), lambda done: None)
            for index, nbytes in enumerate(options["chunks"])
        ]
        self.handshake = HandshakeServer("127.0.0.1", options["port"], self.descriptor)
        self.endpoint = self.handshake.endpoint
        self.client = new_uuid()
        self.master = MasterClient(options["master"])
        self.segments = [
            Segment(
                new_uuid(),
                f"{self.endpoint}/numa0/{chunk.spec.index}",
                chunk.address,
                chunk.spec.nbytes,
                self.endpoint,
                options["protocol"],
            )
            for chunk in self.chunks
        ]
        with suppress(FileNotFoundError):
            os.unlink(options["socket"])
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(options["socket"])
        self.listener.listen(64)
        threading.Thread(target=self.accept, daemon=True).start()
        if options["mount"]:
            self.mount()
        threading.Thread(target=self.ping, daemon=True).start()

    def descriptor(self) -> bytes:
        from egmctl.mooncake.descriptor import EgmChunk, EgmFields, nvlink_descriptor, tcp_descriptor

        chunks = [chunk for chunk in self.chunks if chunk.spec.index not in self.withdrawn]
        egm = EgmFields(
            pool="mini",
            nonce=self.nonce,
            kind=self.options["kind"],
            socket=self.options["socket"],
            host_id=self.host_id,
            exclusive=self.exclusive,
            chunks=tuple(EgmChunk(c.spec.index, 0, c.address, c.spec.nbytes) for c in chunks),
        )
        if self.options["kind"] == "cuda-fabric":
            buffers = [(0, chunk.address, chunk.spec.nbytes, chunk.share().fabric or b"") for chunk in chunks]
            return nvlink_descriptor(self.endpoint, buffers, egm=egm if self.options["egm"] else None).to_bytes()
        return tcp_descriptor(
            self.endpoint,
            [(chunk.address, chunk.spec.nbytes) for chunk in chunks],
            data_host="127.0.0.1",
            data_port=9,
            egm=egm if self.options["egm"] else None,
        ).to_bytes()

    def mount(self) -> None:
        for segment in self.segments:
            self.master.mount_segment(segment, self.client)
        self.master.remount_segments([], self.client)

    def ping(self) -> None:
        from egmctl.errors import EgmError

        while True:
            time.sleep(0.25)
            with suppress(EgmError):
                if self.master.ping(self.client) == 2 and self.options["mount"]:
                    self.mount()

    def accept(self) -> None:
        while True:
            link, _ = self.listener.accept()
            threading.Thread(target=self.serve, args=(link,), daemon=True).start()

    def serve(self, link: socket.socket) -> None:
        for line in link.makefile("rb"):
            request = json.loads(line)
            result: dict[str, Any] = {"nonce": self.nonce, "pool": "mini"}
            if request["op"] == "watch":
                self.watchers.append(link)
                link.sendall(json.dumps({"ok": True, "result": result}).encode() + b"\n")
                continue
            index = request["chunks"][0]
            if index in self.withdrawn:
                error = {"message": "no such chunk"}
                link.sendall(json.dumps({"ok": False, "error": error}).encode() + b"\n")
                continue
            chunk = self.chunks[index]
            share = chunk.share()
            result["chunks"] = [
                {
                    "index": index,
                    "numa_node": 0,
                    "address": chunk.address,
                    "nbytes": chunk.spec.nbytes,
                    "kind": self.options["kind"],
                }
            ]
            assert share.fd is not None
            socket.send_fds(link, [json.dumps({"ok": True, "result": result}).encode() + b"\n"], [share.fd])
            os.close(share.fd)

    def grow(self, nbytes: int) -> None:
        from egmctl.memory import ChunkSpec
        from egmctl.mooncake.master import Segment, new_uuid

        index = len(self.chunks)
        chunk = self.memory.create(ChunkSpec(index, 0, nbytes), lambda done: None)
        self.chunks.append(chunk)
        name = f"{self.endpoint}/numa0/{index}"
        segment = Segment(new_uuid(), name, chunk.address, nbytes, self.endpoint, self.options["protocol"])
        self.segments.append(segment)
        self.master.mount_segment(segment, self.client)

    def withdraw(self, index: int) -> None:
        self.withdrawn.add(index)
        for watcher in self.watchers:
            with suppress(OSError):
                watcher.sendall(json.dumps({"event": "withdrawn", "chunks": [index]}).encode() + b"\n")

    def run(self) -> None:
        facts = {"endpoint": self.endpoint, "addresses": [c.address for c in self.chunks], "nonce": self.nonce}
        print(json.dumps(facts), flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            answer: Any = True
            if order["op"] == "withdraw":
                self.withdraw(order["chunk"])
            elif order["op"] == "exclusive":
                self.exclusive = order["value"]
            elif order["op"] == "mount":
                self.options["mount"] = True
                self.mount()
            elif order["op"] == "unmount":
                self.options["mount"] = False
                for segment in self.segments:
                    self.master.unmount_segment(segment.id, self.client)
            elif order["op"] == "unmount_chunk":
                self.master.unmount_segment(self.segments[order["chunk"]].id, self.client)
            elif order["op"] == "peek":
                base = self.chunks[order["chunk"]].host_view()
                answer = bytes(base[order["offset"] : order["offset"] + order["nbytes"]]).hex()
            elif order["op"] == "fill":
                view = self.chunks[order["chunk"]].host_view()
                view[:] = bytes([order["value"]]) * view.nbytes
            elif order["op"] == "grow":
                self.grow(order["nbytes"])
            elif order["op"] == "answered":
                answer = self.handshake.answered
            print(json.dumps(answer), flush=True)
        os._exit(0)  # the parent is gone


if __name__ == "__main__":
    _Program(json.loads(sys.argv[1])).run()
