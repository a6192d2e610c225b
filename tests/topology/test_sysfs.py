from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egmctl.errors import FailedError, UsageError
from egmctl.topology import Bdf, Topology, load_topology, read_topology, save_topology
from egmctl.topology.lists import format_list, parse_list
from egmctl.units import GIB, MIB
from tests.fixtures import machines

Machine = Callable[[str], Path]


def test_a_gb200_tray_has_two_pool_nodes_and_its_hbm_nodes_are_none(machine: Machine) -> None:
    topology = read_topology(machine("gb200-tray"))
    assert [node.id for node in topology.eligible()] == [0, 1]
    assert {node.id for node in topology.nodes if node.role == "gpu-memory"} == {2, 10, 18, 26}
    assert sum(node.role == "no-memory" for node in topology.nodes) == 28
    assert [(gpu.bdf, gpu.numa_node, gpu.source) for gpu in topology.gpus] == [
        ("0008:01:00.0", 0, "sysfs"),
        ("0009:01:00.0", 0, "sysfs"),
        ("0018:01:00.0", 1, "sysfs"),
        ("0019:01:00.0", 1, "sysfs"),
    ]


def test_free_memory_counts_page_cache_and_slab_but_not_shared_memory(machine: Machine) -> None:
    node = read_topology(machine("hgx-h200")).nodes[0]
    assert node.memory_total == 1007 * GIB
    assert node.memory_free == (930 + 50 - 3 + 4) * GIB
    assert node.cpus == (*range(56), *range(112, 168))
    assert node.huge_pages == {2 * MIB: 4096, GIB: 0}


def test_only_nvidia_display_devices_are_gpus(machine: Machine) -> None:
    topology = read_topology(machine("hgx-h200"))
    assert len(topology.gpus) == 8  # neither the NVSwitches nor the BMC's graphics
    assert [gpu.numa_node for gpu in topology.gpus] == [0] * 4 + [1] * 4
    assert read_topology(machine("laptop")).gpus == ()


def test_a_virtual_function_of_a_gpu_is_no_gpu(machine: Machine) -> None:
    root = machine("vm-h200")
    (root / "bus/pci/devices/0000:a7:00.0/physfn").mkdir()
    assert [gpu.bdf for gpu in read_topology(root).gpus] == ["0000:8d:00.0"]


def test_where_sysfs_says_minus_one_the_only_node_is_taken_and_said(machine: Machine) -> None:
    topology = read_topology(machine("vm-h200"))
    assert {(gpu.numa_node, gpu.source, gpu.note) for gpu in topology.gpus} == {(0, "only-node", "sysfs says -1")}
    assert topology.warnings == ()


def test_with_several_nodes_and_no_answer_the_node_stays_unknown(tmp_path: Path) -> None:
    description = machines.describe("hgx-h200")
    for device in description["pci"]:
        device["numa_node"] = -1
    description["pci"][0]["numa_node"] = None  # the file is absent
    topology = read_topology(machines.lay_out(description, tmp_path / "sys"))
    assert {gpu.numa_node for gpu in topology.gpus} == {None}
    assert "GPU 0000:19:00.0: no CPU node is known" in topology.warnings[0]


def test_memory_without_cpus_that_is_no_gpus_is_told_apart(tmp_path: Path) -> None:
    description = machines.describe("gb200-tray")
    description["generic_initiators"] = None  # an older kernel, or a CXL expander
    topology = read_topology(machines.lay_out(description, tmp_path / "sys"))
    assert topology.node(2).role == "no-cpus"  # type: ignore[union-attr]
    assert [node.id for node in topology.eligible()] == [0, 1]


def test_an_offline_node_is_no_pool_node(tmp_path: Path) -> None:
    description = machines.describe("hgx-h200")
    description["online"] = "0"
    topology = read_topology(machines.lay_out(description, tmp_path / "sys"))
    assert [node.role for node in topology.nodes] == ["pool", "offline"]
    assert [node.id for node in topology.eligible()] == [0]


