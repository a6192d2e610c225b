"""A long random walk over several pools in one process, on the core that the commands use, with a fixed seed.

What a Transfer Engine child and a driver would do is done by stand-ins, time limits and leases are short, and the
Master is one that obeys the measured rules (or a real one, for a shorter walk). Everything else is the real thing:
agents with their threads, control sockets, ledgers, memory, the protocol on real sockets.
"""

from __future__ import annotations

import functools
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

from egmctl.errors import EgmError
from egmctl.ledger import read_only
from egmctl.memory.driver import install_driver
from egmctl.memory.probe import ProbeResult
from egmctl.mooncake import transfer_engine, wheel
from egmctl.mooncake.admin import AdminClient
from egmctl.mooncake.te_process import TransferEngineError
from egmctl.paths import Paths
from egmctl.planning import Plan, make_plan, parse_spec
from egmctl.provider import heartbeat as heartbeat_module
from egmctl.provider import listing
from egmctl.provider import pool as pool_module
from egmctl.provider.agent import Agent
from egmctl.provider.commands import pool_status, provision, teardown_pool
from egmctl.provider.control_client import ControlClient
from egmctl.provider.recover import teardown_from_ledger
from egmctl.steps import watch
from egmctl.topology import read_topology
from tests.faults.failures import failure
from tests.lifecycle.fake_master import FakeMaster
from tests.model.driver import Config, ModelDriver
from tests.support.master import Master

__all__ = ["Walk", "walk_with_fakes", "walk_with_real_masters"]

CHUNK = 16 << 20
NAMES = ("a", "b", "c")


class Side(Protocol):
    """A Master as the walk sees it."""

    address: str

    def holds(self, client: tuple[int, int]) -> list[str]:
        """What it lists of a client, and what is on its way to it."""

    def disturb(self, source: random.Random) -> str: ...
    def heal(self) -> None: ...


class FakeSide(FakeMaster):
    """The small Master, whose answers and mounts may be late as well."""

    def __init__(self, expiry: float) -> None:
        super().__init__(expiry=expiry)
        self.late = 0.0
        self._coming: Counter[tuple[int, int]] = Counter()

    def _answer(self, call: str, seq: int, body: bytes) -> bytes:
        if call == "MountSegment" and self.late:
            from egmctl.mooncake.codec import decode

            client = tuple(decode(body).value[1])
            with self._mutex:
                self._coming[client] += 1
            time.sleep(self.late)
            try:
                return super()._answer(call, seq, body)
            finally:
                with self._mutex:
                    self._coming[client] -= 1
        return super()._answer(call, seq, body)

    def holds(self, client: tuple[int, int]) -> list[str]:
        with self._mutex:
            self._expire()
            names = [self.segments[s][1] for s, owner in self.owners.items() if owner == client]
            return names + (["a mount on its way"] if self._coming[client] else [])

    def disturb(self, source: random.Random) -> str:
        calls = ("MountSegment", "UnmountSegment", "ReMountSegment", "Ping", "PutStart", "QuerySegmentStatusById")
        call = source.choice(calls)
        kind = source.choice(("silent", "deaf", "refuse", "late", "forget", "stop", "garbage"))
        if kind == "silent":
            self.silent = {call}
        elif kind == "deaf":
            self.deaf = {call}
        elif kind == "refuse":
            self.refuse = {call: source.choice((-1, -600, -200, -1010, -101))}
        elif kind == "late":
            self.late = 0.2
        elif kind == "forget":
            self.forget()
        elif kind == "stop":
            self.stop()
        else:
            self.garbage = {call: os.urandom(24)}
        return f"{kind} {call}"

    def stop(self) -> None:
        listener = self._listener
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # else a thread in accept() goes on listening
        super().stop()

    def heal(self) -> None:
        self.silent, self.deaf, self.refuse, self.garbage, self.late = set(), set(), {}, {}, 0.0
        for _ in range(100):
            if self._listener is not None:
                return
            try:
                self.start()
            except OSError:
                time.sleep(0.02)


