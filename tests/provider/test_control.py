"""The control socket: who may, what they get, and what garbage does to it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from egmctl.errors import BusyError, EgmError, UsageError
from egmctl.ledger import is_running, read_only
from egmctl.memory import Share, import_share
from egmctl.paths import Paths
from egmctl.provider import pool_status, provision, teardown_pool
from egmctl.provider.agent import Agent
from egmctl.provider.control import MAX_CLIENTS, RESERVED
from egmctl.provider.control_client import AgentGone, ControlClient
from egmctl.provider.messages import MAX_LINE
from tests.provider.pools import agent_here, agents, listed, nothing_left, run, small_plan, teardown_now, until
from tests.support.master import Master


@pytest.fixture
def agent(quick_master: Master, paths: Paths) -> Iterator[Agent]:
    with agent_here(small_plan(quick_master, chunks=3), paths) as agent:
        run(agent, "provision", agent.pool.provision)
        yield agent


@contextlib.contextmanager
def raw(agent: Agent) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(agent.control.path))  # waits while the backlog is full
        sock.settimeout(10)
        yield sock


def reply(sock: socket.socket) -> dict[str, Any]:
    data = b""
    while not data.endswith(b"\n"):
        more = sock.recv(1 << 16)
        if not more:
            raise EOFError(data)
        data += more
    return json.loads(data.splitlines()[-1])  # type: ignore[no-any-return]


def test_the_socket_and_its_folder_are_the_owners_alone(agent: Agent) -> None:
    assert stat.S_IMODE(agent.control.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(agent.control.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(agent.paths.ledger("dev").stat().st_mode) == 0o600


@pytest.mark.parametrize("count", [1, 3])
def test_exported_descriptors_are_the_chunks_themselves(agent: Agent, count: int) -> None:
    with raw(agent) as sock:
        sock.sendall(json.dumps({"op": "export", "chunks": list(range(count))}).encode() + b"\n")
        data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 64)
    answer = json.loads(data)["result"]
    assert answer["nonce"] == agent.pool.record_now().nonce
    assert [row["index"] for row in answer["chunks"]] == list(range(count))
    assert len(fds) == count
    for row, fd in zip(answer["chunks"], fds, strict=True):
        chunk = agent.pool.parts.chunks[row["index"]]
        assert row["address"] == chunk.address
        with chunk.host_view() as view:
            view[:5] = b"hello"
        mapping = import_share(Share(row["kind"], row["numa_node"], row["nbytes"], fd=fd), devices=[])
        try:
            with mapping.host_view() as view:
                assert bytes(view[:5]) == b"hello"
        finally:
            mapping.close()
            os.close(fd)


def test_more_descriptors_than_fit_one_message_come_in_several(quick_master: Master, paths: Paths) -> None:
    with agent_here(small_plan(quick_master, chunks=3), paths) as agent:
        run(agent, "provision", agent.pool.provision)
        wanted = [0, 1, 2] * 50
        fds: list[int] = []
        with raw(agent) as sock:
            sock.sendall(json.dumps({"op": "export", "chunks": wanted}).encode() + b"\n")
            data = b""
            while b'"ok"' not in data or not data.endswith(b"\n"):
                more, some, flags, _ = socket.recv_fds(sock, 1 << 16, 64)
                assert not flags & socket.MSG_CTRUNC
                data += more
                fds += some
        try:
            assert len(fds) == len(wanted)
            inodes = [os.fstat(fd).st_ino for fd in fds]
            assert inodes == inodes[:3] * 50
        finally:
            for fd in fds:
                os.close(fd)


def test_a_chunk_that_does_not_exist_is_not_exported(agent: Agent) -> None:
    with ControlClient(agent.control.path) as client:
        for chunks in ([7], ["0"], 0, [True], [-1]):
            with pytest.raises(EgmError):
                client.ask("export", chunks=chunks)
        assert client.ask("status")["state"] == "provisioned"


def test_however_many_chunks_are_asked_for_the_agent_has_few_descriptors_open(agent: Agent) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with raw(agent) as sock:
        sock.sendall(json.dumps({"op": "export", "chunks": [0] * 5000}).encode() + b"\n")
        until(lambda: len(os.listdir("/proc/self/fd")) > before + 1)
        for _ in range(20):  # nobody reads, so the agent is in the middle of it
            assert len(os.listdir("/proc/self/fd")) < before + 100
            time.sleep(0.01)


def test_a_watcher_is_told_of_the_withdrawal_and_then_of_the_end(agent: Agent) -> None:
    with raw(agent) as sock:
        sock.sendall(b'{"op":"watch"}\n')
        assert reply(sock)["result"] == {"nonce": agent.pool.record_now().nonce, "pool": "dev"}
        teardown = agent.command("teardown", lambda task: agent.pool.teardown(task, 0.0))
        assert reply(sock) == {"event": "withdrawn", "chunks": [0, 1, 2]}
        teardown.wait()
        agent.control.drain(1.0)
        assert sock.recv(10) == b""


def test_a_watcher_sees_the_end_of_a_killed_agent_at_once(quick_master: Master, paths: Paths) -> None:
    report = provision(small_plan(quick_master), paths)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(report["socket"])
        sock.sendall(b'{"op":"watch"}\n')
        reply(sock)
        os.kill(report["agent_pid"], 9)
        sock.settimeout(5)
        assert sock.recv(10) == b""
    until(lambda: not is_running(report["agent_pid"], None))
    with pytest.raises(AgentGone):
        ControlClient(paths.socket("dev"))
    teardown_pool("dev", paths)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    garbage=st.one_of(
        st.binary(max_size=300),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(st.sampled_from(["op", "chunks", "grace", "master"]), inner)
            ),
            max_leaves=8,
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_no_garbage_ends_the_agent_or_goes_unanswered(agent: Agent, garbage: bytes) -> None:
    with raw(agent) as sock:
        sock.sendall(garbage + b"\n")
        sock.shutdown(socket.SHUT_WR)
        data = b""
        while more := sock.recv(1 << 16):
            data += more
        for line in data.splitlines():
            assert json.loads(line)["ok"] is False
    with ControlClient(agent.control.path) as client:
        assert client.ask("status")["state"] == "provisioned"


def test_a_line_without_end_is_refused_and_costs_little(agent: Agent) -> None:
    with raw(agent) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(b"x" * (MAX_LINE + (1 << 17)))
        with contextlib.suppress(ConnectionResetError):
            assert "not a request" in reply(sock)["error"]["message"]
    with ControlClient(agent.control.path) as client:
        client.ask("status")


def test_clients_beyond_the_limit_are_turned_away_and_the_others_served(agent: Agent) -> None:
    with contextlib.ExitStack() as stack:
        first = ControlClient(agent.control.path)
        stack.callback(first.close)
        first.ask("status")
        for _ in range(MAX_CLIENTS + 20):
            stack.enter_context(raw(agent))
        assert first.ask("status")["state"] == "provisioned"

    def served() -> bool:
        try:
            with ControlClient(agent.control.path) as client:
                return bool(client.ask("status"))
        except AgentGone:
            return False

    until(served)


def test_watchers_leave_room_for_a_teardown(agent: Agent) -> None:
    with contextlib.ExitStack() as stack:
        told: list[dict[str, Any]] = []
        while len(told) < MAX_CLIENTS + 20 and (not told or told[-1]["ok"]):
            sock = stack.enter_context(raw(agent))
            sock.sendall(b'{"op":"watch"}\n')
            told.append(reply(sock))
        assert len(told) == MAX_CLIENTS - RESERVED + 1
        assert (told[-1]["error"]["exit"], "watchers" in told[-1]["error"]["message"]) == (5, True)
        with ControlClient(agent.control.path) as client:
            assert client.ask("teardown")["state"] == "gone"


def test_a_watchers_place_is_free_again_when_it_leaves(agent: Agent) -> None:
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            for _ in range(MAX_CLIENTS - RESERVED):
                sock = stack.enter_context(raw(agent))
                sock.sendall(b'{"op":"watch"}\n')
                assert reply(sock)["ok"]
        until(lambda: not agent.control._guests)


CROWD = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(65534)
held = []
for _ in range(int(sys.argv[3])):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(sys.argv[1])
    held.append(sock)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_that_connect_and_say_nothing_leave_room_for_a_teardown(quick_master: Master, paths: Paths) -> None:
    import grp

    group = next(entry for entry in grp.getgrall() if entry.gr_gid not in (0, 65534))
    paths.runtime.parent.chmod(0o711)  # the test's own folder above
    with agent_here(small_plan(quick_master, chunks=1, group=group.gr_name), paths) as agent:
        run(agent, "provision", agent.pool.provision)
        many = [str(agent.control.path), str(group.gr_gid), str(MAX_CLIENTS + 20)]
        with subprocess.Popen(
            [sys.executable, "-c", CROWD, *many], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as crowd:
            assert crowd.stdout is not None
            assert crowd.stdout.readline() == "there\n"
            with ControlClient(agent.control.path) as client:
                assert client.ask("teardown")["state"] == "gone"
            crowd.communicate()


def test_a_client_that_hangs_up_during_a_mount_gets_it_undone(quick_master: Master, paths: Paths) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # A fixed port without a listing: the mount waits for the expiry first.
    plan = small_plan(quick_master, local_hostname=f"127.0.0.1:{port}", master_admin_addr=None, client_expiry=60)
    with agent_here(plan, paths) as agent:
        run(agent, "provision", agent.pool.provision)
        with raw(agent) as sock:
            sock.sendall(b'{"op":"mount"}\n')
            until(lambda: agent.pool.state == "mounting")
            with (
                ControlClient(agent.control.path) as client,
                pytest.raises(BusyError, match=f"mount .*pid {os.getpid()}"),
            ):
                client.ask("teardown")
        until(lambda: agent.pool.state == "provisioned")
        until(lambda: not agent.operator.busy())
        assert listed(quick_master) == []
        teardown_now(agent)


def test_check_compares_each_segment_with_the_master(quick_master: Master, paths: Paths) -> None:
    provision(small_plan(quick_master), paths, mount=True)
    with ControlClient(paths.socket("dev")) as client:
        report = client.ask("check")
    assert [row["listed"] for row in report["segments"]] == [True, True]
    assert report["compared"] == {"reachable": True, "listed": 2, "missing": 0, "error": ""}
    assert report["te_child"]["responds"]
    teardown_pool("dev", paths, now=True)


ASK_AS = """
import json, os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
try:
    sock.connect(sys.argv[1])
