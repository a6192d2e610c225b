"""Objects whose bytes say whose they are, and readers and writers in processes of their own that check them.

As a program: ``contents.py read|write MASTER SEED KEYS STOP`` works directly (through `EgmStore`) until there is a file
STOP, then prints what it did as JSON.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Worker", "body", "claims", "sizes", "workers"]

HEAD = 64
_UNIT = 10007
"""Bytes after which an object repeats itself: a prime, so that no page of it is like another."""


def sizes(count: int, seed: int) -> list[int]:
    """4 KiB to 8 MiB, both ends among them, mostly small as caches hold them, many of them odd."""
    source = random.Random(seed)
    drawn = [int(4096 * 2 ** (11 * source.random() ** 4)) for _ in range(count - 2)]
    return [4096, 8 << 20, *(min(8 << 20, size + source.choice((0, 0, 1, 7))) for size in drawn)]


def body(key: str, version: str, nbytes: int) -> bytes:
    """An object of ``nbytes``: its key, version and size in front, and bytes that follow from all three."""
    label = f"{key} {version} {nbytes} ".encode()
    assert len(label) <= HEAD <= nbytes
    unit = random.Random(label).randbytes(min(nbytes - HEAD, _UNIT))
    return (label.ljust(HEAD) + unit * (nbytes // _UNIT + 1))[:nbytes]


def claims(key: str, data: bytes) -> str:
    """What is wrong with ``data`` as an object of ``key``; empty when it is one, whole."""
    words = data[:HEAD].decode(errors="replace").split()
    if len(words) != 3 or words[0] != key:
        return f"{key}: bytes that begin {bytes(data[:40])!r}"
    if not words[2].isdigit() or int(words[2]) != len(data):
        return f"{key}: {len(data)} bytes of {words[2]}"
    return "" if data == body(key, words[1], len(data)) else f"{key}: a mixture, begun as version {words[1]}"


class Worker:
    """A direct reader or writer in a process of its own."""

    def __init__(self, role: str, master: str, seed: int, keys: int, stop: Path) -> None:
        self.role = role
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.acceptance.contents", role, master, str(seed), str(keys), str(stop)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def begun(self) -> None:
        """Returns once it is connected."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line == "begun\n", self._process.communicate()[1]

    def result(self, timeout: float = 60.0) -> dict[str, Any]:
        stdout, stderr = self._process.communicate(timeout=timeout)
        assert self._process.returncode == 0, stderr
        found = json.loads(stdout)
        assert isinstance(found, dict)
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def workers(roles: Sequence[str], master: str, keys: int, stop: Path) -> Iterator[list[Worker]]:
    """One for each role, all over the same keys; ended when left."""
    found: list[Worker] = []
    try:
        for seed, role in enumerate(roles):
            found.append(Worker(role, master, seed, keys, stop))
        for worker in found:
            worker.begun()
        yield found
    finally:
        for worker in found:
            worker.kill()


def _work(role: str, address: str, seed: int, keys: int, stop: Path) -> dict[str, Any]:
    from egmctl.consumer import EgmStore, Timing
    from egmctl.errors import EgmError

    source = random.Random(seed)
    done: list[float] = []
    wrong: list[str] = []
    errors: dict[str, int] = {}
    with EgmStore.connect(address, timing=Timing(retry=0.5, no_space=0.3, put_deadline=0.8)) as store:
        print("begun", flush=True)
        while not stop.exists():
            key = f"k{source.randrange(keys)}"
            try:
                if role == "write":
                    if source.random() < 0.3:
                        store.remove(key, force=True)
                    size = 20_000 + source.randrange(600_000)
                    store.put(key, body(key, f"{os.getpid()}.{time.monotonic_ns()}", size))
                else:
                    found = claims(key, store.get(key))
                    if found:
                        wrong.append(found)
                done.append(time.time())
            except EgmError as error:
                errors[error.code] = errors.get(error.code, 0) + 1
                if error.code in ("object-exists", "object-not-found"):
                    time.sleep(0.002)
    return {"role": role, "done": done, "wrong": wrong[:20], "errors": errors}


if __name__ == "__main__":
    print(json.dumps(_work(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))))