def test_another_sysfs_root_lets_nothing_of_this_machine_in(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from egmctl.topology import gpus, limits, read

    def forbidden(*_: object) -> None:
        raise AssertionError("the machine at hand was asked")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    for module, name in ((read, "list_gpus"), (read, "allowed_nodes"), (read, "memory_headroom"), (gpus, "ask_cuda")):
        monkeypatch.setattr(module, name, forbidden)
    assert limits is not None
    topology = read_topology(machine("hgx-h200"))
    assert (topology.headroom, topology.hostname, len(topology.gpus)) == (None, "", 8)
    assert all(node.allowed for node in topology.nodes)


def test_a_folder_that_is_no_sysfs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no NUMA nodes") as caught:
        read_topology(tmp_path)
    assert str(tmp_path) in caught.value.where


@pytest.mark.parametrize("name", machines.NAMES)
def test_the_saved_topologies_are_those_of_the_trees(name: str, machine: Machine) -> None:
    fresh = read_topology(machine(name)).to_json() | {"origin": f"sysfs root {name}"}
    assert load_topology(machines.TOPOLOGIES / f"{name}.json").to_json() == fresh


def test_a_topology_survives_saving_and_loading(machine: Machine, tmp_path: Path) -> None:
    topology = read_topology(machine("gb200-tray"))
    save_topology(topology, tmp_path / "saved.json")
    assert load_topology(tmp_path / "saved.json") == topology
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["saved.json"]


def test_saving_where_nothing_can_be_written_says_so(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(FailedError, match="No such file or directory"):
        save_topology(read_topology(machine("laptop")), tmp_path / "missing" / "file.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "egmctl/topology/2"}, "schema 'egmctl/topology/2'"),
        ({"nodes": "x"}, "nodes is not a list"),
        ({"nodes": [1]}, "not a valid topology"),
        ({"headroom": -1}, "headroom = -1"),
        ({"gpus": [{"index": 0}]}, "'uuid' is missing"),
        ({"hostname": 5}, "hostname = 5"),
    ],
)
def test_a_saved_file_that_is_wrong_is_refused_with_the_field(
    change: dict[str, object], said: str, tmp_path: Path
) -> None:
    document = json.loads((machines.TOPOLOGIES / "laptop.json").read_text()) | change
    (tmp_path / "file.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=said):
        load_topology(tmp_path / "file.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"role": "spare"}, "role = 'spare'"),
        ({"cpus": ""}, "role pool, but not the CPUs"),
        ({"cpus": "3-1"}, "3-1"),
        ({"huge_pages": [1]}, "not a valid topology"),
        ({"memory_free": True}, "memory_free = True"),
    ],
)
def test_a_saved_node_that_is_wrong_is_refused(change: dict[str, object], said: str, tmp_path: Path) -> None:
    document = json.loads((machines.TOPOLOGIES / "laptop.json").read_text())
    document["nodes"][0].update(change)
    with pytest.raises(UsageError, match=said):
        Topology.from_json(document)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b" " * (5 << 20), b"1" * 5000])
def test_a_file_that_is_no_topology_is_refused_in_words(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(UsageError):
        load_topology(tmp_path / "file.json")


def test_the_fingerprint_is_nodes_cpus_and_gpus_and_no_memory_size(machine: Machine) -> None:
    from dataclasses import replace

    topology = read_topology(machine("gb200-tray"))
    assert topology.fingerprint() == (
        "node0=0-71 node1=72-143 gpu=0008:01:00.0@0 gpu=0009:01:00.0@0 gpu=0018:01:00.0@1 gpu=0019:01:00.0@1"
    )
    busy = replace(topology, headroom=1, nodes=tuple(replace(node, memory_free=1) for node in topology.nodes))
    assert busy.fingerprint() == topology.fingerprint()
    fewer = replace(topology, gpus=topology.gpus[1:])
    assert fewer.fingerprint() != topology.fingerprint()


@pytest.mark.parametrize("text", ["0008:01:00.0", "00000008:01:00.0", " 0008:01:00.0\n"])
def test_pci_addresses_are_rendered_one_way(text: str) -> None:
    assert str(Bdf.parse(text)) == "0008:01:00.0"


def test_pci_addresses_are_read_in_either_case() -> None:
    assert str(Bdf.parse("0000AB12:CD:1E.7")) == "ab12:cd:1e.7"
    assert str(Bdf.parse("00012345:00:1f.0")) == "12345:00:1f.0"  # behind a VMD bridge


@pytest.mark.parametrize(
    "text", ["", "01:00.0", "0008:01:00", "0008:01:20.0", "0008:01:00.8", "0x08:01:00.0", "٠٠٠٨:01:00.0"]
)
def test_what_is_no_pci_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a PCI address"):
        Bdf.parse(text)


@given(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7)))
def test_every_pci_address_is_read_as_it_is_written(parts: tuple[int, int, int, int]) -> None:
    bdf = Bdf(*parts)
    assert Bdf.parse(str(bdf)) == bdf == Bdf.parse(str(bdf).upper())


@given(st.sets(st.integers(0, 1000)))
def test_every_kernel_list_is_read_as_it_is_written(numbers: set[int]) -> None:
    assert parse_list(format_list(numbers)) == tuple(sorted(numbers))
