"""Ctrl-C at any moment of any command: once it undoes (a teardown stops, and goes on later), twice it stops at once."""

from __future__ import annotations

import json
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from egmctl.ledger import OwnerLock
from egmctl.paths import Paths
from egmctl.provider import pool_status
from egmctl.steps import watch
from tests.lifecycle.support import command, start_command, write_plan
from tests.provider.pools import agents, listed, nothing_left, small_plan, until
from tests.support.master import Master

REPOSITORY = Path(__file__).resolve().parents[2]
ROUNDS = 6


@dataclass
class Ended:
    code: int
    out: str
    said: str
    signals: int


class Host:
    """Commands with an interrupt at a random moment, each step of them stretched so that every one is met sometimes."""

    def __init__(self, paths: Paths, folder: Path, master: Master, seed: int) -> None:
        self.paths = paths
        self.folder = folder
        self.master = master
        self.random = random.Random(seed)
        self.plan = str(write_plan(small_plan(master, chunks=3), folder))

    def interrupted(self, *arguments: str, within: float, signals: int = 1) -> Ended:
        mark = self.folder / "begun"
        mark.unlink(missing_ok=True)
        environment = {
            "EGMCTL_SEAMS": "tests.lifecycle.seams:slow",
            "EGMCTL_TEST_SLOW": "0.02",
            "EGMCTL_TEST_MARK": str(mark),
            "PYTHONPATH": str(REPOSITORY),
        }
        process = start_command(self.paths, *arguments, environment=environment)
        try:
            until(mark.exists, 30, 0.002)
            sent = 0
            for number in range(signals):
                time.sleep(self.random.uniform(0, within if number == 0 else 0.3))
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                    sent += 1
            out, said = process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
        assert "Traceback" not in said, said
        assert "defect" not in said, said
        return Ended(process.returncode, out, said, sent)

    def do(self, *arguments: str) -> str:
        code, out, said = command(self.paths, *arguments)
        assert code == 0, said
        return out

    def state(self) -> str:
        """The pool's state; "gone" when it is not listed."""
        entries = pool_status(self.paths)
        return str(entries[0]["state"]) if entries else "gone"

    def clean(self) -> None:
        """Teardown until it is clean, and a look at whether it is."""
        deadline = time.monotonic() + 60
        while self.paths.ledger("dev").exists():
            code, _, said = command(self.paths, "teardown", "dev", "--now")
            if code == 0:
                break
            assert code in (4, 5), said
            assert time.monotonic() < deadline, said
        until(lambda: not agents(self.paths), 30)
        assert self.state() == "gone"
        assert listed(self.master) == []
        while (left := nothing_left(self.paths)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == []


@pytest.fixture
def host(quick_master: Master, tmp_path: Path, state: Path, request: pytest.FixtureRequest) -> Host:
    return Host(Paths.resolve(state), tmp_path, quick_master, len(request.node.name))


INTERRUPTED = (130, -signal.SIGINT)
"""What a command exits with that had begun nothing: Python ends by the signal itself where it met an import."""


def test_a_provision_interrupted_once_is_undone_whenever_that_is(host: Host) -> None:
    for _ in range(ROUNDS):
        ended = host.interrupted("provision", host.plan, within=2.5)
        if ended.code == 0 or ended.code in INTERRUPTED:
            # Before it had begun, or after it was done: then the pool is there, whole.
            assert host.state() in ("gone", "provisioned"), ended.said
        else:
            assert ended.code == 1, ended.said
            assert host.state() == "gone", ended.said
            assert not agents(host.paths), ended.said
        host.clean()


def test_a_mount_interrupted_once_is_undone_and_the_pool_stays_provisioned(host: Host) -> None:
    host.do("provision", host.plan)
    for _ in range(ROUNDS):
        ended = host.interrupted("mount", "dev", within=1.5)
        if ended.code == 0 or ended.code in INTERRUPTED:
            assert host.state() in ("provisioned", "ready"), ended.said
        else:
            assert ended.code == 1, ended.said
            assert host.state() == "provisioned", ended.said
            assert listed(host.master) == []
        if host.state() == "ready":
            host.do("teardown", "dev", "--now")
            host.do("provision", host.plan)
    host.do("mount", "dev")
    host.clean()


def test_a_teardown_interrupted_once_stops_and_the_next_one_goes_on(host: Host) -> None:
    for _ in range(ROUNDS):
        host.do("provision", host.plan, "--mount")
        ended = host.interrupted("teardown", "dev", "--now", within=1.5)
        if ended.code == 4:
            assert host.state() == "cleanup-pending", ended.said
            assert "teardown" in ended.said
        elif ended.code in INTERRUPTED:
            assert host.state() in ("ready", "gone"), ended.said
        else:
            assert (ended.code, host.state()) == (0, "gone"), ended.said
        host.clean()


def test_a_teardown_of_a_dead_agents_pool_interrupted_once_stops_and_the_next_one_goes_on(host: Host) -> None:
    codes = set()
    for _ in range(ROUNDS):
        host.do("provision", host.plan, "--mount")
        (agent,) = agents(host.paths)
        agent.kill()
        agent.wait(10)
        ended = host.interrupted("teardown", "dev", within=1.5)
        codes.add(ended.code)
        assert ended.code in (0, 4, *INTERRUPTED), ended.said
        if ended.code == 0:
            assert host.state() == "gone"
        host.clean()
    assert codes


@pytest.mark.parametrize("name", ["provision", "mount", "teardown"])
def test_an_interrupt_twice_stops_at_once_and_the_ledger_keeps_what_is_left(host: Host, name: str) -> None:
    for _ in range(ROUNDS):
        arguments = [name, "dev", "--now"] if name == "teardown" else [name, "dev"]
        if name == "provision":
            arguments = [name, host.plan, "--mount"]
        else:
            host.do("provision", host.plan, *(["--mount"] if name == "teardown" else []))
        began = time.monotonic()
        ended = host.interrupted(*arguments, within=1.5, signals=2)
        assert time.monotonic() - began < 30
        assert ended.code in (0, 1, 4, *INTERRUPTED), ended.said
        if ended.signals == 2 and "once more" in ended.said and ended.code == 4:
            assert "teardown" in ended.said
        host.clean()


@pytest.mark.parametrize("arguments", [("verify", "dev"), ("bench", "dev", "--count", "8", "--block", "64KiB,1MiB")])
def test_a_measurement_interrupted_leaves_the_pool_as_it_was_and_none_of_its_objects(
    host: Host, arguments: tuple[str, ...]
) -> None:
    host.do("provision", host.plan, "--mount")
    for _ in range(ROUNDS):
        ended = host.interrupted(*arguments, within=2.0)
        assert ended.code in (0, *INTERRUPTED), ended.said
        assert host.state() == "ready"
        assert keys(host.master) == []
    host.clean()


def keys(master: Master) -> list[str]:
    import urllib.request

    with urllib.request.urlopen(f"http://{master.admin_address}/get_all_keys", timeout=5) as answer:
        return [line for line in answer.read().decode().splitlines() if line]


@pytest.mark.parametrize("arguments", [("plan", "PLAN"), ("status",), ("doctor",), ("topology",)])
def test_a_command_that_only_looks_is_interrupted_in_one_line(host: Host, arguments: tuple[str, ...]) -> None:
    spec = host.folder / "spec.toml"
    spec.write_text(
        '[pool]\nname = "dev"\nmemory = "shm"\nenable_egm_store_pool = true\nglobal_segment_size = "32MiB"\n'
        '[mooncake]\nlocal_hostname = "127.0.0.1"\nmaster_server_addr = "127.0.0.1:50051"\n'
    )
    for _ in range(ROUNDS):
        ended = host.interrupted(*(str(spec) if word == "PLAN" else word for word in arguments), within=0.3)
        assert ended.code in (0, 3, *INTERRUPTED), ended.said
        assert len(ended.said.splitlines()) < 20
    assert json.loads(command(host.paths, "status", "--json")[1])["pools"] == []


def test_an_interrupt_in_the_last_act_of_all_leaves_no_lock_behind(tmp_path: Path) -> None:
    lock = OwnerLock.acquire(tmp_path / "dev.lock", "dev", "a test")

    class Interrupt:
        def before(self, site: str, detail: dict[str, object]) -> None:
            if site == "ledger.lock.release":
                raise KeyboardInterrupt

        def after(self, site: str, detail: dict[str, object], error: BaseException | None) -> None:
            pass

    watch(Interrupt())
    try:
        with pytest.raises(KeyboardInterrupt):
            lock.release()
    finally:
        watch(None)
    assert list(tmp_path.iterdir()) == []
    OwnerLock.acquire(tmp_path / "dev.lock", "dev", "a test").release()
