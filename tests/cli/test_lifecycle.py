"""A pool's life from the command line, with a real agent and a real Master."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Result
from tests.support.master import Master

Egmctl = Callable[..., Result]
MIB = 1 << 20


def _spec(folder: Path, name: str = "dev", size: str = "64MiB", master: str = "127.0.0.1:1", more: str = "") -> str:
    path = folder / f"{name}.toml"
    path.write_text(
        f'[pool]\nname = "{name}"\nmemory = "shm"\nenable_egm_store_pool = true\negm_numa_nodes = "0"\n'
        f'global_segment_size = "{size}"\nmax_chunk_size = "32MiB"\nlease_ttl = 1\nclient_expiry = 2\n{more}'
        f'[mooncake]\nprotocol = "tcp"\nlocal_hostname = "127.0.0.1"\nmaster_server_addr = "{master}"\n'
    )
    return str(path)


@pytest.fixture
def egmctl(egmctl: Egmctl, state: Path) -> Iterator[Egmctl]:
    """The same, and no agent is left behind."""
    yield egmctl
    egmctl("teardown", "--all", "--now", "--abandon")
    assert not _agents(state)


def _agents(state: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"egmctl.provider.agent" in words and str(state).encode() in words:
            found.append(int(entry.name))
    return found


def _pool(egmctl: Egmctl, name: str = "dev") -> dict[str, Any]:
    (pool,) = egmctl("status", name, "--json").document["pools"]
    assert isinstance(pool, dict)
    return pool


def test_a_pool_lives_and_goes_and_every_command_again_is_success(
    egmctl: Egmctl, tmp_path: Path, master: Master
) -> None:
    spec = _spec(tmp_path, master=master.address)
    first = egmctl("provision", spec, "--json")
    assert first.code == 0, first.stderr
    pool = first.document["pool"]
    assert first.document["schema"] == "egmctl/provision/1"
    assert (pool["name"], pool["state"], pool["ready"], pool["bytes"]) == ("dev", "provisioned", False, 64 * MIB)
    assert "64 MiB of 64 MiB" in first.stderr
    assert egmctl("provision", spec).code == 0

    mounted = egmctl("mount", "dev", "--json")
    assert mounted.code == 0, mounted.stderr
    assert mounted.document["schema"] == "egmctl/mount/1"
    again = egmctl("mount", "dev")
    assert again.code == 0
    assert "mounted already" in again.stderr
    pool = _pool(egmctl)
    assert (pool["state"], pool["ready"], pool["chunks"], pool["mounted"]) == ("ready", True, 2, 2)
    assert pool["master"] == master.address
    assert not pool["cleanup_pending"]
    os.kill(pool["agent_pid"], 0)
    shown = egmctl("status").stdout
    for word in ("dev", "ready", "shm", "64 MiB", "2 of 2", master.address):
        assert word in shown

    gone = egmctl("teardown", "dev", "--grace", "0", "--json")
    assert gone.code == 0, gone.stderr
    assert [row["state"] for row in gone.document["pools"]] == ["gone"]
    again = egmctl("teardown", "dev")
    assert (again.code, again.stdout) == (0, "dev: gone already\n")
    assert egmctl("status", "--json").document["pools"] == []


def test_a_saved_plan_is_provisioned_and_mounted_in_one_go(egmctl: Egmctl, tmp_path: Path, master: Master) -> None:
    plan = tmp_path / "plan.json"
    assert egmctl("plan", _spec(tmp_path, master=master.address), "--out", str(plan)).code == 0
    result = egmctl("provision", str(plan), "--mount", "--json")
    assert result.code == 0, result.stderr
    assert result.document["pool"]["ready"]


def test_a_plan_for_another_machine_is_stale(egmctl: Egmctl, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    assert egmctl("plan", _spec(tmp_path), "--out", str(saved)).code == 0
    plan = json.loads(saved.read_text())
    plan["fingerprint"] = "node0=0-4095"
    saved.write_text(json.dumps(plan))
    result = egmctl("provision", str(saved), "--json")
    assert result.code == 6
    assert result.document["code"] == "stale-plan"


def test_another_plan_under_the_same_name_is_busy(egmctl: Egmctl, tmp_path: Path) -> None:
    assert egmctl("provision", _spec(tmp_path)).code == 0
    result = egmctl("provision", _spec(tmp_path, size="32MiB"))
    assert result.code == 5
    assert "another plan" in result.stderr


def test_a_master_that_is_down_fails_the_mount_and_the_pool_stays_provisioned(egmctl: Egmctl, tmp_path: Path) -> None:
    assert egmctl("provision", _spec(tmp_path)).code == 0
    result = egmctl("mount", "dev", "--json")
    assert result.code == 1
    assert "127.0.0.1:1" in result.stderr
    assert result.document["schema"] == "egmctl/error/1"
    assert _pool(egmctl)["state"] == "provisioned"


def test_tearing_down_all_pools_tells_each(egmctl: Egmctl, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert egmctl("provision", _spec(tmp_path, name)).code == 0
    result = egmctl("teardown", "--all", "--now", "--json")
    assert result.code == 0
    assert [(row["name"], row["state"]) for row in result.document["pools"]] == [("one", "gone"), ("two", "gone")]


def test_a_pool_that_cannot_be_torn_down_yet_does_not_hold_up_the_others(
    egmctl: Egmctl, tmp_path: Path, master: Master
) -> None:
    assert egmctl("provision", _spec(tmp_path, "one", master=master.address), "--mount").code == 0
    assert egmctl("provision", _spec(tmp_path, "two")).code == 0
    master.stop()
    result = egmctl("teardown", "--all", "--now", "--json")
    assert result.code == 4
    one, two = result.document["pools"]
    assert (one["name"], one["error"]["exit"]) == ("one", 4)
    assert (two["name"], two["state"]) == ("two", "gone")
    assert _pool(egmctl, "one")["cleanup_pending"]
    assert "egmctl teardown one" in egmctl("status").stdout


def test_an_abandoned_pool_is_listed_until_it_is_forgotten(egmctl: Egmctl, tmp_path: Path, master: Master) -> None:
    assert egmctl("provision", _spec(tmp_path, master=master.address), "--mount").code == 0
    assert egmctl("status", "dev", "--forget").code == 2
    master.stop()
    done = egmctl("teardown", "dev", "--now", "--abandon")
    assert done.code == 0
    left = [line for line in (done.stdout + done.stderr).splitlines() if "may still be listed at Master" in line]
    assert left
    assert len(left) == len({line.removeprefix("egmctl: warning:").strip() for line in left})  # each once
    assert _pool(egmctl)["state"] == "abandoned"
    assert egmctl("status", "dev", "--forget", "--json").document["forgotten"] == "dev"
    assert egmctl("status", "dev").code == 2


def _start(state: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "egmctl", *arguments],
        env={**os.environ, "EGMCTL_STATE_DIR": str(state), "NO_COLOR": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_provisioning_undoes_and_leaves_nothing(
    egmctl: Egmctl, tmp_path: Path, state: Path, number: signal.Signals
) -> None:
    process = _start(state, "provision", _spec(tmp_path, size="1GiB"))
    assert process.stderr is not None
    process.stderr.readline()  # the first word of progress: the agent is at work
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 1, said
    assert f"{number.name}: stopping and undoing" in said
    assert "Traceback" not in said
    assert egmctl("status", "--json").document["pools"] == []
    assert not _agents(state)


SLOW = """
import time
from egmctl import steps
class Slow:
    def before(self, site, detail):
        if site.startswith("memory."):  # undoing it takes so long that a second interrupt always falls into it
            time.sleep(2 if site == "memory.shm.unmap" else 0.2)
    def after(self, site, detail, error):
        pass
