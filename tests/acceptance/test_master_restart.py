"""The Master killed and started again, under readers and writers in processes of their own, while its space is handed
out anew. In one process, and at each moment of a copy: `tests/consumer/test_end_to_end.py` and `test_hazards.py` there.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

from egmctl.consumer import EgmStore, Timing
from egmctl.consumer.errors import NoSpace
from egmctl.errors import EgmError
from egmctl.mooncake.admin import AdminClient
from tests.acceptance.contents import body, claims, workers
from tests.acceptance.hosts import Host, until
from tests.support.master import Master
from tests.support.stock import StockClient, StockError

KEYS = 40
LEASE = 2


class Listing:
    """When the Master was seen to answer, and when to list a segment; monotonic times, polled."""

    def __init__(self, master: Master) -> None:
        self.answered: float | None = None
        self.first: float | None = None
        self._admin = AdminClient(master.admin_address)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Listing:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _look(self) -> None:
        while not self._stop.wait(0.03) and self.first is None:
            asked = time.monotonic()
            with suppress(EgmError):
                rows = self._admin.segments_detail()
                self.answered = self.answered or asked
                if rows:
                    self.first = time.monotonic()


class StockTraffic:
    """One stock client that lives through it all: puts, gets and removes, and checks what it gets."""

    def __init__(self, master: Master) -> None:
        self.puts: list[float] = []
        self.gets: list[float] = []
        self.wrong: list[str] = []
        self._master = master
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> StockTraffic:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _work(self) -> None:
        try:
            with StockClient(self._master.address) as stock:
                turn = 0
                while not self._stop.is_set():
                    turn += 1
                    with suppress(StockError):  # a call that the Master's death left without an answer
                        self._round(stock, f"s{turn % KEYS}", turn)
        except Exception as error:
            self.wrong.append(f"the stock client: {error!r}")

    def _round(self, stock: StockClient, key: str, turn: int) -> None:
        stock.remove(key, force=True)
        if stock.put(key, body(key, f"stock.{turn}", 50_000 + turn % 1000)) == 0:
            self.puts.append(time.time())
        data = stock.get(key)
        if data:
            self.gets.append(time.time())
            problem = claims(key, data)
            if problem:
                self.wrong.append(problem)


def test_a_master_killed_and_started_again_costs_objects_and_never_bytes_and_the_pool_mends_itself(
    host: Host, any_quick_master: Master, tmp_path: Path
) -> None:
    master = any_quick_master
    pool = host.ready(master, chunks=3, lease_ttl=LEASE)
    stop = tmp_path / "stop"
    roles = ["read", "read", "write", "write"]
    with workers(roles, master.address, KEYS, stop) as running, StockTraffic(master) as stock:
        until(lambda: len(stock.puts) > 3, 60)
        for _ in range(2):
            master.kill()
            until(lambda: host.status()["state"] == "degraded", 30)
            killed = time.monotonic()
            with Listing(master) as listing:
                master.start()
                until(lambda: host.status()["ready"], 60)
                again = time.time()
            # Not under the readers' leases: those began before the Master died, and end one lease time later. That it
            # has forgotten us is known only since it answers again.
            assert listing.answered is not None
            assert listing.first is not None
            assert listing.answered > killed
            assert listing.first - listing.answered >= LEASE - 0.2
            # Its space is handed out anew, all of it, while the others go on.
            _fill(master)
            until(lambda when=again: stock.puts and stock.puts[-1] > when, 60)
            until(lambda when=again: stock.gets and stock.gets[-1] > when, 60)
        back = time.time()
        time.sleep(2.0)
        stop.touch()
        results = [worker.result() for worker in running]
    assert stock.wrong == []
    for result in results:
        assert result["wrong"] == []
        assert len(result["done"]) > 20, result["errors"]
        assert any(when > back for when in result["done"]), f"a {result['role']}er did nothing after the last restart"
    now = host.status()
    assert (now["agent_pid"], now["endpoint"], now["mounted"]) == (pool["agent_pid"], pool["endpoint"], 3)
    assert now["te_child"]["pid"] == pool["te_child"]["pid"]
    whole = host.footprint()
    assert host.run("verify", "dev").code == 0
    assert host.run("teardown", "dev", "--now").code == 0
    assert whole.remains(master) == []
    assert host.left() == []


def _fill(master: Master) -> None:
    """New objects into every free place, and what they say is right; then they go."""
    with EgmStore.connect(master.address, timing=Timing(retry=3.0, no_space=0.2)) as store:
        keys = []
        total = 0
        for index in range(60):
            key = f"fill{index}"
            data = body(key, f"{time.monotonic_ns()}", 1_000_000)
            try:
                store.put(key, data)
            except NoSpace:
                break
            except EgmError:
                continue
            keys.append(key)
            total += len(data)
        assert total > 20_000_000
        for key in keys:
            with suppress(EgmError):  # evicted, since the writers go on
                assert claims(key, store.get(key)) == ""
            with suppress(EgmError):
                store.remove(key, force=True)