class RealSide:
    def __init__(self, master: Master) -> None:
        self._master = master

    @property
    def address(self) -> str:
        return self._master.address

    def holds(self, client: tuple[int, int]) -> list[str]:
        if not self._master.alive:
            return []
        rows = AdminClient(self._master.admin_address).segments_detail()
        return [row.name for row in rows if row.client_id == client]

    def disturb(self, source: random.Random) -> str:
        kind = source.choice(("restart", "kill", "restart"))
        if kind == "restart":
            self._master.restart()
        else:
            self._master.kill()
        return kind

    def heal(self) -> None:
        self._master.start()


class _Engine:
    """In the place of the Transfer Engine child: serves nobody, and dies when told."""

    def __init__(self, *, host: str, log_fd: int | None, on_death: Callable[[str], None] | None) -> None:
        self.data_port: int | None = None
        self.pid = None
        self._alive = False

    def start(self, chunks: Any, *, timeout: float = 60.0) -> int:
        self.data_port, self._alive = 15000, True
        return 15000

    def restart(self, *, timeout: float = 60.0) -> int:
        if self.data_port is None:
            raise TransferEngineError("it never served", where="stand-in")
        self._alive = True
        return self.data_port

    def alive(self) -> bool:
        return self._alive

    def responds(self) -> bool:
        return self._alive

    def stop(self, *, timeout: float = 10.0) -> None:
        self._alive = False

    def die(self) -> None:
        self._alive = False


@dataclass
class Slot:
    name: str
    plan: Plan
    agent: Agent | None = None
    crashed: bool = False


@dataclass
class Walk:
    """``steps`` of the program seen, operations by kind, faults by kind, and what was wrong (nothing)."""

    operations: int = 0
    done: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    disturbances: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def document(self) -> dict[str, Any]:
        return {
            "operations": self.operations,
            "done": dict(self.done),
            "failed": dict(self.failed),
            "faults": dict(self.faults),
            "disturbances": dict(self.disturbances),
            "wrong": self.wrong,
            "seconds": round(self.seconds),
        }


class _Chaos:
    """The watcher: fails one step when armed, and looks at the Masters whenever memory goes."""

    def __init__(self, walker: _Walker) -> None:
        self._walker = walker
        self._mutex = threading.Lock()
        self._left = 0
        self._mode = ""
        self.muted = False

    def arm(self, steps: int, mode: str) -> None:
        with self._mutex:
            self._left, self._mode = steps, mode

    def disarm(self) -> None:
        with self._mutex:
            self._left = 0

    def before(self, site: str, detail: dict[str, Any]) -> None:
        if self.muted:
            return
        if site in ("memory.shm.unmap", "memory.cuda.unmap"):
            self._walker.check_release(site, detail)
        if self._due(site, "fail"):
            raise failure(site)

    def after(self, site: str, detail: dict[str, Any], error: BaseException | None) -> None:
        if not self.muted and error is None and self._due(site, "lost", count=False):
            raise failure(site)

    def _due(self, site: str, mode: str, count: bool = True) -> bool:
        # Pings and their connections come at their own times: with them no walk would be like another.
        if threading.current_thread().name == "heartbeat":
            return False
        with self._mutex:
            if self._left <= 0:
                return False
            if count:
                self._left -= 1
            if (self._left == 0 if mode == "fail" else self._left == 1) and self._mode == mode:
                self._left = 0
                self._walker.walk.faults[f"{mode} {site}"] += 1
                return True
        return False


