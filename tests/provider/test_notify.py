"""What a supervisor that speaks sd_notify(3) is told: through real sockets, in the end by a real agent."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from egmctl.ledger import read_only
from egmctl.paths import Paths
from egmctl.provider import health
from egmctl.provider.agent import run_agent
from egmctl.provider.notify import Notifier
from egmctl.provider.tending import Tender
from tests.provider.pools import listed, small_plan, until
from tests.support.master import Master


class Supervisor:
    """A socket as systemd's, and what came in on it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind("\0" + address[1:] if address.startswith("@") else address)
        self._sock.setblocking(False)
        self._told: list[str] = []

    @property
    def told(self) -> list[str]:
        while True:
            try:
                self._told.append(self._sock.recv(4096).decode())
            except BlockingIOError:
                return list(self._told)

    def close(self) -> None:
        self._sock.close()


@pytest.fixture(params=["path", "abstract"])
def any_supervisor(request: pytest.FixtureRequest) -> Iterator[Supervisor]:
    with tempfile.TemporaryDirectory(prefix="egm", dir="/tmp") as folder:
        here = Supervisor(f"{folder}/notify" if request.param == "path" else f"@egm-{secrets.token_hex(8)}")
        yield here
        here.close()


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    here = Supervisor(f"@egm-{secrets.token_hex(8)}")
    yield here
    here.close()


def quiet() -> str:
    return ""


def idle() -> bool:
    return False


def test_it_is_told_ready_and_stopping_and_stopping_once(any_supervisor: Supervisor) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": any_supervisor.address})
    notifier.ready()
    notifier.stopping()
    notifier.stopping()
    assert any_supervisor.told == ["READY=1", "STOPPING=1"]


def test_the_status_is_sent_when_it_changes_as_one_line(supervisor: Supervisor) -> None:
    status = ["degraded: the Master\ndoes not answer"]
    with Notifier({"NOTIFY_SOCKET": supervisor.address}).watch(lambda: status[0], idle, quiet):
        until(lambda: supervisor.told)
        time.sleep(1.2)
        status[0] = "ready"
        until(lambda: "STATUS=ready" in supervisor.told)
    assert supervisor.told == ["STATUS=degraded: the Master does not answer", "STATUS=ready"]


def test_the_watchdog_is_fed_twice_an_interval_and_not_when_something_is_stuck(supervisor: Supervisor) -> None:
    stuck = [""]
    environ = {"NOTIFY_SOCKET": supervisor.address, "WATCHDOG_USEC": "600000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier(environ)
    assert notifier.watchdog_s == 0.6
    with notifier.watch(lambda: "ready", idle, lambda: stuck[0]):
        until(lambda: supervisor.told.count("WATCHDOG=1") >= 4)
        stuck[0] = "the worker has given no sign for 130 s"
        until(lambda: "STATUS=stuck: the worker has given no sign for 130 s" in supervisor.told)
        before = supervisor.told.count("WATCHDOG=1")
        time.sleep(1.0)
        assert supervisor.told.count("WATCHDOG=1") == before
        stuck[0] = ""
        until(lambda: supervisor.told.count("WATCHDOG=1") > before)


def test_signs_of_life_come_well_within_a_long_interval_and_not_every_second(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("egmctl.provider.notify.TICK", 0.05)
    environ = {"NOTIFY_SOCKET": supervisor.address, "WATCHDOG_USEC": "2000000"}
    times = []
    with Notifier(environ).watch(quiet, idle, quiet):
        for count in (1, 2, 3):
            until(lambda count=count: supervisor.told.count("WATCHDOG=1") >= count)
            times.append(time.monotonic())
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert all(0.7 < gap < 1.6 for gap in gaps), gaps


def test_more_time_is_asked_for_while_work_goes_on(supervisor: Supervisor) -> None:
    busy, stuck = [True], [""]
    with Notifier({"NOTIFY_SOCKET": supervisor.address}).watch(quiet, lambda: busy[0], lambda: stuck[0]):
        until(lambda: supervisor.told.count("EXTEND_TIMEOUT_USEC=60000000") >= 2)
        stuck[0] = "the worker"
        until(lambda: "STATUS=stuck: the worker" in supervisor.told)
        count = len(supervisor.told)
        time.sleep(1.5)
        assert len(supervisor.told) == count


@pytest.mark.parametrize(
    ("usec", "pid"),
    [("", ""), ("0", ""), ("x", ""), ("-5", ""), ("²", ""), ("600000", "1")],
)
def test_without_a_watchdog_for_this_process_none_is_fed(supervisor: Supervisor, usec: str, pid: str) -> None:
    environ = {"NOTIFY_SOCKET": supervisor.address, "WATCHDOG_USEC": usec, "WATCHDOG_PID": pid}
    notifier = Notifier(environ)
    assert notifier.watchdog_s is None
    assert environ == {}  # no child speaks in this process's name
    with notifier.watch(lambda: "ready", idle, quiet):
        until(lambda: supervisor.told)
    assert supervisor.told == ["STATUS=ready"]


@pytest.mark.parametrize("address", ["", "relative", "@", "vsock:2:1", "/nonexistent/socket"])
def test_nobody_listening_is_no_trouble(address: str) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address} if address else {})
    notifier.ready()
    notifier.stopping()
    notifier.close()
    assert notifier.wanted == (address == "/nonexistent/socket")


def test_a_supervisor_that_does_not_read_holds_nothing_up(supervisor: Supervisor) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": supervisor.address})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as filler:
        filler.setblocking(False)
        with pytest.raises(BlockingIOError):  # noqa: PT012 - at whichever message
            while True:
                filler.sendto(b"x" * 1000, "\0" + supervisor.address[1:])
        began = time.monotonic()
        notifier.ready()
        assert time.monotonic() - began < 3


