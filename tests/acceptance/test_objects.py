"""A pool provisioned from the command line, filled and read by a stock client and directly."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from egmctl.consumer import EgmStore, Timing
from egmctl.consumer.errors import NoSpace
from egmctl.mooncake.master import ReplicateConfig
from tests.acceptance.contents import body, claims, sizes
from tests.acceptance.hosts import MIB, Host, until
from tests.support.master import Master
from tests.support.stock import StockClient

COUNT = 1000
KEPT = 24
"""Objects that lie in the pool at any time, so that places are used again and again."""


def test_a_thousand_objects_put_by_a_stock_client_are_read_directly_and_the_reverse(
    host: Host, quick_master: Master
) -> None:
    host.ready(quick_master, chunks=24)
    with EgmStore.connect(quick_master.address) as store, StockClient(quick_master.address) as stock:
        for way, seed in (("theirs", 1), ("ours", 2)):
            kept: list[str] = []
            total = 0
            for index, size in enumerate(sizes(COUNT, seed)):
                key = f"{way}-{index}"
                data = body(key, "1", size)
                if way == "theirs":
                    assert stock.put(key, data) == 0
                    assert store.get(key) == data, key
                else:
                    assert store.put(key, data) == size
                    assert stock.get(key) == data, key
                kept.append(key)
                total += size
                if len(kept) > KEPT:
                    store.remove(kept.pop(0), force=True)
            assert total > 100 * MIB
            # What stayed is still there, seen by either.
            for key in kept:
                assert claims(key, store.get(key)) == ""
                assert claims(key, stock.get(key)) == ""
                store.remove(key, force=True)
    assert host.run("teardown", "dev", "--now").code == 0
    assert host.left() == []


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: _state(pid) == "T")
        yield
        assert _state(pid) == "T"
    finally:
        os.kill(pid, signal.SIGCONT)


def test_direct_puts_and_gets_go_on_while_the_transfer_engine_child_is_stopped_and_stock_ones_do_not(
    host: Host, any_master: Master
) -> None:
    child = host.ready(any_master, chunks=4)["te_child"]["pid"]
    with StockClient(any_master.address) as stock:
        for index in range(20):
            assert stock.put(f"before-{index}", body(f"before-{index}", "1", 100_000)) == 0
        with stopped(child):
            # A consumer that has never been here: finding, importing and mapping need no child either.
            with EgmStore.connect(any_master.address) as store:
                for index in range(20):
                    assert claims(f"before-{index}", store.get(f"before-{index}")) == ""
                    assert store.put(f"during-{index}", body(f"during-{index}", "1", 100_000)) == 100_000
                    assert claims(f"during-{index}", store.get(f"during-{index}")) == ""
            # It was stopped indeed: what goes through it does not go.
            with pytest.raises(Exception, match="no answer"):
                stock.get("before-0", timeout=1.0)
        for index in range(20):
            assert claims(f"during-{index}", stock.get(f"during-{index}")) == ""
    assert host.run("teardown", "dev", "--now").code == 0


def test_with_the_pool_full_no_space_comes_through_as_a_clear_error(host: Host, any_master: Master) -> None:
    host.ready(any_master, chunks=2)
    with (
        EgmStore.connect(any_master.address, timing=Timing(no_space=0.3)) as store,
        StockClient(any_master.address) as stock,
    ):
        pinned = ReplicateConfig(with_hard_pin=True)  # else the Master makes room by evicting them
        keys = [f"k{index}" for index in range(4)]
        for key in keys:
            store.put(key, body(key, "1", 8 * MIB), config=pinned)

        with pytest.raises(NoSpace, match=r"NO_AVAILABLE_HANDLE.*-200|-200.*NO_AVAILABLE_HANDLE") as caught:
            store.put("more", bytes(MIB))
        error = caught.value
        assert error.number == -200
        assert "more" in error.where
        assert error.hint
        assert stock.put("more", bytes(MIB)) == -200

        for command in (("verify", "dev"), ("bench", "dev", "--block", "1MiB", "--path", "direct", "--count", "1")):
            result = host.run(*command, "--json")
            assert "Traceback" not in result.stderr
            assert result.code == 1, result.stdout
            assert "NO_AVAILABLE_HANDLE" in result.stdout + result.stderr
        for key in keys:
            assert claims(key, store.get(key)) == ""
        for key in keys:
            store.remove(key, force=True)
        store.put("more", bytes(MIB))  # there is room again at once
    assert host.run("teardown", "dev", "--now").code == 0
    assert host.left() == []
