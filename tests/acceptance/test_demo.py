"""The demo, as a newcomer runs it, and as somebody who loses patience does."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.hosts import Host, until

CLAIMS = (
    "the pool is ready",
    "put and got by the stock client, byte-equal",
    "lie in our chunk",
    "put directly, read back by the stock client, byte-equal",
    "of the stock client's read directly, byte-equal",
    "checked",
    "no operation failed",
    "the Master lists no segment",
    "no process is left",
    "no socket is left",
    "open or mapped in any process",
    "the ledger says gone",
)


@pytest.fixture
def demo_host(new_host: Callable[..., Host], tmp_path: Path) -> Host:
    """A host whose temporary files are in one place."""
    folder = tmp_path / "t"
    folder.mkdir()
    return new_host(environment={"TMPDIR": str(folder)})


def _nothing_left(host: Host) -> None:
    assert [f"{p.pid} {p.name()}" for p in host.processes()] == []
    assert os.listdir(host.environment["TMPDIR"]) == []


def test_the_demo_shows_the_whole_life_of_a_pool_within_a_minute_and_leaves_nothing(demo_host: Host) -> None:
    began = time.monotonic()
    result = demo_host.run("demo", "--json")
    assert result.code == 0, result.stderr
    assert time.monotonic() - began < 60
    document = result.document
    assert document["ok"]
    assert all(step["holds"] for step in document["steps"])
    claims = [step["claim"] for step in document["steps"]]
    for words in CLAIMS:
        assert any(words in claim for claim in claims), words
    _nothing_left(demo_host)


@pytest.mark.parametrize(
    ("moment", "number", "times"),
    [
        ("== A Master", signal.SIGINT, 1),
        ("== Provision", signal.SIGTERM, 1),
        ("== Provision", signal.SIGINT, 2),
        ("== Mount", signal.SIGINT, 1),
        ("== Direct", signal.SIGHUP, 1),
        ("== Bench", signal.SIGTERM, 1),
        ("== Bench", signal.SIGINT, 3),
        ("== Teardown", signal.SIGINT, 1),
    ],
)
def test_a_demo_that_is_interrupted_leaves_nothing(
    demo_host: Host, moment: str, number: signal.Signals, times: int
) -> None:
    process = demo_host.start("demo")
    said = _until_it_says(process, moment)
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.2)
    said += process.communicate(timeout=90)[1]
    assert process.returncode in (1, 4, 130) or "All of it" in said, said
    assert "Traceback" not in said
    assert "defect" not in said
    until(lambda: not demo_host.processes(), 30)
    _nothing_left(demo_host)


def _until_it_says(process: subprocess.Popen[str], words: str) -> str:
    assert process.stderr is not None
    said = ""
    while words not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    return said
