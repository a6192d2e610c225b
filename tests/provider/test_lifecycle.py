"""The commands on real agents: processes really started, really killed, against a real Master."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from egmctl.errors import BusyError, CleanupPendingError, EgmError, FailedError, PreflightError, UsageError
from egmctl.ledger import is_running, read_events, read_only
from egmctl.mooncake.handshake import fetch_descriptor
from egmctl.mooncake.master import MasterClient, Segment
from egmctl.paths import Paths
from egmctl.provider import ProgressEvent, forget, mount_pool, pool_status, provision, teardown_pool
from tests.provider.pools import (
    agent_here,
    agents,
    children_of,
    listed,
    nothing_left,
    private_paths,
    run,
    small_plan,
    teardown_now,
    until,
)
from tests.support.master import Master


def status(paths: Paths, name: str = "dev") -> dict[str, Any]:
    return pool_status(paths, name)[0]


def test_the_whole_life_of_a_pool(any_quick_master: Master, paths: Paths) -> None:
    master = any_quick_master
    seen: list[ProgressEvent] = []
    plan = small_plan(master, chunks=3)
    first = provision(plan, paths, progress=seen.append)
    assert (first["state"], first["ready"], first["mounted"], first["already"]) == ("provisioned", False, 0, False)
    assert seen[-1].done == seen[-1].total == plan.effective_bytes
    assert listed(master) == []

    mounted = mount_pool("dev", paths)
    assert (mounted["state"], mounted["ready"], mounted["mounted"], mounted["chunks"]) == ("ready", True, 3, 3)
    endpoint = mounted["endpoint"]
    assert listed(master) == [f"{endpoint}/numa0/{index}" for index in range(3)]
    descriptor = fetch_descriptor(endpoint)
    assert descriptor.egm is not None
    assert descriptor.egm.exclusive
    assert [chunk.index for chunk in descriptor.egm.chunks] == [0, 1, 2]

    now = status(paths)
    assert (now["state"], now["agent_alive"], now["at_master"]["listed"]) == ("ready", True, 3)
    assert now["bytes"] == plan.effective_bytes
    pids = [now["agent_pid"], now["te_child"]["pid"]]

    done = teardown_pool("dev", paths, grace=1)
    assert (done["state"], done["left"], done["warnings"]) == ("gone", [], [])
    assert listed(master) == []
    assert nothing_left(paths) == []
    assert not any(is_running(pid, None) for pid in pids)
    assert pool_status(paths) == []
    assert status(paths)["state"] == "gone"
    events = [event.what for event in read_events(paths.ledger("dev"))]
    assert events[0] == "provision begins"
    assert events[-1] == "gone"


def test_what_is_done_already_is_success(quick_master: Master, paths: Paths) -> None:
    plan = small_plan(quick_master)
    pid = provision(plan, paths, mount=True)["agent_pid"]
    again = provision(plan, paths, mount=True)
    assert again["already"]
    assert again["agent_pid"] == pid
    assert provision(plan, paths)["already"]
    assert mount_pool("dev", paths)["already"]
    assert not teardown_pool("dev", paths, now=True)["already"]
    assert teardown_pool("dev", paths)["already"]


def test_a_second_pool_of_the_same_name_is_refused_and_the_first_stays(quick_master: Master, paths: Paths) -> None:
    provision(small_plan(quick_master), paths, mount=True)
    with pytest.raises(BusyError, match="another plan") as caught:
        provision(small_plan(quick_master, chunks=3), paths)
    assert caught.value.facts["agent_pid"] == status(paths)["agent_pid"]
    assert status(paths)["ready"]
    teardown_pool("dev", paths, now=True)


def test_a_pool_that_is_gone_can_be_provisioned_anew_and_forgotten(quick_master: Master, paths: Paths) -> None:
    one = provision(small_plan(quick_master), paths)
    teardown_pool("dev", paths, now=True)
    two = provision(small_plan(quick_master, chunks=3), paths)
    assert one["nonce"] != two["nonce"]
    with pytest.raises(UsageError, match="not gone"):
        forget("dev", paths)
    teardown_pool("dev", paths, now=True)
    forget("dev", paths)
    assert list(paths.state.iterdir()) == []
    with pytest.raises(UsageError, match="no such pool"):
        teardown_pool("dev", paths)


def test_two_pools_do_not_disturb_each_other(quick_master: Master, paths: Paths, tmp_path: Path) -> None:
    provision(small_plan(quick_master, "one"), paths, mount=True)
    provision(small_plan(quick_master, "two"), paths, mount=True)
    with private_paths(tmp_path / "elsewhere") as other:
        provision(small_plan(quick_master, "one"), other, mount=True)
        assert len(listed(quick_master)) == 6
        assert [entry["name"] for entry in pool_status(paths)] == ["one", "two"]
        psutil.Process(status(paths, "two")["agent_pid"]).kill()
        teardown_pool("one", paths, now=True)
        assert [entry["ready"] for entry in pool_status(other)] == [True]
        assert len(listed(quick_master, status(other, "one")["endpoint"])) == 2
        teardown_pool("one", other, now=True)
    teardown_pool("two", paths)
    assert listed(quick_master) == []


def test_a_master_that_is_down_at_mount_leaves_the_pool_provisioned(quick_master: Master, paths: Paths) -> None:
    provision(small_plan(quick_master), paths)
    quick_master.kill()
    with pytest.raises(FailedError, match="stays provisioned") as caught:
        mount_pool("dev", paths)
    assert caught.value.exit_code == 1
    assert "mount dev" in caught.value.hint
    assert status(paths)["state"] == "provisioned"
    quick_master.start()
    assert mount_pool("dev", paths)["ready"]
    teardown_pool("dev", paths, now=True)


def test_a_teardown_without_the_master_keeps_the_memory_and_the_same_command_finishes_later(
    quick_master: Master, paths: Paths
) -> None:
    pid = provision(small_plan(quick_master), paths, mount=True)["agent_pid"]
    quick_master.kill()
    for _ in range(2):
        with pytest.raises(CleanupPendingError, match="memory is kept") as caught:
            teardown_pool("dev", paths, now=True)
        assert caught.value.exit_code == 4
    now = status(paths)
    assert (now["state"], now["cleanup_pending"], now["agent_pid"]) == ("cleanup-pending", True, pid)
    assert sum("memfd:egm-chunk" in m.path for m in psutil.Process(pid).memory_maps(grouped=False)) == 2
    with pytest.raises(CleanupPendingError, match="not undone"):
        mount_pool("dev", paths)
    quick_master.start()
    assert teardown_pool("dev", paths, now=True)["state"] == "gone"
    assert nothing_left(paths) == []
    assert not is_running(pid, None)


def test_abandoning_says_what_is_left_where_and_is_listed_until_forgotten(quick_master: Master, paths: Paths) -> None:
    report = provision(small_plan(quick_master), paths, mount=True)
    quick_master.kill()
    done = teardown_pool("dev", paths, now=True, abandon=True)
    assert done["state"] == "abandoned"
    assert len(done["left"]) == 2
    assert all(report["endpoint"] in line and quick_master.address in line for line in done["left"])
    assert not is_running(report["agent_pid"], None)
    assert [entry["state"] for entry in pool_status(paths)] == ["abandoned"]
    forget("dev", paths)
    assert pool_status(paths) == []


@pytest.mark.parametrize("mounted", [False, True])
def test_after_a_killed_agent_status_says_so_and_teardown_cleans_up_from_the_ledger(
    any_quick_master: Master, paths: Paths, mounted: bool
) -> None:
    master = any_quick_master
    plan = small_plan(master)
    report = provision(plan, paths, mount=mounted)
    child = report["te_child"]["pid"] if mounted else None
    os.kill(report["agent_pid"], signal.SIGKILL)
    until(lambda: not is_running(report["agent_pid"], None))
    now = status(paths)
    assert (now["state"], now["ready"], now["cleanup_pending"], now["agent_alive"]) == (
        "cleanup-pending",
        False,
        True,
        False,
    )
    assert f"{report['agent_pid']}" in now["reason"]
    with pytest.raises(CleanupPendingError, match="is gone"):
        mount_pool("dev", paths)
    with pytest.raises(CleanupPendingError):
        provision(plan, paths)
    assert teardown_pool("dev", paths)["state"] == "gone"
    assert listed(master) == []
    assert nothing_left(paths) == []
    if child is not None:
        until(lambda: not is_running(child, None))
    record = read_only(paths.ledger("dev"))
    assert record is not None
    assert {row.state for row in record.chunks} == {"lost"}
    provision(plan, paths, mount=True)
    teardown_pool("dev", paths, now=True)


def test_a_killed_agent_with_its_master_down_stays_pending_and_can_be_finished_or_abandoned(
    quick_master: Master, paths: Paths
) -> None:
    pid = provision(small_plan(quick_master), paths, mount=True)["agent_pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_running(pid, None))
    quick_master.kill()
    with pytest.raises(CleanupPendingError):
        teardown_pool("dev", paths)
    quick_master.start()
    assert teardown_pool("dev", paths)["state"] == "gone"


def test_an_importer_that_outlives_a_killed_agent_is_named(quick_master: Master, paths: Paths) -> None:
    report = provision(small_plan(quick_master), paths)
    with importer(paths) as holder:
        os.kill(report["agent_pid"], signal.SIGKILL)
        until(lambda: not is_running(report["agent_pid"], None))
        warnings = teardown_pool("dev", paths)["warnings"]
        assert any(f"process {holder.pid} " in text and "chunk 0" in text for text in warnings)


def test_an_importer_is_told_given_a_moment_and_then_named(quick_master: Master, paths: Paths) -> None:
    provision(small_plan(quick_master), paths)
    with importer(paths) as holder:
        started = time.monotonic()
        warnings = teardown_pool("dev", paths, now=True)["warnings"]
        assert time.monotonic() - started >= 2.0
        assert any(f"process {holder.pid} " in text and "chunk 0" in text for text in warnings)
        assert holder.stdout is not None
        assert '"withdrawn"' in holder.stdout.readline()


IMPORTER = """
import json, mmap, socket, sys
path = sys.argv[1]
sock = socket.socket(socket.AF_UNIX); sock.connect(path)
sock.sendall(b'{"op":"export","chunks":[0]}\\n')
data, fds, _, _ = socket.recv_fds(sock, 65536, 4)
view = mmap.mmap(fds[0], 16 << 20)
sock.sendall(b'{"op":"watch"}\\n')
sock.recv(65536)
print("mapped", flush=True)
print(sock.recv(65536).decode().strip(), flush=True)
sys.stdin.read()
"""


class importer:
    """Another process that maps chunk 0, watches, and does not let go."""

    def __init__(self, paths: Paths) -> None:
        self._path = str(paths.socket("dev"))

    def __enter__(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-c", IMPORTER, self._path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "mapped\n"
        return self._process

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()


def test_sigterm_tears_down_gracefully_and_ends_the_agent(quick_master: Master, paths: Paths) -> None:
    report = provision(small_plan(quick_master), paths, mount=True)
    os.kill(report["agent_pid"], signal.SIGTERM)
    until(lambda: not is_running(report["agent_pid"], None))
    assert status(paths)["state"] == "gone"
    assert listed(quick_master) == []
    assert nothing_left(paths) == []


def test_an_agent_asked_to_end_without_its_master_holds_on_until_it_can(quick_master: Master, paths: Paths) -> None:
    report = provision(small_plan(quick_master), paths, mount=True)
    quick_master.kill()
    os.kill(report["agent_pid"], signal.SIGTERM)
    until(lambda: status(paths)["state"] == "cleanup-pending")
    assert is_running(report["agent_pid"], None)
    quick_master.start()
    until(lambda: not is_running(report["agent_pid"], None), 30)
    assert status(paths)["state"] == "gone"


@pytest.mark.parametrize(("signals", "state", "code"), [(1, "gone", 0), (3, "cleanup-pending", 4)])
def test_a_foreground_agent_ends_with_ctrl_c_and_a_third_one_leaves_at_once(
    quick_master: Master, paths: Paths, tmp_path: Path, signals: int, state: str, code: int
) -> None:
    plan = small_plan(quick_master)
    program = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from egmctl.paths import Paths\nfrom egmctl.planning import Plan\nfrom egmctl.provider import provision\n"
        "plan = Plan.from_json(json.loads(sys.argv[1]))\n"
        "provision(plan, Paths(Path(sys.argv[2]), Path(sys.argv[3])), mount=True, foreground=True,\n"
        "          started=lambda report: print(report['state'], flush=True))\n"
    )
    import json

    command = [sys.executable, "-c", program, json.dumps(plan.to_json()), str(paths.state), str(paths.runtime)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if signals > 1:
            quick_master.pause()  # so that the teardown takes its time
        process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 20
        while signals > 1 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == code, errors
    finally:
        quick_master.resume()
        process.kill()
        process.communicate()
    assert status(paths)["state"] == state
    teardown_pool("dev", paths)
    assert listed(quick_master) == []


def test_a_fixed_port_that_is_taken_is_refused_before_anything_is_allocated(quick_master: Master, paths: Paths) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PreflightError, match=f"port {port} is taken by .*{os.getpid()}"):
            provision(small_plan(quick_master, local_hostname=f"127.0.0.1:{port}"), paths)
    assert status(paths)["state"] == "gone"
    assert nothing_left(paths) == []
    whats = [event.what for event in read_events(paths.ledger("dev"))]
    assert "allocation begins" not in whats


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("listing", [True, False])
def test_a_fixed_port_is_used_again_only_once_its_earlier_owners_segments_are_gone(
    quick_master: Master, paths: Paths, tmp_path: Path, listing: bool
) -> None:
    admin = quick_master.admin_address if listing else None
    plan = small_plan(quick_master, local_hostname=f"127.0.0.1:{free_port()}", master_admin_addr=admin, client_expiry=5)
    pid = provision(plan, paths, mount=True)["agent_pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_running(pid, None))
    killed = time.monotonic()
    old = listed(quick_master)
    assert len(old) == 2
    # Somebody else's installation, which knows nothing of the dead one, takes the port.
    with private_paths(tmp_path / "elsewhere") as other:
        provision(plan, other)
        mount_pool("dev", other)
        assert time.monotonic() - killed >= 2.5  # the Master drops a silent client's segments after 3 s
        assert len(listed(quick_master)) == 2
        descriptor = fetch_descriptor(plan.mooncake.local_hostname)
        assert descriptor.egm is not None
        assert descriptor.egm.exclusive
        teardown_pool("dev", other, now=True)
    teardown_pool("dev", paths)


def test_without_a_listing_an_endpoint_that_another_pool_had_is_exclusive_only_after_the_expiry(
    quick_master: Master, paths: Paths
) -> None:
    endpoint = provision(small_plan(quick_master, master_admin_addr=None, client_expiry=8), paths)["endpoint"]

    def exclusive() -> bool:
        descriptor = fetch_descriptor(endpoint)
        return descriptor.egm is not None and descriptor.egm.exclusive

    with MasterClient(quick_master.address) as dead:
        dead.mount_segment(Segment((9, 9), f"{endpoint}/numa3/0", 1 << 40, 16 << 20, endpoint, "tcp"), (7, 7))
        mount_pool("dev", paths)
        assert not exclusive()
        until(exclusive)
    teardown_pool("dev", paths, now=True)


def test_a_port_that_the_kernel_chose_is_exclusive_at_once(quick_master: Master, paths: Paths) -> None:
    report = provision(small_plan(quick_master, master_admin_addr=None, client_expiry=60), paths, mount=True)
    descriptor = fetch_descriptor(report["endpoint"])
    assert descriptor.egm is not None
    assert descriptor.egm.exclusive
    teardown_pool("dev", paths, now=True)


def test_with_a_metadata_server_the_descriptor_lies_there_under_a_key_of_this_agent_alone(paths: Paths) -> None:
    from egmctl.mooncake.metadata import MetadataClient

    with Master("0.3.13", lease_ttl=1.0, client_ttl=3, http_metadata=True) as master:
        plan = small_plan(master, metadata_server=master.metadata_url)
        report = provision(plan, paths, mount=True)
        key = report["endpoint"]
        assert "/" not in key
        assert ":" not in key
        descriptor = MetadataClient(master.metadata_url).fetch(key)
        assert descriptor is not None
        assert descriptor.egm is not None
        assert (descriptor.name, descriptor.egm.nonce, descriptor.egm.exclusive) == (key, report["nonce"], True)
        assert listed(master) == [f"{key}/numa0/0", f"{key}/numa0/1"]
        os.kill(report["agent_pid"], signal.SIGKILL)
        until(lambda: not is_running(report["agent_pid"], None))
        assert MetadataClient(master.metadata_url).fetch(key) is not None
        teardown_pool("dev", paths)
        assert MetadataClient(master.metadata_url).fetch(key) is None
        again = provision(plan, paths, mount=True)
        assert again["endpoint"] != key
        teardown_pool("dev", paths, now=True)
        assert MetadataClient(master.metadata_url).fetch(again["endpoint"]) is None


def test_a_metadata_server_that_is_down_at_mount_leaves_the_pool_provisioned(
    quick_master: Master, paths: Paths
) -> None:
    plan = small_plan(quick_master, metadata_server=f"http://127.0.0.1:{free_port()}/metadata")
    provision(plan, paths)
    with pytest.raises(FailedError, match=r"GET of .*refused") as caught:
        mount_pool("dev", paths)
    assert caught.value.exit_code == 1
    assert status(paths)["state"] == "provisioned"
    teardown_pool("dev", paths)
    assert status(paths)["state"] == "gone"


class _Late(http.server.BaseHTTPRequestHandler):
    """A metadata server that is slow to take what it is given, and gives no answer to it."""

    store: ClassVar[dict[str, bytes]]
    late: threading.Event

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.late.clear()
        self.late.wait(20)  # for whoever looks next
        time.sleep(0.5)
        self.store[self.path] = body

    def do_GET(self) -> None:
        self.late.set()
        found = self.store.get(self.path)
        self._say(404 if found is None else 200, found or b"")

    def do_DELETE(self) -> None:
        self._say(200 if self.store.pop(self.path, None) is not None else 404, b"")

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def test_a_descriptor_that_arrives_after_its_put_was_given_up_is_removed_all_the_same(
    quick_master: Master, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    from egmctl.mooncake.metadata import MetadataClient

    monkeypatch.setitem(MetadataClient.__init__.__kwdefaults__ or {}, "timeout", 1.5)

    class Handler(_Late):
        store: ClassVar = {}
        late = threading.Event()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        plan = small_plan(quick_master, metadata_server=f"http://127.0.0.1:{server.server_port}/metadata")
        with agent_here(plan, paths) as agent:
            run(agent, "provision", agent.pool.provision)
            with pytest.raises(FailedError, match=r"PUT of .*no answer"):
                run(agent, "mount", agent.pool.mount)
            assert agent.pool.state == "provisioned"
            time.sleep(1.0)
            assert Handler.store == {}
            teardown_now(agent)
        server.shutdown()


def test_a_second_master_is_refused_while_the_first_lists_the_chunks(quick_master: Master, paths: Paths) -> None:
    provision(small_plan(quick_master), paths, mount=True)
    with Master("0.3.13", lease_ttl=1.0, client_ttl=3) as second:
        with pytest.raises(BusyError, match="may still name them"):
            mount_pool("dev", paths, second.address)
        quick_master.pause()  # silent, but it knows
        try:
            until(lambda: status(paths)["state"] == "degraded", 20)
            with pytest.raises(BusyError, match="may still name them"):
                mount_pool("dev", paths, second.address)
        finally:
            quick_master.resume()
        assert listed(second) == []
    until(lambda: status(paths)["ready"], 20)
    teardown_pool("dev", paths, now=True)


def test_a_master_whose_process_is_gone_is_fenced_before_the_pool_goes_to_another(
    quick_master: Master, paths: Paths
) -> None:
    provision(small_plan(quick_master, client_expiry=2, master_admin_addr=None), paths, mount=True)
    with Master("0.3.13", lease_ttl=1.0, client_ttl=3) as second:
        quick_master.kill()
        until(lambda: status(paths)["state"] == "degraded")
        started = time.monotonic()
        assert mount_pool("dev", paths, second.address)["ready"]
        assert time.monotonic() - started >= 2.0
        assert len(listed(second)) == 2
        quick_master.start()
        time.sleep(1.5)
        assert listed(quick_master) == []  # it is not pinged and mounted at any more
        teardown_pool("dev", paths, now=True)
        assert listed(second) == []


def test_unusable_masters_are_refused_with_one_sentence(quick_master: Master, paths: Paths) -> None:
    provision(small_plan(quick_master), paths)
    for address in ("etcd://127.0.0.1:2379", "nonsense", "10.1.2.3:50051"):
        with pytest.raises(UsageError):
            mount_pool("dev", paths, address)
    assert status(paths)["state"] == "provisioned"
    teardown_pool("dev", paths, now=True)


def test_an_agent_that_dies_while_provisioning_is_cleaned_up_after_and_reported(
    quick_master: Master, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_at(monkeypatch, "memory.shm.seal:2:before")
    with pytest.raises(FailedError, match="agent died") as caught:
        provision(small_plan(quick_master), paths)
    assert str(paths.log("dev")) in caught.value.hint
    assert status(paths)["state"] == "gone"
    assert nothing_left(paths) == []


def die_at(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("EGMCTL_SEAMS", "tests.provider.killer:install")
    monkeypatch.setenv("EGMCTL_TEST_KILL", place)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))


# Before each: what the ledger says was about to be done; after: what it does not say was done.
KILLS = [
    "ledger.commit:1:after",
    "provider.control.bind:1:after",
    "ledger.commit:6:after",
    "memory.shm.file:2:after",
    "ledger.commit:8:after",
    "te.spawn:1:after",
    "te.register:1:after",
    "provider.publish:1:after",
    "ledger.commit:13:after",
    "mooncake.master.mount_segment:1:before",
    "mooncake.master.mount_segment:1:after",
    "mooncake.master.mount_segment:2:after",
    "mooncake.master.remount_segments:1:after",
    "ledger.commit:14:after",
    "provider.probe.put_start:1:after",
    "provider.probe.put_end:1:after",
    "ledger.commit:15:before",
]


@pytest.mark.parametrize("place", KILLS)
def test_an_agent_killed_anywhere_on_the_way_to_ready_leaves_nothing_behind(
    quick_master: Master, paths: Paths, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    die_at(monkeypatch, place)
    with pytest.raises(EgmError, match="agent died"):
        provision(small_plan(quick_master), paths, mount=True)
    assert status(paths)["state"] == "gone"
    assert listed(quick_master) == []
    assert nothing_left(paths) == []


@pytest.mark.parametrize(
    "place",
    [
        "mooncake.master.unmount_segment:1:before",
        "mooncake.master.unmount_segment:1:after",
        "te.stop:1:before",
        "memory.shm.unmap:1:after",
        "handshake.close:1:after",
        "provider.socket.unlink:1:before",
    ],
)
def test_an_agent_killed_anywhere_in_its_teardown_is_finished_from_the_ledger(
    quick_master: Master, paths: Paths, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    die_at(monkeypatch, place)
    provision(small_plan(quick_master), paths, mount=True)
    assert teardown_pool("dev", paths, now=True)["state"] == "gone"
    assert listed(quick_master) == []
    assert nothing_left(paths) == []


def test_an_agent_that_stands_still_while_provisioning_is_given_up_and_undoes_it_once_it_goes_on(
    quick_master: Master, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("egmctl.provider.launch.SILENCE", 4.0)
    stopped: list[psutil.Process] = []

    def stop(event: ProgressEvent) -> None:
        if event.stage == "memory" and not stopped:
            stopped.extend(agents(paths))
            stopped[0].suspend()

    began = time.monotonic()
    with pytest.raises(BusyError, match="has said nothing for 4 s") as caught:
        provision(small_plan(quick_master, chunks=8), paths, progress=stop)
    assert time.monotonic() - began < 20
    assert str(stopped[0].pid) in caught.value.message
    stopped[0].resume()
    until(lambda: not stopped[0].is_running(), 30)
    assert status(paths)["state"] == "gone"
    assert nothing_left(paths) == []


def test_a_provision_that_tells_nothing_for_long_shows_that_it_goes_on(quick_master: Master, paths: Paths) -> None:
    from egmctl.provider import agent as agents_program

    signals = agents_program.StopSignals(interactive=False)
    seen: list[float] = []
    try:
        with agent_here(small_plan(quick_master), paths) as agent:
            agents_program._carry_out(
                agent,
                "a long command",
                lambda task: time.sleep(4.5),
                signals,
                lambda event: None,
                lambda: False,
                lambda: seen.append(time.monotonic()),
            )
    finally:
        signals.restore()
    assert len(seen) == 2


def test_whoever_kills_the_starter_of_a_provision_gets_it_undone(quick_master: Master, paths: Paths) -> None:
    import json

    program = (
        "import json, sys, os\n"
        "from pathlib import Path\n"
        "from egmctl.paths import Paths\nfrom egmctl.planning import Plan\nfrom egmctl.provider import provision\n"
        "plan = Plan.from_json(json.loads(sys.argv[1]))\n"
        "provision(plan, Paths(Path(sys.argv[2]), Path(sys.argv[3])), progress=lambda e: os.kill(os.getpid(), 9))\n"
    )
    plan = small_plan(quick_master, chunks=12)
    command = [sys.executable, "-c", program, json.dumps(plan.to_json()), str(paths.state), str(paths.runtime)]
    before = set(children_of(os.getpid()))
    assert subprocess.run(command, timeout=60).returncode == -9
    until(lambda: not agents(paths))
    assert status(paths)["state"] == "gone"
    assert nothing_left(paths) == []
    assert set(children_of(os.getpid())) <= before


def test_one_unreadable_ledger_does_not_hide_the_other_pools(quick_master: Master, paths: Paths) -> None:
    provision(small_plan(quick_master, "good"), paths)
    paths.ledger("bad").write_bytes(b"rubbish" * 1000)
    by_name = {entry["name"]: entry for entry in pool_status(paths)}
    assert by_name["bad"]["state"] == "unreadable"
    assert by_name["good"]["state"] == "provisioned"
    teardown_pool("good", paths, now=True)


def test_a_state_folder_that_cannot_be_written_is_refused_before_an_agent_starts(
    quick_master: Master, tmp_path: Path
) -> None:
    state = Path("/proc/egmctl-state") if os.geteuid() == 0 else tmp_path / "ro" / "state"
    if os.geteuid() != 0:
        (tmp_path / "ro").mkdir(mode=0o500)
    with pytest.raises(PreflightError, match="cannot make the folder"):
        provision(small_plan(quick_master), Paths(state, tmp_path / "run"))
