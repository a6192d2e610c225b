"""A graceful end: readers finish, nothing new comes in, and the memory goes last."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from egmctl.consumer import EgmStore
from egmctl.consumer.errors import NoSpace, ObjectNotFound, StoreError
from egmctl.errors import EgmError
from egmctl.paths import Paths
from egmctl.provider import forget, pool_status, provision, teardown_pool
from egmctl.steps import watch
from tests.consumer.support import mapped_files, payload
from tests.lifecycle.support import Sites, command, mounted, write_plan
from tests.provider.pools import (
    agents,
    listed,
    mapped_here,
    nothing_left,
    private_paths,
    run,
    small_plan,
    teardown_now,
    until,
)
from tests.support.master import Master
from tests.support.stock import StockClient

SIZE = 100_000


def test_during_the_grace_objects_stay_readable_both_ways_and_nothing_new_lands_here(
    any_quick_master: Master, paths: Paths, tmp_path: Path
) -> None:
    master = any_quick_master
    plan = small_plan(master, lease_ttl=1)
    provision(plan, paths, mount=True)
    with (
        EgmStore.connect(master.address) as store,
        StockClient(master.address) as stock,
        private_paths(tmp_path / "elsewhere") as others,
    ):
        for key in ("one", "two"):
            store.put(key, payload(key, SIZE))
        assert stock.get("one") == payload("one", SIZE)
        names = set(listed(master))
        provision(small_plan(master, "other"), others, mount=True)
        result: dict[str, Any] = {}
        began = time.monotonic()
        drain = threading.Thread(target=lambda: result.update(teardown_pool("dev", paths, grace=4)))
        drain.start()
        until(lambda: pool_status(paths)[0]["state"] == "tearing-down")
        time.sleep(0.5)
        reads, landed = 0, 0
        while time.monotonic() - began < 3.5:
            assert store.get("one") == payload("one", SIZE)
            assert stock.get("two") == payload("two", SIZE)
            key = f"new-{reads}"
            store.put(key, payload(key, 5000))
            landed += addresses_of(master, key) in names
            reads += 1
        assert reads >= 3
        assert landed == 0
        drain.join(30)
        assert result["state"] == "gone"
        assert time.monotonic() - began >= 5  # the grace, and a lease that began at its end
        with pytest.raises(ObjectNotFound):
            store.get("one")
        assert store.get("new-0") == payload("new-0", 5000)
        teardown_pool("other", others, now=True)
    assert nothing_left(paths) == []


def addresses_of(master: Master, key: str) -> str:
    """The endpoint-and-node prefix of where an object lies, as segment names begin."""
    from egmctl.mooncake.master import MasterClient

    with MasterClient(master.address) as client:
        replica = client.get_replica_list(key).replicas[0]
    return f"{replica.te_endpoint}/numa0/0"


def test_without_another_pool_a_put_during_the_grace_is_told_that_there_is_no_space(
    quick_master: Master, paths: Paths
) -> None:
    provision(small_plan(quick_master), paths, mount=True)
    with EgmStore.connect(quick_master.address) as store:
        store.put("old", payload("old", SIZE))
        drain = threading.Thread(target=lambda: teardown_pool("dev", paths, grace=3))
        drain.start()
        until(lambda: pool_status(paths)[0]["state"] == "tearing-down")
        time.sleep(0.5)
        with pytest.raises(NoSpace):
            store.put("new", payload("new", SIZE))
        assert store.get("old") == payload("old", SIZE)
        drain.join(30)
    assert pool_status(paths) == []


def test_the_memory_goes_after_the_grace_the_leases_and_the_importers(quick_master: Master, paths: Paths) -> None:
    with mounted(quick_master, paths, lease_ttl=1) as agent, EgmStore.connect(quick_master.address) as store:
        store.put("k", payload("k", SIZE))  # and with it this process holds a mapping, idle from here on
        own = mapped_here()
        assert own == 3  # two of the agent's, one of the consumer's
        trace = Sites()
        watch(trace)
        began = time.monotonic()
        run(agent, "teardown", lambda task: agent.pool.teardown(task, 1.0))
        watch(None)
        assert time.monotonic() - began >= 2.0
        order = [
            trace.index("before", "mooncake.master.graceful_unmount_segment"),
            trace.index("done", "mooncake.master.unmount_segment"),
            trace.index("before", "te.stop"),
            trace.index("before", "memory.shm.unmap"),
        ]
        assert order == sorted(order)
        assert trace.premature_releases() == []
        # The consumer was told that its chunk is withdrawn and let go by itself: nobody is named as a holder.
        until(lambda: mapped_files() == 0)
        assert agent.pool.warnings == []
        with pytest.raises(StoreError):
            store.get("k")


def test_now_waits_for_nobody(quick_master: Master, paths: Paths) -> None:
    provision(small_plan(quick_master, lease_ttl=20, client_expiry=40), paths, mount=True)
    with EgmStore.connect(quick_master.address) as store:
        store.put("k", payload("k", SIZE))
    began = time.monotonic()
    assert teardown_pool("dev", paths, now=True)["state"] == "gone"
    assert time.monotonic() - began < 10
    assert listed(quick_master) == []


def test_abandoning_says_what_is_left_where_and_the_pool_is_listed_until_it_is_forgotten(
    quick_master: Master, tmp_path: Path, state: Path
) -> None:
    cli = Paths.resolve(state)
    plan = str(write_plan(small_plan(quick_master), tmp_path))
    assert command(cli, "provision", plan, "--mount")[0] == 0
    names = listed(quick_master)
    quick_master.kill()
    code, _, said = command(cli, "teardown", "dev", "--now")
    assert code == 4, said
    assert "--abandon" in said
    code, out, said = command(cli, "teardown", "dev", "--now", "--abandon")
    assert code == 0, said
    for name in names:
        assert name in out + said
    assert quick_master.address in out + said
    assert not agents(cli)
    assert "abandoned" in command(cli, "status")[1]
    assert command(cli, "provision", plan)[0] == 0, "its name can be used again"
    assert command(cli, "teardown", "dev", "--now")[0] == 0
    assert pool_status(cli) == []
    assert command(cli, "status", "dev", "--forget")[0] == 0
    assert command(cli, "status", "dev")[0] == 2


def test_abandoning_gives_up_no_more_than_it_has_to(quick_master: Master, paths: Paths) -> None:
    """With the Master there, everything is undone properly and the pool is gone, not abandoned."""
    provision(small_plan(quick_master), paths, mount=True)
    done = teardown_pool("dev", paths, now=True, abandon=True)
    assert (done["state"], done["left"]) == ("gone", [])
    assert listed(quick_master) == []
    forget("dev", paths)


def test_a_grace_that_a_hurried_signal_cuts_short_still_unmounts_before_it_releases(
    quick_master: Master, paths: Paths
) -> None:
    with mounted(quick_master, paths) as agent, EgmStore.connect(quick_master.address) as store:
        store.put("k", payload("k", SIZE))
        hurry = threading.Event()
        with Sites() as trace:
            job = agent.command("teardown", lambda task: agent.pool.teardown(task, 60.0), hurried=hurry.is_set)
            until(lambda: agent.pool.parts.drain_until is not None)
            hurry.set()
            began = time.monotonic()
            job.wait()
            assert time.monotonic() - began < 10
            assert trace.premature_releases() == []
        assert agent.pool.state == "gone"
        assert listed(quick_master) == []


def test_a_drain_without_a_master_keeps_everything(quick_master: Master, paths: Paths) -> None:
    with mounted(quick_master, paths) as agent:
        quick_master.kill()
        with pytest.raises(EgmError, match="memory is kept"):
            run(agent, "teardown", lambda task: agent.pool.teardown(task, 1.0))
        assert mapped_here() == 2
        quick_master.start()
        teardown_now(agent)