class _Walker:
    def __init__(self, sides: list[Side], paths: Paths, plans: list[Plan], seed: int, model: ModelDriver) -> None:
        self.sides = sides
        self.paths = paths
        self.slots = [Slot(plan.pool, plan) for plan in plans]
        self.source = random.Random(seed)
        self.walk = Walk()
        self.chaos = _Chaos(self)
        self.model = model
        self._healed_at = 0

    def check_release(self, site: str, detail: dict[str, Any]) -> None:
        thread = threading.current_thread()
        for slot in self.slots:
            if slot.agent is not None and slot.agent.operator is thread:
                client = slot.agent.pool.record_now().client
                for side in self.sides:
                    held = side.holds(client)
                    if held:
                        self._wrong(f"{site} {detail} of {slot.name} while {side.address} has {held}")

    def _wrong(self, text: str) -> None:
        self.walk.wrong.append(f"operation {self.walk.operations}: {text}")

    # Operations

    def run(self, operations: int) -> None:
        kinds: tuple[tuple[int, Callable[[Slot], None]], ...] = (
            (14, self.provision),
            (18, self.mount),
            (3, self.mount_elsewhere),
            (13, self.teardown),
            (2, self.drain),
            (8, self.status),
            (4, self.rest),
            (2, self.crash),
            (2, self.engine_dies),
            (3, self.disturb),
            (1, self.take_segment_away),
        )
        acts = [act for _, act in kinds]
        weights = [weight for weight, _ in kinds]
        for number in range(operations):
            self.walk.operations = number + 1
            act = self.source.choices(acts, weights)[0]
            slot = self.source.choice(self.slots)
            if number >= self._healed_at:
                for side in self.sides:
                    side.heal()
                self._healed_at = sys.maxsize
            if self.source.random() < 0.25:
                self.chaos.arm(self.source.randint(1, 45), self.source.choice(("fail", "lost")))
            self._try(act, slot)
            self.chaos.disarm()

    def _try(self, act: Callable[[Slot], None], slot: Slot) -> None:
        name = act.__name__
        began = time.monotonic()
        try:
            act(slot)
            self.walk.done[name] += 1
        except EgmError as error:
            self.walk.failed[f"{name}: exit {error.exit_code}"] += 1
        except Exception as error:
            if "injected" in str(error) and isinstance(error, OSError):
                self.walk.failed[f"{name}: {type(error).__name__}"] += 1  # the command line turns it into exit 1
            else:
                self._wrong(f"{name} of {slot.name}: {type(error).__name__}: {error}")
        if time.monotonic() - began > 30:
            self._wrong(f"{name} of {slot.name} took {time.monotonic() - began:.0f} s")
        self._let_go(slot)

    def _let_go(self, slot: Slot) -> None:
        """The end of an agent's process, where it has nothing left to own."""
        agent = slot.agent
        if agent is None or agent.operator.busy() or not agent.over:
            return
        slot.agent = None
        with suppress(OSError):
            agent.__exit__()

    def provision(self, slot: Slot) -> None:
        if slot.agent is not None:
            provision(slot.plan, self.paths)
            return
        slot.agent = Agent(slot.plan, self.paths, who="walk").__enter__()
        slot.agent.command("provision", slot.agent.pool.provision).wait()
        if slot.agent.pool.state != "provisioned":
            self._wrong(f"provisioned, and {slot.name} is {slot.agent.pool.state}")

    def mount(self, slot: Slot) -> None:
        self._mount(slot, None)

    def mount_elsewhere(self, slot: Slot) -> None:
        self._mount(slot, self.sides[-1].address)

    def _mount(self, slot: Slot, master: str | None) -> None:
        if slot.agent is None:
            return
        if self.source.random() < 0.3:
            with ControlClient(self.paths.socket(slot.name)) as client:
                client.ask("mount", **({"master": master} if master else {}))
            return
        pool = slot.agent.pool
        slot.agent.command("mount", lambda task: pool.mount(task, master)).wait()
        if pool.state not in ("ready", "degraded"):
            self._wrong(f"mounted, and {slot.name} is {pool.state}")

    def teardown(self, slot: Slot) -> None:
        self._teardown(slot, 0.0)

    def drain(self, slot: Slot) -> None:
        self._teardown(slot, 0.05)

    def _teardown(self, slot: Slot, grace: float) -> None:
        if slot.crashed:
            teardown_from_ledger(slot.name, self.paths)
            slot.crashed = False
        elif slot.agent is None:
            teardown_pool(slot.name, self.paths, now=True)
        else:
            pool = slot.agent.pool
            slot.agent.command("teardown", lambda task: pool.teardown(task, grace)).wait()
            if pool.parts.chunks or pool.state != "gone":
                self._wrong(f"torn down, and {slot.name} is {pool.state} with {len(pool.parts.chunks)} chunks")
        record = read_only(self.paths.ledger(slot.name))
        if record is None:
            return
        if record.state != "gone" or record.live_segments or record.live_chunks:
            self._wrong(f"torn down, and the ledger of {slot.name} says {record.state}, {record.live_segments}")
        for side in self.sides:
            held = side.holds(record.client)
            if held:
                self._wrong(f"{slot.name} is torn down, and {side.address} has {held}")

    def status(self, slot: Slot) -> None:
        if slot.crashed:
            return  # in this process an agent that crashed seems to be alive
        pool_status(self.paths, slot.name, compare=self.source.random() < 0.3)

    def rest(self, slot: Slot) -> None:
        time.sleep(self.source.choice((0.02, 0.1, 0.25)))

    def engine_dies(self, slot: Slot) -> None:
        engine: Any = None if slot.agent is None or slot.agent.pool.live is None else slot.agent.pool.live.engine
        if engine is not None:
            engine.die()

    def disturb(self, slot: Slot) -> None:
        side = self.source.choice(self.sides)
        self.walk.disturbances[side.disturb(self.source)] += 1
        self._healed_at = self.walk.operations + self.source.randint(1, 6)

    def take_segment_away(self, slot: Slot) -> None:
        from egmctl.mooncake.master import MasterClient

        record = read_only(self.paths.ledger(slot.name))
        for row in (record.live_segments if record else ())[:1]:
            with MasterClient(row.master, timeout=0.2) as client:
                client.unmount_segment(row.id, row.client)

    def crash(self, slot: Slot) -> None:
        """As SIGKILL would have it: everything of the process goes at once, nothing is said to anybody."""
        agent = slot.agent
        if agent is None:
            return
        self.chaos.muted = True
        try:
            agent.operator.end()
            live = agent.pool.live
            if live is not None:
                if live.heartbeat is not None:
                    live.heartbeat.stop()
                agent.control.drain(0.1)
                agent.control.close()
                if live.endpoint is not None:
                    live.endpoint.close()
                if live.memory is not None:
                    for chunk in live.memory.chunks():
                        live.memory.release(chunk)
                    live.memory.close()
            agent.pool.close()
            os.close(agent.lock._fd)
            agent.lock._fd = -1
        finally:
            self.chaos.muted = False
        slot.agent = None
        record = read_only(self.paths.ledger(slot.name))
        slot.crashed = record is not None and record.state not in ("gone", "abandoned")

    # The end

    def finish(self) -> None:
        for side in self.sides:
            side.heal()
        for slot in self.slots:
            deadline = time.monotonic() + 30
            while slot.agent is not None or slot.crashed:
                self._try(self.teardown, slot)
                if time.monotonic() > deadline:
                    self._wrong(f"{slot.name} cannot be brought to an end: {slot.agent and slot.agent.pool.reason}")
                    break
                time.sleep(0.02)