# An agent


def spec_file(folder: Path, master: Master) -> Path:
    path = folder / "dev.toml"
    path.write_text(
        '[pool]\nname = "dev"\nmemory = "shm"\nenable_egm_store_pool = true\negm_numa_nodes = "0"\n'
        'global_segment_size = "32MiB"\nmax_chunk_size = "16MiB"\nlease_ttl = 1\nclient_expiry = 2\n'
        f'[mooncake]\nlocal_hostname = "127.0.0.1"\nmaster_server_addr = "{master.address}"\n'
    )
    return path


Foreground = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def foreground(tmp_path: Path, quick_master: Master, supervisor: Supervisor) -> Iterator[Foreground]:
    """``egmctl provision --foreground`` as a unit of type notify would start it."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*options: str, **environ: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "egmctl", "--state-dir", str(tmp_path / "state"), "provision"]
        command += [str(spec_file(tmp_path, quick_master)), "--foreground", *options]
        told = {"NOTIFY_SOCKET": supervisor.address, "WATCHDOG_USEC": "1000000", **environ}
        process = subprocess.Popen(
            command,
            env={**os.environ, **told},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # also where the tests run under nohup
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_unit_is_ready_once_the_pool_is_mounted_lives_and_is_stopped_by_sigterm(
    foreground: Foreground, supervisor: Supervisor
) -> None:
    process = foreground("--mount")
    until(lambda: "READY=1" in supervisor.told, 30)
    until(lambda: "STATUS=ready" in supervisor.told)
    assert [text for text in supervisor.told if text.startswith("STATUS=provisioning")]
    fed = supervisor.told.count("WATCHDOG=1")
    until(lambda: supervisor.told.count("WATCHDOG=1") >= fed + 3)
    assert "STOPPING=1" not in supervisor.told
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 0, stderr
    told = supervisor.told
    assert told.count("READY=1") == told.count("STOPPING=1") == 1
    assert told.index("READY=1") < told.index("STOPPING=1")
    assert not [text for text in told if "stuck" in text]


def test_without_mount_a_unit_is_ready_once_the_pool_is_provisioned(
    foreground: Foreground, supervisor: Supervisor
) -> None:
    foreground()
    until(lambda: "READY=1" in supervisor.told, 30)
    until(lambda: "STATUS=provisioned" in supervisor.told)


def test_a_unit_whose_mount_fails_is_never_ready(
    foreground: Foreground, supervisor: Supervisor, quick_master: Master
) -> None:
    quick_master.kill()
    process = foreground("--mount")
    until(lambda: any("STATUS=provisioned" in text for text in supervisor.told), 30)
    time.sleep(1)
    assert "READY=1" not in supervisor.told
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    said = process.stderr.read() or b""
    assert b"the Master does not answer, the pool stays provisioned" in said
    assert b"this agent goes on" in said
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 1


def test_a_closed_terminal_ends_an_agent_in_the_foreground_as_sigterm_does(
    foreground: Foreground, supervisor: Supervisor, quick_master: Master
) -> None:
    process = foreground("--mount")
    until(lambda: "READY=1" in supervisor.told, 30)
    process.send_signal(signal.SIGHUP)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 0, stderr
    assert supervisor.told.count("STOPPING=1") == 1
    assert listed(quick_master) == []


def test_a_teardown_that_a_client_asks_for_is_said_as_stopping(
    foreground: Foreground, supervisor: Supervisor, tmp_path: Path
) -> None:
    process = foreground("--mount")
    until(lambda: "READY=1" in supervisor.told, 30)
    teardown = [sys.executable, "-m", "egmctl", "--state-dir", str(tmp_path / "state"), "teardown", "dev"]
    subprocess.run([*teardown, "--grace", "1"], check=True, capture_output=True, timeout=60)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert supervisor.told.count("STOPPING=1") == 1


def test_a_detached_agent_does_not_speak_for_the_unit_that_started_it(
    supervisor: Supervisor, quick_master: Master, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", supervisor.address)
    monkeypatch.setenv("WATCHDOG_USEC", "100000")

    def enough(report: dict[str, object]) -> None:
        assert report["state"] == "provisioned"
        os.kill(os.getpid(), signal.SIGTERM)

    run_agent(small_plan(quick_master), paths, started=enough, grace=0.0)
    record = read_only(paths.ledger("dev"))
    assert record is not None
    assert record.state == "gone"
    assert supervisor.told == []


def test_a_unit_whose_worker_hangs_is_not_fed_any_more(
    supervisor: Supervisor, quick_master: Master, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "WORKER_QUIET", 0.5)
    monkeypatch.setenv("NOTIFY_SOCKET", supervisor.address)
    monkeypatch.setenv("WATCHDOG_USEC", "400000")
    seen: dict[str, int] = {}

    tick, turns = Tender.tick, []

    def slow_tick(self: Tender) -> None:
        if not turns:
            turns.append(1)
            until(lambda: supervisor.told.count("WATCHDOG=1") > 0)
            time.sleep(1.0)
            seen["fed"] = supervisor.told.count("WATCHDOG=1")
            time.sleep(1.5)
            seen["later"] = supervisor.told.count("WATCHDOG=1")
            os.kill(os.getpid(), signal.SIGTERM)
        tick(self)

    monkeypatch.setattr(Tender, "tick", slow_tick)
    run_agent(small_plan(quick_master), paths, grace=0.0, interactive=True)
    assert seen["later"] == seen["fed"] > 0
    stuck = [text for text in supervisor.told if text.startswith("STATUS=stuck: the worker")]
    assert stuck
    assert re.search(r"no sign for \d+ s", stuck[0])
