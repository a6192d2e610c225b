"""A real pool: its agent and Transfer Engine child, a real Master, a stock Mooncake client, and the direct consumer."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from egmctl.consumer import EgmStore, Timing
from egmctl.consumer.errors import NoSpace, ObjectBusy, ObjectExists, ObjectNotFound, StoreError
from egmctl.errors import EgmError
from egmctl.mooncake.errors import MasterTimeout, MasterUnreachable
from egmctl.paths import Paths
from egmctl.provider.commands import teardown_pool
from egmctl.provider.launch import start_agent
from tests.consumer.support import Memory, fill, mapped_files, open_files, payload, until
from tests.provider.pools import agents, private_paths, small_plan
from tests.support.master import Master
from tests.support.stock import StockClient

MIB = 1 << 20
POOL = "e2e"


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[Paths]:
    with private_paths(tmp_path) as paths:
        yield paths


@pytest.fixture
def quick() -> Iterator[Master]:
    with Master(lease_ttl=1.0, client_ttl=3) as master:
        yield master


@contextmanager
def _pool(master: Master, paths: Paths, chunks: int) -> Iterator[None]:
    start_agent(small_plan(master, POOL, chunks=chunks), paths, mount=True)
    try:
        yield
    finally:
        teardown_pool(POOL, paths, now=True)


def _sizes(count: int, seed: int) -> list[int]:
    """4 KiB to 8 MiB, mostly small, as caches hold them; odd ones among them."""
    source = random.Random(seed)
    sizes = [int(4096 * 2 ** (11 * source.random() ** 3)) for _ in range(count - 2)]
    return [4096, 8 * MIB, *(size + source.choice((0, 0, 1, 7)) for size in sizes)]


def test_a_thousand_objects_each_way_are_equal_also_with_the_transfer_engine_stopped(
    quick: Master, paths: Paths
) -> None:
    start_agent(small_plan(quick, POOL, chunks=48), paths, mount=True)
    with EgmStore.connect(quick.address) as store, StockClient(quick.address) as stock:
        memory = Memory(8 * MIB)
        store.register_buffer(memory.address, memory.nbytes)
        _theirs_to_ours(stock, store, memory)
        _ours_to_theirs(stock, store, memory)
        _while_stopped(stock, store, paths)
        assert store._engine.mappings.imports <= 48
    teardown_pool(POOL, paths, now=True)
    assert mapped_files() == 0


def _theirs_to_ours(stock: StockClient, store: EgmStore, memory: Memory) -> None:
    for index, size in enumerate(_sizes(500, 1)):
        key = f"theirs-{index}"
        assert stock.put(key, payload(key, size)) == 0
        assert store.get_into(key, memory.address, memory.nbytes) == size
        assert memory.read(size) == payload(key, size), key
        store.remove(key, force=True)


def _ours_to_theirs(stock: StockClient, store: EgmStore, memory: Memory) -> None:
    for index, size in enumerate(_sizes(500, 2)):
        key = f"ours-{index}"
        store.put_from(key, memory.write(payload(key, size)), size)
        assert stock.get(key) == payload(key, size), key
        store.remove(key, force=True)


def _while_stopped(stock: StockClient, store: EgmStore, paths: Paths) -> None:
    for index in range(50):
        assert stock.put(f"s{index}", payload(f"s{index}", 100_000)) == 0
    (agent,) = agents(paths)
    children = agent.children(recursive=True)
    assert children, "there is no Transfer Engine child"
    for child in children:
        child.send_signal(signal.SIGSTOP)
    try:
        for index in range(50):
            assert store.get(f"s{index}") == payload(f"s{index}", 100_000)
            store.put(f"d{index}", payload(f"d{index}", 100_000))
    finally:
        for child in children:
            child.send_signal(signal.SIGCONT)
    for index in range(50):
        assert stock.get(f"d{index}") == payload(f"d{index}", 100_000)


def test_a_full_pool_is_a_clear_error(paths: Paths) -> None:
    with (
        Master(lease_ttl=60) as master,
        _pool(master, paths, chunks=2),
        EgmStore.connect(master.address, timing=Timing(no_space=0.2)) as store,
    ):
        with pytest.raises(NoSpace, match="NO_AVAILABLE_HANDLE"):
            fill(store)
        assert store.exists("k5")


def test_a_master_restarted_under_readers_and_writers_costs_objects_and_never_bytes(
    quick: Master, paths: Paths
) -> None:
    start_agent(small_plan(quick, POOL, chunks=4), paths, mount=True)
    stop = threading.Event()
    wrong: list[str] = []
    counts = {"put": 0, "got": 0}
    restarted = [time.monotonic()]
    late_puts: list[float] = []

    def work(number: int) -> None:
        source = random.Random(number)
        with EgmStore.connect(quick.address, timing=Timing(retry=0.5, no_space=0.3)) as store:
            while not stop.is_set():
                key = f"k{source.randrange(24)}"
                size = 50_000 + 1000 * source.randrange(400)
                version = f"{key}/{number}/{source.random()}"
                try:
                    if source.random() < 0.4:
                        # The version is in the bytes, so that what is read says itself whether it is whole.
                        head = version.encode().ljust(64)
                        store.put(key, head + payload(version, size))
                        counts["put"] += 1
                        late_puts.append(time.monotonic())
                    elif source.random() < 0.2:
                        store.remove(key, force=True)
                    else:
                        data = store.get(key)
                        name = data[:64].decode().strip()
                        if not name.startswith(f"{key}/") or data[64:] != payload(name, len(data) - 64):
                            wrong.append(f"{key}: {name}")
                        counts["got"] += 1
                except (StoreError, MasterUnreachable, MasterTimeout):
                    pass
                except EgmError as error:
                    wrong.append(f"{key}: {error!r}")

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        until(lambda: bool(late_puts) and late_puts[-1] > restarted[-1], 20)
        time.sleep(1.0)
        quick.restart()
        restarted.append(time.monotonic())
    until(lambda: late_puts[-1] > restarted[-1], 20)
    time.sleep(1.0)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert counts["put"] > 10
    assert counts["got"] > 10


def test_an_agent_killed_and_started_anew_on_the_same_port_never_yields_wrong_bytes(
    quick: Master, paths: Paths, tmp_path: Path
) -> None:
    started = start_agent(small_plan(quick, POOL, chunks=2), paths, mount=True)
    endpoint = str(started["endpoint"])
    with EgmStore.connect(quick.address, timing=Timing(retry=0.3)) as store:
        keys = [f"k{index}" for index in range(30)]
        for key in keys:
            store.put(key, payload(key, 200_000))
        (agent,) = agents(paths)
        agent.kill()
        agent.wait(10)
        # Another pool, in another state folder, takes the very endpoint over, while the Master lists the old segments.
        wrong, seen = 0, 0
        with private_paths(tmp_path / "second") as others:
            second = threading.Thread(
                target=lambda: start_agent(
                    small_plan(quick, "second", chunks=2, local_hostname=endpoint), others, mount=True
                ),
                daemon=True,
            )
            second.start()
            deadline = time.monotonic() + 60
            while (second.is_alive() or seen < 200) and time.monotonic() < deadline:
                key = random.choice(keys)
                seen += 1
                try:
                    wrong += store.get(key) != payload(key, 200_000)
                except ObjectNotFound:
                    if not second.is_alive():
                        try:
                            store.put(key, payload(key, 200_000))
                        except (ObjectExists, ObjectBusy):
                            pass
                except (StoreError, MasterTimeout, MasterUnreachable):
                    time.sleep(0.02)
            second.join(1)
            assert not second.is_alive(), "the second pool did not become ready"
            assert wrong == 0
            store.put("after", b"wards")
            assert store.get("after") == b"wards"
            teardown_pool("second", others, now=True)


def test_eight_threads_put_and_get_without_growth(quick: Master, paths: Paths) -> None:
    start_agent(small_plan(quick, POOL, chunks=8), paths, mount=True)
    with EgmStore.connect(quick.address) as store:

        def work(number: int, rounds: int) -> None:
            source = random.Random(number)
            memory = Memory(MIB)
            store.register_buffer(memory.address, memory.nbytes)
            for turn in range(rounds):
                size = source.randrange(1, 200_000)
                key = f"{number}-{turn}"
                store.put_from(key, memory.write(payload(key, size)), size)
                memory.write(bytes(size))
                assert store.get_into(key, memory.address, memory.nbytes) == size
                assert memory.read(size) == payload(key, size)
                store.remove(key, force=True)
            store.unregister_buffer(memory.address)

        def run(rounds: int) -> None:
            failures: list[BaseException] = []

            def guarded(number: int) -> None:
                try:
                    work(number, rounds)
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=guarded, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            assert failures == []

        run(20)
        files, maps, memory = open_files(), mapped_files(), psutil.Process().memory_info().rss
        run(150)
        assert open_files() <= files
        assert mapped_files() <= maps <= 8
        assert psutil.Process().memory_info().rss - memory < 64 * MIB
        assert len(store._locks) == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
    assert mapped_files() == 0
    assert not [name for name in os.listdir("/proc/self/fd") if _leads_to(name, "egm-chunk")]


def _leads_to(name: str, needle: str) -> bool:
    try:
        return needle in os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return False
