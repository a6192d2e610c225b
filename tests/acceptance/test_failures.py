"""Each way in which a pool's life goes wrong, from the command line: the exit code of the contract, a message with
what, where and what to do, the same as a document, and nothing left behind.

Beside these: `tests/cli/test_lifecycle.py` (Ctrl-C and SIGTERM while provisioning, once and twice, `--foreground`),
`tests/provider/test_lifecycle.py` (an agent killed at each step), `tests/provider/test_faults.py` (any step failing).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from egmctl.ledger import is_running
from tests.acceptance.hosts import Host, assert_error, listed, until
from tests.support.master import Master
from tests.support.stock import StockClient

NOWHERE = "127.0.0.1:1"


# The Master


def test_a_master_that_is_down_at_mount_leaves_the_pool_provisioned(host: Host, quick_master: Master) -> None:
    assert host.run("provision", host.spec(quick_master)).code == 0
    quick_master.kill()
    result = host.run("mount", "dev", "--json")
    assert_error(result, 1, what="(?i)master.*stays provisioned", where=quick_master.address, do="egmctl mount dev")
    pool = host.status()
    assert (pool["state"], pool["mounted"], pool["master"], pool["te_child"]) == ("provisioned", 0, None, None)
    assert {row.state for row in host.record().segments} <= {"refused", "unmounted"}
    # The child that would have served stock clients was undone as well.
    assert len([p for p in host.processes() if p.is_running()]) == 1
    quick_master.start()
    assert host.run("mount", "dev").code == 0
    whole = host.footprint()
    assert host.run("teardown", "dev", "--now").code == 0
    assert whole.remains(quick_master) == []
    assert host.left() == []


def test_without_the_master_teardown_keeps_the_memory_and_the_same_command_later_finishes(
    host: Host, any_quick_master: Master
) -> None:
    master = any_quick_master
    host.ready(master)
    whole = host.footprint()
    agent = whole.pids[0]
    master.kill()
    for _ in range(2):
        result = host.run("teardown", "dev", "--now", "--json")
        assert_error(result, 4, what="memory is kept", where=master.address, do="(?i)teardown again.*--abandon")
    assert f"process {agent} holds a chunk" in whole.remains()
    pool = host.status()
    assert (pool["state"], pool["cleanup_pending"], pool["agent_pid"]) == ("cleanup-pending", True, agent)
    assert {row.state for row in host.record().chunks} == {"mapped"}
    assert "egmctl teardown dev" in host.run("status").stdout
    master.start()
    result = host.run("teardown", "dev", "--now", "--json")
    assert result.code == 0, result.stderr
    assert [row["state"] for row in result.document["pools"]] == ["gone"]
    assert whole.remains(master) == []
    assert host.left() == []
    assert {row.state for row in host.record().chunks} == {"released"}


# Specs, plans and machines


@pytest.mark.parametrize("command", ["plan", "provision"])
@pytest.mark.parametrize(
    ("text", "changes", "code", "what", "where", "do"),
    [
        (None, {"file": "missing.toml"}, 2, "(?i)no such file", "missing.toml", "."),
        ("[pool\nname = ", {}, 2, "(?i)toml", "dev.toml", "."),
        (None, {"global_segment_sizes": "1GiB"}, 2, "global_segment_sizes", "dev.toml", "global_segment_size"),
        (None, {"global_segment_size": [1]}, 2, "global_segment_size", "dev.toml", "."),
        (None, {"enable_egm_store_pool": "yes"}, 2, "enable_egm_store_pool", "dev.toml", "true"),
        (None, {"enable_egm_store_pool": None}, 2, "enable_egm_store_pool", ".", "enable_egm_store_pool = true"),
        (None, {"enable_egm_store_pool": False}, 2, "enable_egm_store_pool", ".", "enable_egm_store_pool = true"),
        (None, {"global_segment_size": "8TiB", "max_chunk_size": "16GiB"}, 3, "8 TiB", "dev", "ask for less"),
        (None, {"egm_numa_nodes": "63"}, 3, "node 63", "dev", "node"),
        (None, {"egm_numa_nodes": "0,,1"}, 2, "0,,1", ".", "."),
        (None, {"memory": "cuda-fabric"}, 2, "nvlink|tcp", ".", "."),
    ],
    ids=lambda value: None,
)
def test_what_cannot_be_planned_is_refused_before_anything_is_touched(
    host: Host, command: str, text: str | None, changes: dict[str, object], code: int, what: str, where: str, do: str
) -> None:
    wanted = dict(changes)
    missing = wanted.pop("file", None)
    spec = host.spec(NOWHERE, text=text, **wanted)
    if missing:
        spec = str(host.state / str(missing))
    assert_error(host.run(command, spec, "--json"), code, what=what, where=where, do=do)
    assert host.left() == []
    assert list(host.state.glob("*.db")) == []


def test_a_second_provision_of_the_name_is_success_with_the_same_plan_and_busy_with_another(
    host: Host, quick_master: Master
) -> None:
    pool = host.ready(quick_master)
    again = host.run("provision", host.spec(quick_master), "--json")
    assert again.code == 0, again.stderr
    assert again.document["pool"]["agent_pid"] == pool["agent_pid"]
    assert "exists already" in again.stderr
    other = host.run("provision", host.spec(quick_master, chunks=3), "--json")
    error = assert_error(other, 5, what=f"another plan.*{pool['agent_pid']}", where="dev", do="egmctl teardown dev")
    assert error["facts"]["agent_pid"] == pool["agent_pid"]
    assert host.status()["ready"]
    assert len(listed(quick_master)) == 2
    whole = host.footprint()
    for word in ("dev: gone", "dev: gone already"):
        result = host.run("teardown", "dev", "--now")
        assert result.code == 0, result.stderr
        assert word in result.stdout
        assert whole.remains(quick_master) == []
        assert host.left() == []


def test_an_unknown_pool_is_a_matter_of_usage(host: Host) -> None:
    for command in ("mount", "teardown", "status", "verify", "bench"):
        assert_error(host.run(command, "nobody", "--json"), 2, what="no such pool", where="nobody", do="egmctl status")
    assert host.left() == []


def test_a_pool_that_is_not_mounted_or_gone_is_not_measured_and_the_hint_is_the_next_step(host: Host) -> None:
    assert host.run("provision", host.spec(NOWHERE)).code == 0
    for command in ("verify", "bench"):
        assert_error(host.run(command, "dev", "--json"), 1, what="provisioned", where="pool dev", do="egmctl mount dev")
    assert host.run("teardown", "dev", "--now").code == 0
    for command in ("mount", "verify", "bench"):
        assert_error(host.run(command, "dev", "--json"), 2, what="is gone", where="pool dev", do="provision")
    assert host.left() == []


HOLDER = "import socket, sys; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); "
HOLDER += "print(s.getsockname()[1], flush=True); sys.stdin.read()"


def test_a_fixed_port_that_is_taken_names_its_holder(host: Host, quick_master: Master, tmp_path: Path) -> None:
    program = tmp_path / "squatter"
    shutil.copy(os.path.realpath(sys.executable), program)  # a name of its own, so that the message must have read it
    with subprocess.Popen(
        [str(program), "-S", "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONHOME": sys.base_prefix},
    ) as holder:
        try:
            assert holder.stdout is not None
            port = int(holder.stdout.readline())
            spec = host.spec(quick_master, local_hostname=f"127.0.0.1:{port}")
            error = assert_error(
                host.run("provision", spec, "--json"), 3, what=f"{port}.*{holder.pid}", where=".", do="."
            )
            assert re.search(rf"squatter.*{holder.pid}|{holder.pid}.*squatter", error["message"])
            assert host.left() == []
            assert {row.state for row in host.record().chunks} <= {"planned", "released"}
        finally:
            holder.kill()
    result = host.run("provision", spec, "--json")
    assert result.code == 0, result.stderr
    assert host.run("teardown", "dev", "--now").code == 0
    assert host.left() == []


# Kills


def test_after_the_agent_was_killed_status_says_so_and_teardown_cleans_up_from_the_ledger_alone(
    host: Host, any_patient_master: Master
) -> None:
    master = any_patient_master
    pool = host.ready(master)
    whole = host.footprint()
    os.kill(pool["agent_pid"], signal.SIGKILL)
    until(lambda: not is_running(pool["agent_pid"], None))
    now = host.status()
    assert (now["state"], now["ready"], now["cleanup_pending"], now["agent_pid"]) == (
        "cleanup-pending",
        False,
        True,
        None,
    )
    shown = host.run("status").stdout
    assert re.search(rf"agent \(pid {pool['agent_pid']}\) is gone", shown)
    assert "egmctl teardown dev" in shown
    for command in (("mount", "dev"), ("provision", host.spec(master))):
        error = host.run(*command, "--json")
        assert_error(error, 4, what=f"{pool['agent_pid']}.*", where="dev", do="egmctl teardown dev")
    verified = host.run("verify", "dev", "--json")
    assert verified.code != 0, verified.stdout
    assert "Traceback" not in verified.stderr
    assert len(listed(master, pool["endpoint"])) == 2  # it has not expired them: teardown must
    result = host.run("teardown", "dev", "--json")
    assert result.code == 0, result.stderr
    assert whole.remains(master) == []
    assert host.left() == []
    assert {row.state for row in host.record().chunks} == {"lost"}
    assert host.ready(master)["endpoint"] != pool["endpoint"]
    assert host.run("teardown", "dev", "--now").code == 0


def test_after_its_child_was_killed_a_pool_degrades_and_the_running_stock_client_goes_on(
    host: Host, quick_master: Master
) -> None:
    pool = host.ready(quick_master)
    child = pool["te_child"]
    with StockClient(quick_master.address) as stock:
        before = os.urandom(300_000)
        assert stock.put("before", before) == 0
        states = []
        os.kill(child["pid"], signal.SIGKILL)

        def mended() -> bool:
            now = host.status()
            states.append(now["state"])
            return bool(now["ready"]) and now["te_child"]["pid"] != child["pid"]

        until(mended, 60)
        new = host.status()["te_child"]
        assert new["data_port"] == child["data_port"]
        assert new["pid"] != child["pid"]
        # The very client, which keeps the old data port for good, reads what it put (once it has noticed that the
        # connection is dead) and puts more.
        until(lambda: stock.get("before") == before)
        after = os.urandom(300_000)
        assert stock.put("after", after) == 0
        assert stock.get("after") == after
    log = host.paths.log("dev").read_text()
    assert re.search(r"degraded: .*[Tt]ransfer [Ee]ngine child", log), log
    assert len(listed(quick_master, pool["endpoint"])) == 2  # never unmounted
    whole = host.footprint()
    assert host.run("teardown", "dev", "--now").code == 0
    assert whole.remains(quick_master) == []
    assert not is_running(child["pid"], None)


# Ledgers that cannot be written


@contextmanager
def read_only_folder(folder: Path) -> Iterator[None]:
    """The folder cannot be written to, for root neither."""
    if os.geteuid() != 0:
        folder.chmod(0o500)
        try:
            yield
        finally:
            folder.chmod(0o700)
        return
    try:
        subprocess.run(["mount", "--bind", folder, folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"root writes everywhere, and may not mount here to prevent it: {error}")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True, capture_output=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, capture_output=True)


def test_a_ledger_folder_that_is_read_only_is_refused_before_anything_is_touched(
    host: Host, quick_master: Master
) -> None:
    spec = host.spec(quick_master)
    with read_only_folder(host.state):
        result = host.run("provision", spec, "--mount", "--json")
        assert_error(result, 3, what=f"{host.state}.*(read-only|written)", where=".", do="--state-dir")
        assert host.left() == []
        assert listed(quick_master) == []
        assert host.run("status").code == 0
    assert host.run("provision", spec).code == 0
    assert host.run("teardown", "dev", "--now").code == 0


def test_a_ledger_folder_that_became_read_only_loses_nothing_and_teardown_finishes_once_it_can_be_written(
    host: Host, quick_master: Master
) -> None:
    host.ready(quick_master)
    whole = host.footprint()
    with read_only_folder(host.state):
        for command in (("status", "dev"), ("verify", "dev")):
            result = host.run(*command)
            assert result.code == 0, result.stderr
        result = host.run("teardown", "dev", "--now", "--json")
        assert_error(result, 4, what="ledger", where=".", do=".")
        assert f"process {whole.pids[0]} holds a chunk" in whole.remains()
        assert len(listed(quick_master)) == 2
    assert host.run("teardown", "dev", "--now").code == 0
    assert whole.remains(quick_master) == []
    assert host.left() == []


# Interrupts (those of provision are in tests/cli/test_lifecycle.py)


SLOW = """
import os, time
from egmctl import steps
class Slow:
    def before(self, site, detail):
        if site == "mooncake.master.mount_segment":
            time.sleep(0.5)
    def after(self, site, detail, error):
        pass
