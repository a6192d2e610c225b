"""Part 6: a provider killed and started anew at the same endpoint and address, under readers and writers."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from egmctl.consumer import EgmStore, Timing
from egmctl.consumer.agent_link import export
from egmctl.consumer.errors import StoreError
from egmctl.errors import EgmError
from egmctl.memory import import_share
from egmctl.mooncake.admin import AdminClient
from egmctl.mooncake.descriptor import EgmFields
from egmctl.mooncake.handshake import fetch_descriptor
from egmctl.mooncake.local_master import LocalMaster
from tests.benchmarks.store.here import MULTIPLIER, Here
from tests.benchmarks.store.world import Pool, World

__all__ = ["restart"]

KEYS, THREADS = 48, 4
OPERATIONS, GETS_AFTER = 1000, 800
PACE = 0.004  # seconds between the operations of a thread
# The Master drops a silent provider's segments 5 s after its last ping; the provider is sure of it after 9 s.
MASTER_FLAGS = ("--client_active_ttl_sec=2", "--client_suspicion_ttl_sec=3", "--default_kv_lease_ttl=2s")
EXPIRY = 9.0


def restart(world: World) -> None:
    """The old segments still listed, keys put again with other bytes, gets and puts all the while."""
    with ExitStack() as stack:
        master = stack.enter_context(LocalMaster(*MASTER_FLAGS))
        world = World(master.address, master.admin_address, world.rehearsal, world.rows)
        here = stack.enter_context(Here(world, 6, 8 * THREADS * world.scale.restart_object))
        _Restart(here, stack).run()


@dataclass
class _Key:
    """What has been put under a key, by version, and whether it was begun at the first provider."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    attempts: dict[int, bool] = field(default_factory=dict)
    published: int = 0
    busy: threading.Lock = field(default_factory=threading.Lock)


