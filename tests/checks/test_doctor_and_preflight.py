"""doctor's verdict on whole machines, and the same checks standing before `provision`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from egmctl.checks.kinds import checks_for, preflight_checks_for
from egmctl.checks.machine import KINDS
from egmctl.checks.preflight import preflight
from egmctl.errors import PreflightError, UsageError
from egmctl.mooncake import wheel
from egmctl.topology import read_topology
from egmctl.topology.nvml import NvmlGpu
from tests.checks.conftest import ROOT, ZERO, Build
from tests.checks.recorded import RecordedNvml
from tests.model.config import Config, Device
from tests.model.driver import ModelDriver

VERDICTS: list[tuple[str, dict[str, Any], dict[str, bool | None]]] = [
    ("gb200-tray", {}, {"cuda-fabric": True, "cuda-posix": True, "shm": True}),
    (
        "hgx-h200",
        {"attributes": {143: 0}, "fabric": "not-permitted", "imex": False, "fabrics": [ZERO] * 8},
        {"cuda-fabric": None, "cuda-posix": True, "shm": True},
    ),
    (
        "vm-h200",
        {"attributes": {143: 0}, "fabric": "not-permitted", "imex": False, "fabrics": [ZERO] * 2},
        {"cuda-fabric": None, "cuda-posix": True, "shm": True},
    ),
    ("laptop", {"imex": False}, {"cuda-fabric": None, "cuda-posix": None, "shm": True}),
]


@pytest.mark.parametrize(("name", "options", "kinds"), VERDICTS, ids=[name for name, _, _ in VERDICTS])
def test_doctor_checks_what_a_machine_could_be_meant_for_and_says_what_it_left_out(
    build: Build, name: str, options: dict[str, Any], kinds: dict[str, bool | None]
) -> None:
    document = build(name, **options).doctor()
    by_kind = {kind: [row for row in document["checks"] if row["kind"] == kind] for kind in kinds}
    # The nodes of another machine cannot be had here: shm's chunk is tried on the real one.
    failed = [row["id"] for row in by_kind["shm"] if row["status"] == "fail"]
    assert not [check for check in failed if not check.startswith("shm-chunk/")]
    assert {kind: verdict for kind, verdict in document["kinds"].items() if kind != "shm"} == {
        kind: verdict for kind, verdict in kinds.items() if kind != "shm"
    }
    for kind, verdict in kinds.items():
        if verdict is None:
            (row,) = by_kind[kind]
            assert (row["id"], row["status"]) == (kind, "skip")
            assert row["hint"] == f"egmctl doctor --for {kind} checks it all the same"
    for row in document["checks"]:
        assert set(row) == {"kind", "id", "status", "observed", "expected", "hint"}
        assert row["observed"]
        assert row["hint"] or row["status"] != "fail"


def test_doctor_for_fabric_on_a_machine_without_it_names_everything_in_the_way(build: Build) -> None:
    _, options, _ = VERDICTS[2]
    document = build("vm-h200", **options).doctor("cuda-fabric")
    assert not document["ok"]
    failed = {row["id"] for row in document["checks"] if row["status"] == "fail"}
    assert failed == {
        "cuda-attributes/gpu0/143",
        "cuda-attributes/gpu1/143",
        "imex-channel",
        "nvlink-fabric/0000:8d:00.0",
        "nvlink-fabric/0000:a7:00.0",
        "cuda-granule/node0",
    }


def test_doctor_refuses_a_kind_that_there_is_not(build: Build) -> None:
    with pytest.raises(UsageError, match="cuda-magic"):
        build("laptop").doctor("cuda-magic")


def test_a_preflight_is_a_part_of_what_doctor_looks_at() -> None:
    for kind in KINDS:
        assert set(preflight_checks_for(kind)) < set(checks_for(kind))


def test_a_preflight_that_passes_returns_what_it_saw_and_allocates_nothing_here(build: Build) -> None:
    host = build("gb200-tray")
    found = preflight("cuda-fabric", [0, 1], host.topology, paths=host.paths, roots=host.roots)
    assert {result.id for result in found if result.id.startswith("cuda-granule/")} == {
        "cuda-granule/node0",
        "cuda-granule/node1",
    }
    assert "mem_create" not in ModelDriver(host.config).calls
    assert not list(host.config.directory.glob("alloc-*"))


def test_a_refusal_says_all_of_it_once_with_each_remedy_and_the_facts(build: Build) -> None:
    _, options, _ = VERDICTS[2]
    host = build("vm-h200", **options)
    with pytest.raises(PreflightError) as caught:
        preflight("cuda-fabric", [0], host.topology, paths=host.paths, roots=host.roots)
    error = caught.value
    assert error.exit_code == 3
    kind, _, failed = error.where.partition(": ")
    assert kind == "memory kind cuda-fabric"
    assert {"cuda-attributes", "imex-channel", "cuda-granule"} <= set(failed.split(", "))
    assert error.message.count("attribute 143 (HOST_NUMA_MULTINODE_IPC) is 0") == 1, "once, not for each GPU"
    assert "no IMEX channel file" in error.message
    assert "CUDA_ERROR_NOT_PERMITTED (800)" in error.message
    assert "cluster UUID 0000" in error.message
    for remedy in ("mknod", "cuda-posix"):
        assert remedy in error.hint
    assert "as root" not in error.hint
    facts = error.document()["facts"]
    assert facts["memory_kind"] == "cuda-fabric"
    statuses = {row["id"]: row["status"] for row in json.loads(json.dumps(facts))["checks"]}
    assert statuses["cuda-attributes/gpu0/143"] == statuses["imex-channel"] == "fail"


def test_a_plan_with_its_own_nodes_is_not_refused_because_a_gpus_node_is_unknown(build: Build) -> None:
    def forget(description: dict[str, Any]) -> None:
        for gpu in description["pci"]:
            gpu["numa_node"] = -1

    host = build("hgx-h200", change=forget, attributes={134: -1})
    found = {each.id: each.status for each in preflight("cuda-posix", [0, 1], host.topology, roots=host.roots)}
    assert found["gpu-numa"] == "warn"


def test_shared_memory_asks_neither_cuda_nor_the_wheel(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    host = build("hgx-h200")

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr("egmctl.checks.machine.get_driver", forbidden)
    monkeypatch.setattr(wheel, "wheel_info", forbidden)
    monkeypatch.setattr(subprocess, "Popen", forbidden)
    found = preflight("shm", [0, 1], host.topology, paths=host.paths, roots=host.roots)
    assert [each.id for each in found] == ["state-folder", "numa-nodes"]


# Before `provision`, as a person runs it


class Here:
    """egmctl on this machine, with GPUs of a model beside its real NUMA node."""

    def __init__(self, folder: Path, state: Path) -> None:
        self.folder = folder
        self.state = state
        node = read_topology().eligible()[0].id
        self.node = node
        self.config = Config(
            directory=folder / "memory", nodes=(node,), devices=(Device("0000:01:00.0", node),), log=folder / "calls"
        )

    def run(
        self, *arguments: str, config: Config, nvml: RecordedNvml | None = None, **more: str
    ) -> subprocess.CompletedProcess[str]:
        environ = {
            **os.environ,
            **config.to_env(),
            "PYTHONPATH": str(ROOT),
            "EGMCTL_STATE_DIR": str(self.state),
            **more,
        }
        if nvml is not None:
            environ |= nvml.to_env()
            environ["EGMCTL_SEAMS"] += ",tests.checks.recorded:install"
        command = [sys.executable, "-m", "egmctl", *arguments]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, cwd=self.folder)

    def spec(self, kind: str) -> str:
        path = self.folder / "gpu.toml"
        path.write_text(
            f'[pool]\nname = "gpu"\nmemory = "{kind}"\nenable_egm_store_pool = true\negm_numa_nodes = "{self.node}"\n'
            'global_segment_size = "32MiB"\nmax_chunk_size = "16MiB"\n'
            '[mooncake]\nlocal_hostname = "127.0.0.1"\nmaster_server_addr = "127.0.0.1:1"\n'
        )
        return str(path)

    def created(self) -> list[dict[str, Any]]:
        """Allocations by the driver, by whichever process."""
        calls = self.folder / "calls"
        lines = [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
        return [line for line in lines if line["call"] == "mem_create" and line["outcome"] == "ok"]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    state = Path(tempfile.mkdtemp(prefix="egm", dir="/tmp"))
    machine = Here(tmp_path, state)
    yield machine
    machine.run("teardown", "--all", "--now", "--abandon", config=machine.config)
    shutil.rmtree(state, ignore_errors=True)


def test_fabric_memory_that_cannot_be_had_is_refused_before_anything_is_allocated(here: Here) -> None:
    nvml = RecordedNvml((NvmlGpu(0, ModelDriver(here.config).device_uuid(0), "NVIDIA Model", "0000:01:00.0"),), (ZERO,))
    config = replace(here.config, fabric="not-permitted", attributes={143: 0})
    done = here.run("provision", here.spec("cuda-fabric"), "--json", config=config, nvml=nvml)
    assert done.returncode == 3, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == "egmctl/error/1"
    assert (document["code"], document["exit"]) == ("preflight", 3)
    for said in ("attribute 143", "IMEX channel", "CUDA_ERROR_NOT_PERMITTED (800)", "cluster UUID 0000"):
        assert said in document["message"]
        assert said in done.stderr
    checks = {row["id"]: row for row in document["facts"]["checks"]}
    assert checks["cuda-attributes/gpu0/143"]["status"] == "fail"
    assert checks[f"cuda-granule/node{here.node}"]["observed"].endswith("[not-permitted]")
    assert checks["nvlink-fabric/0000:01:00.0"]["status"] == "fail"
    assert "cuda-posix" in document["hint"]
    assert "as root" not in done.stdout + done.stderr
    assert here.created() == []
    assert not list(here.state.iterdir()), "no ledger, no log, no lock"
    status = here.run("status", "--json", config=config)
    assert json.loads(status.stdout)["pools"] == []


def test_in_the_foreground_it_is_refused_in_the_same_way(here: Here) -> None:
    config = replace(here.config, crash_nodes=(here.node,))
    done = here.run("provision", here.spec("cuda-posix"), "--foreground", "--json", config=config)
    assert done.returncode == 3, done.stderr
    assert "the driver ended the process: SIGSEGV" in json.loads(done.stdout)["message"]
    assert not list(here.state.iterdir())


def test_what_can_be_had_is_provisioned_and_the_checks_warnings_stay_with_the_pool(here: Here) -> None:
    done = here.run("provision", here.spec("cuda-fabric"), "--json", config=here.config, MC_USE_NVLINK_IPC="0")
    assert done.returncode == 0, done.stderr
    assert "seeing whether this machine can lend cuda-fabric memory" in done.stderr
    pool = json.loads(done.stdout)["pool"]
    assert (pool["state"], pool["bytes"]) == ("provisioned", 32 << 20)
    assert any("MC_USE_NVLINK_IPC='0' is set" in warning for warning in pool["warnings"])
    assert len(here.created()) == 3, "one granule, two chunks"
    again = here.run("provision", here.spec("cuda-fabric"), "--json", config=here.config)
    assert again.returncode == 0, again.stderr
    assert len(here.created()) == 3