def install():
    steps.watch(Slow())
"""


def test_an_interrupt_while_mounting_undoes_the_mount_and_the_pool_can_be_mounted_again(
    host: Host, quick_master: Master, tmp_path: Path
) -> None:
    (tmp_path / "slow_mounts.py").write_text(SLOW)
    host.environment |= {"EGMCTL_SEAMS": "slow_mounts:install", "PYTHONPATH": str(tmp_path)}
    assert host.run("provision", host.spec(quick_master, chunks=6)).code == 0
    process = host.start("mount", "dev", "--json")
    try:
        until(lambda: len(listed(quick_master)) >= 2)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1, stderr
    assert "SIGINT: stopping and undoing" in stderr
    assert "Traceback" not in stderr
    assert '"egmctl/error/1"' in stdout
    assert listed(quick_master) == []
    pool = host.status()
    assert (pool["state"], pool["mounted"], pool["te_child"]) == ("provisioned", 0, None)
    assert host.run("mount", "dev").code == 0
    assert len(listed(quick_master)) == 6
    whole = host.footprint()
    assert host.run("teardown", "dev", "--now").code == 0
    assert whole.remains(quick_master) == []
    assert host.left() == []


def test_an_interrupt_while_the_master_hangs_keeps_the_memory_until_the_mount_is_settled(
    host: Host, quick_master: Master
) -> None:
    assert host.run("provision", host.spec(quick_master)).code == 0
    whole = host.footprint()
    quick_master.pause()
    process = host.start("mount", "dev", "--json")
    try:
        assert process.stderr is not None
        assert "asking" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        quick_master.resume()
        process.kill()
    assert process.returncode in (1, 4), stderr  # undone, or unanswered and therefore pending
    assert "Traceback" not in stderr
    assert whole.pids[0] in {p.pid for p in host.processes()}
    assert f"process {whole.pids[0]} holds a chunk" in whole.remains()
    result = host.run("teardown", "dev", "--now")
    assert result.code == 0, result.stderr
    assert whole.remains(quick_master) == []
    assert host.left() == []