class _Restart:
    def __init__(self, here: Here, stack: ExitStack) -> None:
        self.here = here
        self.stack = stack
        self.size = here.scale.restart_object
        self.keys = [_Key() for _ in range(KEYS)]
        self.stop = threading.Event()
        self.killed = threading.Event()
        self.ready = threading.Event()
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.endpoint = f"127.0.0.1:{_free_port()}"

    def pool(self, name: str, **environment: str) -> Pool:
        return Pool(
            name,
            self.here.world.master,
            self.here.world.admin,
            2 * self.here.scale.restart_chunk,
            self.here.scale.restart_chunk,
            hostname=self.endpoint,
            lease_ttl=2.0,
            client_expiry=EXPIRY,
            environment=environment,
        )

    def run(self) -> None:
        here = self.here
        stores = [here.store]
        first = self.stack.enter_context(self.pool("first"))
        before = self.incarnation()
        for number in range(KEYS):
            self.put(here.store, 0, number)
        session = self.stack.enter_context(here.store.session(["k0"]))
        session.read_into("k0", 0, self.buffer(0), self.size)
        threads = [threading.Thread(target=self.work, args=(stores, number)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        try:
            time.sleep(1.0)
            listed = self.listed()
            first.kill()
            self.killed.set()
            seams = [os.environ.get("EGMCTL_SEAMS", ""), "tests.benchmarks.store.seams:no_waiting"]
            # another state folder: this agent knows nothing of the first one's ledger, and would not wait if it did
            second = self.pool("second", EGMCTL_SEAMS=",".join(filter(None, seams)))
            began = time.monotonic()
            self.stack.enter_context(second)
            after = self.incarnation()
            still_listed = len(listed & self.listed())
            # one that has never seen the first provider
            stores.append(self.connect())
            untouched = self.watch_memory(after, began)
            with suppress(EgmError):
                session.read_into("k0", 0, self.buffer(0), self.size)
                self.wrong.append("a session went on after its provider had ended")
            self.ready.set()
            self.until(lambda: self.counts["get after"] >= GETS_AFTER and self.total() >= OPERATIONS, 40)
        finally:
            self.stop.set()
            for thread in threads:
                thread.join(60)
        self.final_look(stores[-1])
        self.report(before, after, still_listed, untouched)

    def connect(self) -> EgmStore:
        store = EgmStore.connect(self.here.world.master, devices=self.here.devices, timing=Timing(retry=0.3))
        self.stack.callback(store.close)
        store.register_buffer(self.here.hbm[0], self.here.hbm_bytes)
        return store

    def incarnation(self) -> EgmFields:
        egm = fetch_descriptor(self.endpoint, 5.0).egm
        assert egm is not None
        return egm

    def listed(self) -> set[str]:
        return {
            row.name for row in AdminClient(self.here.world.admin).segments_detail() if row.te_endpoint == self.endpoint
        }

    def watch_memory(self, egm: EgmFields, began: float) -> bool:
        """Until the new provider is sure of its endpoint nobody may write to it: whether all its memory stayed as it
        was."""
        shares = [export(egm.socket, c.index, egm.nonce, c.addr, c.length, 5.0) for c in egm.chunks]
        mappings = []
        for share in shares:
            mappings.append(import_share(share, devices=[0]))
            assert share.fd is not None
            os.close(share.fd)
        try:
            first = [self.here.read(mapping.address, mapping.nbytes) for mapping in mappings]
            same = True
            while time.monotonic() < began + 5 * EXPIRY:
                now = [self.here.read(mapping.address, mapping.nbytes) for mapping in mappings]
                if self.incarnation().exclusive:  # what was read just now may have been written to since
                    break
                same = all(np.array_equal(one, other) for one, other in zip(first, now, strict=True))
                time.sleep(0.2)
            return same
        finally:
            for mapping in mappings:
                mapping.close()

    # what the threads do

    def buffer(self, thread: int, number: int = 0) -> int:
        return self.here.hbm[0] + (2 * thread + number) * self.size

    def work(self, stores: list[EgmStore], thread: int) -> None:
        source = random.Random(thread)
        while not self.stop.is_set():
            store = source.choice(stores)
            number = source.randrange(KEYS)
            try:
                if source.random() < 0.25:
                    self.put(store, thread, number)
                else:
                    self.get(store, thread, number)
            except StoreError as error:
                self.count("failed", type(error).__name__)
            except EgmError as error:
                self.count("failed", error.code)
            except BaseException as error:
                self.wrong.append(f"k{number}: {error!r}")
                return
            time.sleep(PACE)

    def put(self, store: EgmStore, thread: int, number: int) -> None:
        """Another version of a key, whose bytes say which it is."""
        here, key = self.here, self.keys[number]
        with key.busy:
            with suppress(StoreError):
                store.remove(f"k{number}", force=True)
            with key.lock:
                version = max(key.attempts, default=0) + 1
                key.attempts[version] = not self.killed.is_set()
            content = _content(number, version, self.size)
            here.write(self.buffer(thread), content.tobytes())
            store.put_from(f"k{number}", self.buffer(thread), self.size)
            with key.lock:
                key.published = version
        self.count("put " + self.when())

    def get(self, store: EgmStore, thread: int, number: int) -> None:
        key = self.keys[number]
        when, killed = self.when(), self.killed.is_set()
        with key.lock:
            least = key.published
        target = self.buffer(thread, 1)
        store.get_into(f"k{number}", target, self.size)
        problem = self.judge(number, self.here.read(target, self.size), least, killed)
        if problem:
            self.wrong.append(f"k{number}, {when}: {problem}")
        self.count("get " + when)

    def judge(self, number: int, got: np.ndarray[Any, Any], least: int, killed: bool) -> str:
        """What is wrong with bytes that a get returned; "" when nothing is."""
        seed = int(got[:8].view(np.uint64)[0])
        version = seed & 0xFFFFFFFF
        if seed >> 32 != number or not np.array_equal(got, _content(number, version, self.size)):
            return f"bytes of no version, word 0 is {seed:#x}"
        with self.keys[number].lock:
            of_the_first = self.keys[number].attempts.get(version)
        if of_the_first is None or version < least:
            return f"version {version}, and {least} was published before"
        if of_the_first and killed:
            return f"version {version} of the provider that had ended"
        return ""

    def when(self) -> str:
        return "after" if self.ready.is_set() else "meanwhile" if self.killed.is_set() else "before"

    def count(self, what: str, reason: str = "") -> None:
        with self.lock:
            self.counts[what if what != "failed" else "failed " + self.when()] += 1
            if reason:
                self.reasons[f"{self.when()}: {reason}"] += 1

    def total(self) -> int:
        return sum(self.counts.values())

    def final_look(self, store: EgmStore) -> None:
        """Nothing was overwritten: every key that is there has the whole bytes of its last version."""
        for number in range(KEYS):
            with suppress(StoreError):
                store.get_into(f"k{number}", self.buffer(0, 1), self.size)
                got = self.here.read(self.buffer(0, 1), self.size)
                problem = self.judge(number, got, self.keys[number].published, True)
                if problem:
                    self.wrong.append(f"k{number} at the end: {problem}")
                self.counts["looked at in the end"] += 1

    def report(self, before: EgmFields, after: EgmFields, still_listed: int, untouched: bool) -> None:
        addresses = [[f"{chunk.addr:#x}" for chunk in egm.chunks] for egm in (before, after)]
        operations = self.total()
        rows = self.here.rows
        rows.add(
            "restart: same endpoint, same address, old segments still listed",
            good=addresses[0] == addresses[1] and before.nonce != after.nonce and still_listed > 0,
            endpoint=self.endpoint,
            addresses_before=addresses[0],
            addresses_after=addresses[1],
            old_segments_listed=still_listed,
        )
        rows.add(
            f"restart: {operations} gets and puts across it, wrong bytes returned",
            good=not self.wrong and operations >= OPERATIONS,
            wrong=len(self.wrong),
            examples=self.wrong[:5],
            counts=dict(self.counts),
            reasons=dict(self.reasons),
        )
        rows.add("restart: the new memory was written to by nobody before it was sure", good=untouched)
        rows.add(
            "restart: gets that succeeded once the provider was ready again",
            good=self.counts["get after"] >= GETS_AFTER,
            gets=self.counts["get after"],
        )

    @staticmethod
    def until(condition: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)


def _content(number: int, version: int, nbytes: int) -> np.ndarray[Any, Any]:
    """Bytes that say whose they are; word 0 is key and version."""
    seed = np.uint64(number << 32 | version)
    with np.errstate(over="ignore"):
        words = np.arange(nbytes // 8, dtype=np.uint64) * MULTIPLIER * (seed | np.uint64(1)) + seed
    result: np.ndarray[Any, Any] = words.view(np.uint8)
    return result


def _free_port() -> int:
    """One below those that the kernel gives away by itself, so that it is still free after the restart."""
    source = random.SystemRandom()
    while True:
        port = source.randint(18000, 31999)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
