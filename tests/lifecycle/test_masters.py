"""One Master at a time: a second is refused until the first is done with, and groups of Masters are no address."""

from __future__ import annotations

from pathlib import Path

import pytest

from egmctl.consumer import EgmStore
from egmctl.errors import BusyError, CleanupPendingError, UsageError
from egmctl.ledger import read_only
from egmctl.mooncake.admin import AdminClient
from egmctl.mooncake.master import MasterClient
from egmctl.paths import Paths
from egmctl.planning import Plan
from egmctl.provider import mount_pool, pool_status, provision, teardown_pool
from tests.lifecycle.support import command, mounted, write_plan
from tests.provider.pools import listed, mapped_here, run, small_plan, teardown_now, until
from tests.support.master import Master

GROUPS = ["etcd://10.0.0.1:2379", "redis://10.0.0.1:6379", "k8s://mooncake/master", "etcd://a:1;b:2;c:3"]


def one_sentence(error: UsageError, scheme: str) -> bool:
    text = error.message
    return scheme in text and "\n" not in text and text.count(". ") == 0 and bool(error.hint)


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_of_masters_is_refused_in_one_sentence_wherever_it_can_be_named(
    quick_master: Master, paths: Paths, group: str
) -> None:
    scheme = group.partition(":")[0]
    plan = small_plan(quick_master)
    with pytest.raises(UsageError) as caught:
        small_plan(quick_master, master_server_addr=group)
    assert one_sentence(caught.value, scheme)
    with pytest.raises(UsageError) as caught:
        small_plan(quick_master, metadata_server=group)
    assert one_sentence(caught.value, scheme)
    document = plan.to_json()
    document["mooncake"]["master_server_addr"] = group
    with pytest.raises(UsageError) as caught:
        Plan.from_json(document)
    assert one_sentence(caught.value, scheme)
    for connect in (
        lambda: EgmStore.connect(group),
        lambda: EgmStore.connect(quick_master.address, metadata_server=group),
        lambda: MasterClient(group),
        lambda: AdminClient(group),
    ):
        with pytest.raises(UsageError) as caught:
            connect()
        assert one_sentence(caught.value, scheme)
    provision(plan, paths)
    with pytest.raises(UsageError) as caught:
        mount_pool("dev", paths, group)
    assert one_sentence(caught.value, scheme)
    assert pool_status(paths)[0]["state"] == "provisioned"
    teardown_pool("dev", paths, now=True)


def test_the_command_line_refuses_a_group_of_masters_as_wrong_usage(
    quick_master: Master, tmp_path: Path, state: Path
) -> None:
    cli = Paths.resolve(state)
    spec = tmp_path / "spec.toml"
    spec.write_text(
        '[pool]\nname = "dev"\nmemory = "shm"\nenable_egm_store_pool = true\nglobal_segment_size = "32MiB"\n'
        '[mooncake]\nlocal_hostname = "10.0.0.2"\nmaster_server_addr = "etcd://10.0.0.1:2379"\n'
    )
    for arguments in (("plan", str(spec)), ("provision", str(spec))):
        code, _, said = command(cli, *arguments)
        assert (code, "etcd://" in said) == (2, True), said
    assert command(cli, "provision", str(write_plan(small_plan(quick_master), tmp_path)))[0] == 0
    code, _, said = command(cli, "mount", "dev", "--master", "redis://10.0.0.1:6379")
    assert (code, "redis" in said) == (2, True), said
    assert command(cli, "teardown", "dev", "--now")[0] == 0


def test_the_ledger_knows_every_master_a_chunk_was_offered_to(quick_master: Master, paths: Paths) -> None:
    provision(small_plan(quick_master), paths, mount=True)
    with Master("0.3.13", lease_ttl=1.0, client_ttl=3) as second:
        record = read_only(paths.ledger("dev"))
        assert record is not None
        assert record.masters == (quick_master.address,)
        quick_master.kill()
        until(lambda: pool_status(paths)[0]["state"] == "degraded")
        assert mount_pool("dev", paths, second.address)["ready"]
        record = read_only(paths.ledger("dev"))
        assert record is not None
        assert {row.master: row.state for row in record.segments} == {
            quick_master.address: "fenced",
            second.address: "mounted",
        }
        assert record.masters == (second.address,)
        teardown_pool("dev", paths, now=True)
        assert listed(second) == []


def test_a_mount_that_is_not_settled_at_one_master_keeps_the_pool_from_another(
    quick_master: Master, paths: Paths
) -> None:
    with mounted(quick_master, paths) as agent, Master("0.3.13", lease_ttl=1.0, client_ttl=3) as second:
        quick_master.pause()  # it may be only slow, and names our chunks to whoever asks it later
        try:
            until(lambda: agent.pool.state == "degraded", 20)
            with pytest.raises(BusyError, match="may still name them"):
                run(agent, "mount", lambda task: agent.pool.mount(task, second.address))
            with pytest.raises(CleanupPendingError):
                teardown_now(agent)
            with pytest.raises(CleanupPendingError):
                run(agent, "mount", lambda task: agent.pool.mount(task, second.address))
            assert listed(second) == []
            assert mapped_here() == 2
        finally:
            quick_master.resume()
        teardown_now(agent)
        assert agent.pool.state == "gone"
        assert listed(quick_master) == []