def install():
    steps.watch(Slow())
"""


def test_a_second_interrupt_stops_at_once_and_says_that_cleanup_is_pending(
    egmctl: Egmctl, tmp_path: Path, state: Path
) -> None:
    (tmp_path / "slow_seam.py").write_text(SLOW)
    seam = {"EGMCTL_SEAMS": "slow_seam:install", "PYTHONPATH": str(tmp_path)}
    process = _start(state, "provision", _spec(tmp_path, size="256MiB"), "--json", **seam)
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(signal.SIGINT)
    while "once more" not in process.stderr.readline():
        pass
    time.sleep(0.3)  # two that come in the same instant are one
    process.send_signal(signal.SIGINT)
    document, said = process.communicate(timeout=60)
    assert process.returncode == 4, said
    assert json.loads(document)["code"] == "cleanup-pending"
    # The agent goes on undoing by itself.
    deadline = time.monotonic() + 60
    while _agents(state) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _agents(state)
    assert egmctl("status", "--json").document["pools"] == []


def test_an_agent_in_the_foreground_says_when_the_pool_is_there_and_ends_with_it(
    egmctl: Egmctl, tmp_path: Path, state: Path
) -> None:
    process = _start(state, "provision", _spec(tmp_path), "--foreground", "--json")
    assert process.stdout is not None
    text = ""
    while not text.endswith("\n}\n"):
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        text += line
    assert json.loads(text)["pool"]["state"] == "provisioned"
    assert _pool(egmctl)["agent_pid"] == process.pid
    process.send_signal(signal.SIGTERM)
    rest, said = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, ""), said
    assert egmctl("status", "--json").document["pools"] == []


def test_watching_shows_each_change_as_a_line_of_json(egmctl: Egmctl, tmp_path: Path, state: Path) -> None:
    process = _start(state, "status", "--watch", "--json")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"schema": "egmctl/status/1", "pools": []}
    assert egmctl("provision", _spec(tmp_path)).code == 0
    deadline = time.monotonic() + 30
    states: list[str] = []
    while "provisioned" not in states and time.monotonic() < deadline:
        states.extend(pool["state"] for pool in json.loads(process.stdout.readline())["pools"])
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == 0
    assert states[-1] == "provisioned"