except PermissionError:
    print("denied"); sys.exit()
for op in ("status", "export", "mount", "teardown"):
    sock.sendall(json.dumps({"op": op}).encode() + b"\\n")
    data = b""
    while not data.endswith(b"\\n"):
        more, fds, _, _ = socket.recv_fds(sock, 65536, 64)
        if not more: break
        data += more
    print(op, json.loads(data.splitlines()[-1])["ok"])
"""


def ask_as(paths: Paths, gid: int) -> list[str]:
    command = [sys.executable, "-c", ASK_AS, str(paths.socket("dev")), str(gid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert not done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_let_in_only_by_the_group_of_the_spec_and_never_to_change_anything(
    quick_master: Master, paths: Paths
) -> None:
    import grp

    group = next(entry for entry in grp.getgrall() if entry.gr_gid not in (0, 65534))
    paths.runtime.parent.chmod(0o711)  # the test's own folder above
    with agent_here(small_plan(quick_master, chunks=1), paths) as agent:
        run(agent, "provision", agent.pool.provision)
        assert ask_as(paths, group.gr_gid) == ["denied"]
        teardown_now(agent)
    with agent_here(small_plan(quick_master, chunks=1, group=group.gr_name), paths) as agent:
        run(agent, "provision", agent.pool.provision)
        assert ask_as(paths, group.gr_gid) == ["status True", "export True", "mount False", "teardown False"]
        assert ask_as(paths, 65534) == ["denied"]
        assert agent.pool.state == "provisioned"
        teardown_now(agent)


def test_a_group_that_does_not_exist_is_refused_before_anything(quick_master: Master, paths: Paths) -> None:
    with pytest.raises(EgmError, match="no group") as caught:
        provision(small_plan(quick_master, group="nobody-has-this"), paths)
    assert caught.value.exit_code == 3
    assert pool_status(paths) == []


def test_a_group_that_cannot_reach_the_socket_is_refused_before_anything(quick_master: Master, paths: Paths) -> None:
    import grp

    group = next(entry for entry in grp.getgrall() if entry.gr_gid != os.getegid())
    above = paths.runtime.parent  # private, as /run/user/UID is
    with pytest.raises(EgmError, match=f"group '{group.gr_name}' cannot reach .* {above} is closed") as caught:
        provision(small_plan(quick_master, group=group.gr_name), paths)
    assert caught.value.exit_code == 3
    assert "XDG_RUNTIME_DIR" in caught.value.hint
    assert pool_status(paths) == []
    assert nothing_left(paths) == []


def test_no_handle_or_secret_is_in_ledger_log_or_status(quick_master: Master, paths: Paths) -> None:
    report = provision(small_plan(quick_master), paths, mount=True)
    assert "fd" not in json.dumps(report["nodes"])
    record = read_only(paths.ledger("dev"))
    assert "fabric" not in repr(record)
    assert "handle" not in paths.log("dev").read_text()
    teardown_pool("dev", paths, now=True)


def test_many_commands_racing_on_one_pool_exclude_each_other_and_end_clean(quick_master: Master, paths: Paths) -> None:
    plan = small_plan(quick_master)
    outcomes: list[str] = []
    defects: list[BaseException] = []
    deadline = time.monotonic() + 12

    def work(kind: str) -> None:
        while time.monotonic() < deadline:
            try:
                if kind == "provision":
                    provision(plan, paths, mount=True)
                elif kind == "teardown":
                    teardown_pool("dev", paths, now=True)
                else:
                    pool_status(paths)
                    time.sleep(0.1)
                outcomes.append(kind)
            except UsageError:
                pass  # not there yet
            except EgmError as error:
                outcomes.append(f"{kind} {error.exit_code}")
            except BaseException as error:
                defects.append(error)
                return

    threads = [threading.Thread(target=work, args=(kind,)) for kind in ("provision", "provision", "teardown", "status")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not defects, defects
    assert {"provision", "teardown", "status"} <= set(outcomes), Counter(outcomes)
    assert len(agents(paths)) <= 1
    with contextlib.suppress(UsageError):
        until(lambda: teardown_pool("dev", paths, now=True)["state"] == "gone")
    assert listed(quick_master) == []
    assert nothing_left(paths) == []
    assert Path(paths.ledger("dev")).exists()
