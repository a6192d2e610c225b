"""Pools side by side, of one host and of two, at one Master: what befalls one is nothing to the rest."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from egmctl.consumer import EgmStore
from egmctl.mooncake.master import MasterClient, ReplicateConfig
from tests.acceptance.contents import body, claims
from tests.acceptance.hosts import Host, listed, until
from tests.support.master import Master
from tests.support.stock import StockClient

OBJECTS = 8


class Traffic:
    """Readers and writers, direct and stock, on objects that lie in one pool; `errors` must stay empty."""

    def __init__(self, master: Master, endpoint: str, keys: list[str]) -> None:
        self.errors: list[str] = []
        self.rounds = {"direct get": 0, "stock get": 0, "direct put": 0, "stock put": 0}
        self._master = master
        self._endpoint = endpoint
        self._keys = keys
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._guarded, args=(way,)) for way in ("direct", "stock")]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def goes_on(self) -> None:
        """Returns when each kind of operation has been done several times from now on."""
        before = dict(self.rounds)
        until(lambda: self.errors or all(self.rounds[name] >= before[name] + 5 for name in before), 60)
        assert self.errors == []

    def _guarded(self, way: str) -> None:
        try:
            (self._direct if way == "direct" else self._stock)()
        except Exception as error:
            self.errors.append(f"{way}: {error!r}")

    def _direct(self) -> None:
        here = ReplicateConfig(preferred_segments=tuple(listed(self._master, self._endpoint + "/")))
        with EgmStore.connect(self._master.address) as store:
            for turn in range(1 << 30):
                for key in self._keys:
                    if self._stop.is_set():
                        return
                    wrong = claims(key, store.get(key))
                    if wrong:
                        self.errors.append(f"direct get: {wrong}")
                    self.rounds["direct get"] += 1
                key = f"new-{self._endpoint}-{turn}"
                store.put(key, body(key, "1", 50_000), config=here)
                self.rounds["direct put"] += 1
                store.remove(key, force=True)

    def _stock(self) -> None:
        with StockClient(self._master.address) as stock:
            for turn in range(1 << 30):
                for key in self._keys:
                    if self._stop.is_set():
                        return
                    wrong = claims(key, stock.get(key))
                    if wrong:
                        self.errors.append(f"stock get: {wrong}")
                    self.rounds["stock get"] += 1
                key = f"stock-{self._endpoint}-{turn}"
                # The Master also gives it space in a pool that was killed, until it notices: not our pool's doing.
                if stock.put(key, body(key, "1", 50_000)) == 0:
                    self.rounds["stock put"] += 1
                    stock.remove(key, force=True)


@contextmanager
def traffic_on(master: Master, endpoint: str) -> Iterator[Traffic]:
    """Of objects that are known to lie in the pool of this endpoint."""
    preferred = ReplicateConfig(preferred_segments=tuple(listed(master, endpoint + "/")), with_hard_pin=True)
    keys = []
    with EgmStore.connect(master.address) as store, MasterClient(master.address) as client:
        for index in range(200):
            key = f"{endpoint}-{index}"
            store.put(key, body(key, "1", 60_000 + index), config=preferred)
            (replica,) = client.get_replica_list(key).replicas
            if replica.te_endpoint == endpoint:
                keys.append(key)
            if len(keys) == OBJECTS:
                break
    assert len(keys) == OBJECTS
    with Traffic(master, endpoint, keys) as traffic:
        yield traffic


def test_pools_of_one_host_and_of_another_are_killed_and_torn_down_without_disturbing_the_rest(
    new_host: Callable[..., Host], any_quick_master: Master
) -> None:
    master = any_quick_master
    here, there = new_host(), new_host()
    doomed = here.ready(master, "one")
    lasting = here.ready(master, "two")
    other = there.ready(master, "one")  # the same name, on another host
    assert len({pool["endpoint"] for pool in (doomed, lasting, other)}) == 3
    assert len(listed(master)) == 6
    assert [pool["name"] for pool in here.run("status", "--json").document["pools"]] == ["one", "two"]
    kept = here.footprint("two")
    lost = here.footprint("one")

    with traffic_on(master, lasting["endpoint"]) as traffic:
        traffic.goes_on()
        os.kill(doomed["agent_pid"], signal.SIGKILL)
        traffic.goes_on()
        assert here.run("teardown", "one").code == 0
        assert lost.remains(master) == []
        traffic.goes_on()
        assert here.run("teardown", "one").code == 0
        assert there.status("one")["ready"]  # it is another pool than the one just torn down

        result = there.run("teardown", "one", "--grace", "1")
        assert result.code == 0, result.stderr
        assert there.left() == []
        traffic.goes_on()
        # A pool comes up beside it as well.
        assert there.ready(master, "three")["ready"]
        traffic.goes_on()
        pool = here.status("two")
        assert (pool["ready"], pool["agent_pid"], pool["endpoint"]) == (
            True,
            lasting["agent_pid"],
            lasting["endpoint"],
        )
    assert there.run("teardown", "--all", "--now").code == 0
    assert here.run("teardown", "--all", "--now").code == 0
    assert kept.remains(master) == []
    assert here.left() == there.left() == []
    assert listed(master) == []


def test_commands_on_two_pools_run_at_the_same_time_and_two_on_one_exclude_each_other(
    new_host: Callable[..., Host], quick_master: Master
) -> None:
    host = new_host()
    specs = [host.spec(quick_master, name) for name in ("one", "two")]
    started = [host.start("provision", spec, "--mount", "--json") for spec in specs]
    for process in started:
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr
    # The same pool torn down by two people: one does it, the other is told who is at it, or finds it done.
    with EgmStore.connect(quick_master.address) as store:
        for index in range(4):
            store.put(f"k{index}", bytes(100_000))  # so that the grace takes its time
    first = host.start("teardown", "one", "--grace", "2", "--json")
    until(lambda: host.record("one").goal == "gone")
    began = time.monotonic()
    second = host.run("teardown", "one", "--json")
    if second.code:
        assert second.code == 5, second.stderr
        assert "teardown" in second.document["message"]
        assert time.monotonic() - began < 5
    _, stderr = first.communicate(timeout=60)
    assert first.returncode == 0, stderr
    assert host.status("two")["ready"]
    assert host.run("teardown", "two", "--now").code == 0
    assert host.left() == []
