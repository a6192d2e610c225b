"""Each driver call in the life of a whole pool fails once, wherever it is made: in the agent, in the child that probes,
in the Transfer Engine child. Nothing is left, the ledger says so, and the exit code is the contract's.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from egmctl.checks.preflight import preflight
from egmctl.errors import EgmError, PreflightError
from egmctl.ledger import PoolRecord, read_only
from egmctl.memory.base import MemoryKind
from egmctl.memory.driver import install_driver
from egmctl.paths import Paths
from egmctl.planning import Plan, make_plan, parse_spec
from egmctl.provider.agent import Agent
from egmctl.topology import read_topology
from egmctl.topology.fabric import ImexChannel, ImexChannels, install_imex_channels
from tests.fabric.machines import CHUNK, GPUS
from tests.model.config import Config, Fault
from tests.model.driver import ModelDriver
from tests.provider.pools import listed, nothing_left, private_paths, run, teardown_now
from tests.support.master import REPOSITORY, Master

KINDS: list[MemoryKind] = ["cuda-fabric", "cuda-posix"]


@dataclass(frozen=True)
class Site:
    """The ``nth`` call of one name, and the command of the pool's life that makes it."""

    kind: MemoryKind
    command: str
    call: str
    nth: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.command}-{self.call}-{self.nth}"


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    with Master("0.3.13", lease_ttl=1.0, client_ttl=3) as master:
        yield master


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    install_driver(None)
    install_imex_channels(None)


def new_model(folder: Path, *faults: Fault) -> ModelDriver:
    """This process's driver; children get the same machine through the environment, without the faults."""
    driver = ModelDriver(Config(directory=folder / "memory", nodes=(0,), devices=GPUS, faults=list(faults)))
    install_driver(lambda: driver)
    install_imex_channels(lambda: ImexChannels("imex", 234, (ImexChannel(0, "imex/channel0", ""),)))
    return driver


@contextmanager
def children_of(model: ModelDriver, *faults: Fault) -> Iterator[None]:
    """The environment in which children have the model, and these faults."""
    before = dict(os.environ)
    kept, model.config.faults = model.config.faults, list(faults)
    os.environ.update({**model.config.to_env(), "PYTHONPATH": str(REPOSITORY)})
    model.config.faults = kept
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def plan_for(kind: MemoryKind, master: Master | None) -> Plan:
    """Two chunks of 16 MiB on node 0."""
    spec = parse_spec(
        {
            "pool": {
                "name": "dev",
                "memory": kind,
                "enable_egm_store_pool": True,
                "global_segment_size": 2 * CHUNK,
                "max_chunk_size": CHUNK,
                "local_buffer_size": 1 << 20,
                "lease_ttl": 0.2,
                "client_expiry": 0.3,
            },
            "mooncake": {
                "protocol": "nvlink" if kind == "cuda-fabric" else "tcp",
                "local_hostname": "127.0.0.1",
                "master_server_addr": master.address if master else "127.0.0.1:1",
                **({"master_admin_addr": master.admin_address} if master else {}),
            },
        }
    )
    return make_plan(spec, read_topology(), granularity=lambda node: 2 << 20)


@contextmanager
def agent_of(kind: MemoryKind, master: Master, model: ModelDriver, paths: Paths, *faults: Fault) -> Iterator[Agent]:
    """An agent in this process; its children meet the faults given here."""
    with children_of(model, *faults), Agent(plan_for(kind, master), paths, who="test") as agent:
        yield agent


def commands(agent: Agent) -> dict[str, Callable[[], Any]]:
    return {
        "provision": lambda: run(agent, "provision", agent.pool.provision),
        "mount": lambda: run(agent, "mount", agent.pool.mount),
        "teardown": lambda: teardown_now(agent),
    }