@contextmanager
def _hurried(model: ModelDriver, ping: float, rpc: float, patience: float) -> Iterator[None]:
    timing = functools.partial(pool_module.Timing, ping_interval=ping, rpc_timeout=rpc, restart_patience=patience)
    assert heartbeat_module.Heartbeat.__init__.__kwdefaults__ is not None
    with ExitStack() as stack:
        for place, name, value in (
            (pool_module, "Timing", timing),
            (transfer_engine, "TransferEngineChild", _Engine),
            (wheel, "require_transfer_engine", lambda **_: None),
            (listing, "_NODES", 2),
        ):
            stack.enter_context(patch.object(place, name, value))
        stack.enter_context(
            patch("egmctl.memory.preflight.probe", lambda kind, node, **_: ProbeResult(kind, node, "ok"))
        )
        stack.enter_context(patch.dict(heartbeat_module.Heartbeat.__init__.__kwdefaults__, {"timeout": rpc}))
        install_driver(lambda: model)
        try:
            yield
        finally:
            install_driver(None)


def _plan(name: str, kind: str, chunks: int, address: str, lease: float, expiry: float) -> Plan:
    spec = parse_spec(
        {
            "pool": {
                "name": name,
                "memory": kind,
                "enable_egm_store_pool": True,
                "egm_numa_nodes": "0",
                "global_segment_size": chunks * CHUNK,
                "max_chunk_size": CHUNK,
            },
            "mooncake": {
                "protocol": "nvlink" if kind == "cuda-fabric" else "tcp",
                "local_hostname": "127.0.0.1",
                "master_server_addr": address,
            },
        }
    )
    plan = make_plan(spec, read_topology(), granularity=lambda node: 4096)
    return replace(plan, lease_ttl=lease, client_expiry=expiry)


