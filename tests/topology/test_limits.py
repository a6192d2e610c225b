from __future__ import annotations

from pathlib import Path

import pytest

from egmctl.topology import read_topology
from egmctl.topology.limits import allowed_nodes, cgroup_headroom, memory_headroom
from egmctl.topology.read import Roots

GIB = 1 << 30


class Machine:
    """A /proc with cgroups mounted below a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.proc, self.top = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.top.mkdir()
        self.mounts: list[str] = []

    def mount(self, version: int, at: str = "", root: str = "/") -> None:
        folder = self.top / at
        folder.mkdir(parents=True, exist_ok=True)
        kind = "cgroup2 none rw" if version == 2 else "cgroup none rw,memory"
        self.mounts.append(f"30 25 0:26 {root} {str(folder).replace(' ', chr(92) + '040')} rw,nosuid - {kind}")
        (self.proc / "self/mountinfo").write_text("\n".join(self.mounts))

    def within(self, *lines: str) -> None:
        (self.proc / "self/cgroup").write_text("\n".join(lines))

    def group(self, path: str, **files: object) -> None:
        folder = self.top / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / f"memory.{name}").write_text(f"{value}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "a machine")


def test_version_2_counts_every_group_up_the_hierarchy(machine: Machine) -> None:
    machine.mount(2)
    machine.within("0::/kube/pod/container")
    machine.group("kube/pod/container", max="max", high="max", current=2 * GIB)
    machine.group("kube/pod", max=8 * GIB, high="max", current=6 * GIB, stat=f"inactive_file {GIB}\nanon 5\n")
    machine.group("kube", max=100 * GIB, current=10 * GIB)
    assert cgroup_headroom(machine.proc) == 3 * GIB


def test_memory_high_is_a_limit_too(machine: Machine) -> None:
    machine.mount(2)
    machine.within("0::/a")
    machine.group("a", max=8 * GIB, high=4 * GIB, current=GIB)
    assert cgroup_headroom(machine.proc) == 3 * GIB


def test_version_1_on_a_hybrid_machine_counts_as_well(machine: Machine) -> None:
    machine.mount(1, "memory")
    machine.mount(2, "unified")
    machine.within("9:name=systemd:/", "4:memory:/docker/x", "0::/")
    machine.group("memory/docker/x", limit_in_bytes=9223372036854771712, usage_in_bytes=GIB)
    machine.group(
        "memory/docker", limit_in_bytes=4 * GIB, usage_in_bytes=2 * GIB, stat=f"total_active_file {GIB}\ncache 7\n"
    )
    assert cgroup_headroom(machine.proc) == 3 * GIB


def test_in_a_container_the_path_is_taken_below_what_is_mounted(machine: Machine) -> None:
    machine.mount(1, "memory", root="/docker/x")
    machine.within("4:memory:/docker/x")
    machine.group("memory", limit_in_bytes=2 * GIB, usage_in_bytes=GIB)
    assert cgroup_headroom(machine.proc) == GIB


@pytest.mark.parametrize("path", ["/../outside", "/elsewhere/y"])
def test_a_group_outside_the_namespace_is_the_mount_itself(machine: Machine, path: str) -> None:
    machine.mount(2, root="/here" if path == "/elsewhere/y" else "/")
    machine.within(f"0::{path}")
    machine.group("", max=2 * GIB, current=GIB)
    assert cgroup_headroom(machine.proc) == GIB


def test_usage_above_the_limit_leaves_nothing(machine: Machine) -> None:
    machine.mount(2)
    machine.within("0::/a")
    machine.group("a", max=GIB, current=2 * GIB)
    assert cgroup_headroom(machine.proc) == 0


def test_the_headroom_is_the_lesser_of_machine_and_cgroup(machine: Machine) -> None:
    machine.mount(2)
    machine.within("0::/a")
    machine.group("a", max=2 * GIB, current=0)
    (machine.proc / "meminfo").write_text("MemAvailable: 1048576 kB\n")
    assert memory_headroom(machine.proc) == GIB
    (machine.proc / "meminfo").write_text("MemAvailable: 10485760 kB\n")
    assert memory_headroom(machine.proc) == 2 * GIB


def test_where_nothing_is_known_nothing_is_said(machine: Machine) -> None:
    assert memory_headroom(machine.proc) is None
    assert allowed_nodes(machine.proc) is None


def test_a_node_outside_the_cpuset_is_no_pool_node(tmp_path: Path, machine: Machine) -> None:
    from tests.fixtures import machines

    (machine.proc / "self/status").write_text("Mems_allowed:\t2\nMems_allowed_list:\t1\n")
    description = machines.describe("hgx-h200")
    description["pci"] = []
    sys = machines.lay_out(description, tmp_path / "sys")
    topology = read_topology(environ={}, roots=Roots(sys, machine.proc, tmp_path))
    assert [(node.role, node.allowed) for node in topology.nodes] == [("not-allowed", False), ("pool", True)]


def test_a_kernel_without_numa_nodes_is_one_node_and_said(tmp_path: Path, machine: Machine) -> None:
    (machine.proc / "meminfo").write_text("MemTotal: 2048 kB\nMemAvailable: 1024 kB\n")
    cpu = tmp_path / "sys/devices/system/cpu"
    cpu.mkdir(parents=True)
    (cpu / "online").write_text("0-3\n")
    topology = read_topology(environ={}, roots=Roots(tmp_path / "sys", machine.proc, tmp_path))
    assert [(node.id, node.cpus, node.memory_free) for node in topology.eligible()] == [(0, (0, 1, 2, 3), 1 << 20)]
    assert "no NUMA nodes" in topology.warnings[0]


def test_this_machine_has_a_pool_node_and_headroom() -> None:
    topology = read_topology(environ={})
    assert topology.eligible()
    assert topology.headroom is not None
    assert 0 < topology.headroom < 1 << 50