def sites_of(kind: MemoryKind, master: Master, folder: Path) -> list[Site]:
    """Every driver call that the agent makes in a life without a failure."""
    model = new_model(folder)
    found: list[Site] = []
    counts: Counter[str] = Counter()
    with private_paths(folder) as paths, agent_of(kind, master, model, paths) as agent:
        planned = len(model.calls)
        counts.update(model.calls[:planned])
        for name, act in commands(agent).items():
            act()
            for call in model.calls[counts.total() :]:
                counts[call] += 1
                found.append(Site(kind, name, call, counts[call]))
    assert model.leaks() == {}
    return found


def ledger(paths: Paths) -> PoolRecord:
    record = read_only(paths.ledger("dev"))
    assert record is not None
    return record


def one_life(site: Site, master: Master, folder: Path) -> list[str]:
    """A life in which the call fails; what was not as it should be."""
    wrong: list[str] = []
    model = new_model(folder, Fault(site.call, site.nth))

    def check(condition: bool, text: str) -> None:
        if not condition:
            wrong.append(f"{site}: {text}")

    with private_paths(folder) as paths, agent_of(site.kind, master, model, paths) as agent:
        acts = commands(agent)
        error: EgmError | None = None
        for name, act in acts.items():
            try:
                act()
            except EgmError as failure:
                error = failure
                check(name == site.command, f"{name} failed: {failure}")
                break
        if error is None:
            # The trial of the flag that this driver refuses has a second try; a query may have another source.
            check(False, "no command failed")
        elif site.command == "provision":
            # A driver that shows no GPU any more is the machine's doing; whatever comes later has failed and is undone.
            codes = (1, 3) if site.call == "device_count" else (1,)
            check(error.exit_code in codes, f"exit {error.exit_code}")
            check("999" in error.message and bool(error.hint), f"says {error} / {error.hint}")
            check(agent.pool.state == "gone", f"state {agent.pool.state}")
        else:
            check(error.exit_code == 4, f"exit {error.exit_code}")
            check(agent.pool.state == "cleanup-pending", f"state {agent.pool.state}")
            check(ledger(paths).state == "cleanup-pending", f"ledger {ledger(paths).state}")
            check("999" in error.message and "teardown" in error.hint, f"says {error} / {error.hint}")
            check(bool(model.leaks()), "nothing is left although its release failed")
            if site.call != "address_free":
                check(bool(ledger(paths).live_chunks), "the ledger has lost what is left")
            acts["teardown"]()
        check(agent.pool.state == "gone", f"ends {agent.pool.state}")
        check(model.leaks() == {}, f"leaks {model.leaks()}")
        check(list(model.config.directory.iterdir()) == [], "allocations left")
        record = ledger(paths)
        check(record.state == "gone" and not record.live_chunks and not record.live_segments, f"ledger {record}")
        check(listed(master) == [], f"the Master lists {listed(master)}")
    check(nothing_left(paths) == [], f"left {nothing_left(paths)}")
    return wrong