def _go(sides: list[Side], operations: int, seed: int, *, lease: float, expiry: float, ping: float, rpc: float) -> Walk:
    # A ledger in memory: what a disk adds to the order of things is time.
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="egm", dir=base) as state,
        tempfile.TemporaryDirectory(prefix="egm", dir="/tmp") as runtime,
        tempfile.TemporaryDirectory(prefix="egm", dir=base) as model_folder,
    ):
        model = ModelDriver(Config(directory=Path(model_folder)))
        with _hurried(model, ping, rpc, 0.3):
            address = sides[0].address
            plans = [
                _plan("a", "shm", 2, address, lease, expiry),
                _plan("b", "cuda-fabric", 2, address, lease, expiry),
                _plan("c", "shm", 1, address, lease, expiry),
            ]
            paths = Paths(Path(state), Path(runtime) / "run")
            walker = _Walker(sides, paths, plans, seed, model)
            before = _held()
            watch(walker.chaos)
            try:
                walker.run(operations)
                walker.finish()
            finally:
                watch(None)
            walker.walk.wrong += _left(walker, before)
    walker.walk.seconds = time.monotonic() - began
    return walker.walk


def _held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), _chunk_mappings()


def _chunk_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:egm-")


def _left(walker: _Walker, before: tuple[int, int]) -> list[str]:
    import gc

    wrong = []
    deadline = time.monotonic() + 5
    while True:
        gc.collect()
        descriptors, mappings = _held()
        ours = [
            t.name for t in threading.enumerate() if t.name in ("operator", "heartbeat", "control", "control-client")
        ]
        # Masters in this process close their ends of connections in threads of their own.
        if (descriptors <= before[0] + 2 and not ours) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    if descriptors > before[0] + 2:
        wrong.append(f"{descriptors} descriptors, {before[0]} before")
    if ours:
        wrong.append(f"threads {ours}")
    if mappings != before[1]:
        wrong.append(f"{mappings} chunks are mapped")
    if walker.model.leaks():
        wrong.append(f"at the driver: {walker.model.leaks()}")
    wrong += [f"file {path}" for path in walker.paths.runtime.glob("*")]
    for slot in walker.slots:
        record = read_only(walker.paths.ledger(slot.name))
        if record is not None and (record.state != "gone" or record.live_segments or record.live_chunks):
            wrong.append(f"the ledger of {slot.name}: {record.state}")
        for side in walker.sides:
            held = side.holds(record.client) if record is not None else []
            wrong += [f"{side.address} has {name}" for name in held]
    return wrong


def walk_with_fakes(operations: int, seed: int = 5) -> Walk:
    """Two small Masters, leases of 20 ms, an expiry of 0.3 s."""
    with FakeSide(0.3) as first, FakeSide(0.3) as second:
        return _go([first, second], operations, seed, lease=0.02, expiry=0.35, ping=0.05, rpc=0.15)


def walk_with_real_masters(operations: int, seed: int = 5, version: str = "0.3.14") -> Walk:
    with (
        Master(version, lease_ttl=0.5, client_ttl=2, suspicion_ttl=1) as first,
        Master("0.3.13", lease_ttl=0.5, client_ttl=2) as second,
    ):
        sides: list[Side] = [RealSide(first), RealSide(second)]
        return _go(sides, operations, seed, lease=0.5, expiry=3.5, ping=0.3, rpc=0.7)