@pytest.mark.parametrize("kind", KINDS)
def test_a_driver_call_of_the_agent_that_fails_leaves_nothing_or_is_owned_until_the_next_teardown(
    kind: MemoryKind, master: Master, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    sites = sites_of(kind, master, tmp_path / "clean")
    setup = {"granularity", "mem_create", "address_reserve", "mem_map", "set_access"}
    setup |= {"export_fabric" if kind == "cuda-fabric" else "export_fd"}
    assert setup <= {site.call for site in sites if site.command == "provision"}
    released = {site.call for site in sites if site.command == "teardown"}
    assert released == {"mem_unmap", "mem_release", "address_free"}
    wrong: list[str] = []
    for number, site in enumerate(sites):
        wrong += one_life(site, master, tmp_path / f"{number}")
    assert not wrong, "\n".join(wrong)
    record_property("pool fault sites", f"{kind}, agent: {len(sites)} {dict(Counter(s.command for s in sites))}")


@pytest.mark.parametrize("kind", KINDS)
def test_an_undo_that_fails_as_well_leaves_the_pool_cleanup_pending_and_teardown_finishes(
    kind: MemoryKind, master: Master, tmp_path: Path
) -> None:
    for number, undo in enumerate(("mem_unmap", "mem_release", "address_free")):
        folder = tmp_path / f"{number}"
        model = new_model(folder, Fault("set_access", 2), Fault(undo, 1))
        with private_paths(folder) as paths, agent_of(kind, master, model, paths) as agent:
            acts = commands(agent)
            with pytest.raises(EgmError) as caught:
                acts["provision"]()
            # One chunk's release is tried again when all are released, so it may have succeeded by then.
            assert (caught.value.exit_code, agent.pool.state) in [(4, "cleanup-pending"), (1, "gone")], undo
            if agent.pool.state != "gone":
                acts["teardown"]()
            assert model.leaks() == {}
            assert ledger(paths).state == "gone"
            assert ledger(paths).live_chunks == ()


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_of_the_preflight_or_its_probe_that_fails_refuses_or_says_unknown_and_allocates_nothing(
    kind: MemoryKind, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    clean = new_model(tmp_path / "clean")
    clean.config.log = tmp_path / "calls.jsonl"
    topology = read_topology()
    with children_of(clean):
        before = len(clean.calls)
        preflight(kind, [0], topology)
    here: Counter[str] = Counter(clean.calls[:before])
    own = []
    for call in clean.calls[before:]:
        here[call] += 1
        own.append(Fault(call, here[call] - Counter(clean.calls[:before])[call]))
    lines = [json.loads(line) for line in clean.config.log.read_text().splitlines()]
    probing = [(line["call"], line["nth"]) for line in lines if line["pid"] != os.getpid()]
    assert {"mem_create", "mem_map", "set_access", "mem_unmap", "mem_release"} <= {call for call, _ in probing}
    outcomes: Counter[str] = Counter()
    for number, fault in enumerate(own):
        model = new_model(tmp_path / f"own-{number}", fault)
        told = ""
        try:
            with children_of(model):
                preflight(kind, [0], topology)
        except PreflightError as error:
            told = error.message
        assert "999" in told or not told, fault
        outcomes["refuses" if told else "passes"] += 1
        assert model.leaks() == {}
    for number, (call, nth) in enumerate(probing):
        model = new_model(tmp_path / f"probe-{number}")
        with (
            children_of(model, Fault(call, nth, program="egmctl.memory.probe")),
            pytest.raises(PreflightError) as caught,
        ):
            preflight(kind, [0], topology)
        assert "999" in caught.value.message, (call, nth)
        assert caught.value.exit_code == 3
        assert model.leaks() == {}
        assert [path for path in model.config.directory.iterdir() if not path.name.endswith(".owner")] == []
    record_property("pool fault sites", f"{kind}, preflight: {len(own)} ({dict(outcomes)}), probe: {len(probing)}")


@pytest.mark.parametrize("call", ["import_fd", "address_reserve", "mem_map", "set_access"])
def test_a_call_of_the_transfer_engine_child_that_fails_fails_the_mount_and_the_pool_stays_provisioned(
    call: str, master: Master, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    model = new_model(tmp_path)
    fault = Fault(call, 2, program="egmctl.mooncake.te_child")
    with private_paths(tmp_path) as paths:
        with agent_of("cuda-posix", master, model, paths, fault) as agent:
            acts = commands(agent)
            acts["provision"]()
            whole = model.leaks()
            with pytest.raises(EgmError, match="999") as caught:
                acts["mount"]()
            assert caught.value.exit_code == 1
            assert agent.pool.state == "provisioned"
            assert listed(master) == []
            assert model.leaks() == whole
            os.environ.update(model.config.to_env())  # what was wrong is mended
            acts["mount"]()
            assert agent.pool.state == "ready"
            acts["teardown"]()
            assert model.leaks() == {}
        assert nothing_left(paths) == []
    record_property("pool fault sites", f"cuda-posix, Transfer Engine child: {call}")
