from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egmctl.errors import EgmError, PreflightError, UsageError
from egmctl.planning import Plan, Spec, assumed_granularity, load_spec, make_plan, parse_spec
from egmctl.topology import Gpu, NumaNode, Topology, read_topology
from egmctl.units import GIB, MIB
from tests.fixtures import machines
from tests.planning.conftest import spec_table

PLANS = Path(__file__).parents[2] / "plans"
UNIT = 16 * MIB
Load = Callable[[str], Topology]
MakeSpec = Callable[..., Spec]


def page(_node: int) -> int:
    return 4096


def two_nodes(**change: Any) -> Topology:
    nodes = tuple(NumaNode(i, (2 * i, 2 * i + 1), 64 * GIB, 32 * GIB, huge_pages={2 * MIB: 512}) for i in (0, 1))
    return replace(Topology(nodes, headroom=60 * GIB), **change)


def test_the_known_answer(spec: MakeSpec) -> None:
    plan = make_plan(spec(global_segment_size=629_145_600, max_mr_size=9 * UNIT), two_nodes(), granularity=page)
    assert plan.effective_bytes == 620_756_992
    assert [(chunk.numa_node, chunk.bytes // UNIT) for chunk in plan.chunks] == [(0, 9), (0, 9), (0, 1), (1, 9), (1, 9)]
    assert [node.bytes for node in plan.nodes] == [19 * UNIT, 18 * UNIT]
    assert [chunk.index for chunk in plan.chunks] == [0, 1, 2, 3, 4]
    assert (plan.alignment_bytes, plan.max_chunk_bytes, plan.largest_object_bytes) == (UNIT, 9 * UNIT, 9 * UNIT)


@given(
    requested=st.integers(0, 40 * GIB) | st.integers(8 * GIB, 40 * GIB),
    largest=st.integers(0, 4 * GIB) | st.just(4 * GIB),
    chunk=st.integers(UNIT, 4 * GIB),
    ids=st.sets(st.integers(0, 40), min_size=1, max_size=6),
    granularities=st.lists(st.sampled_from([4096, 65536, 2 * MIB, 32 * MIB, 48 * MIB]), min_size=41, max_size=41),
)
def test_every_plan_conserves_aligns_bounds_and_stays_on_its_nodes(
    requested: int, largest: int, chunk: int, ids: set[int], granularities: list[int]
) -> None:
    topology = Topology(tuple(NumaNode(i, (i,), 1 << 40, 1 << 39) for i in sorted(ids)))
    spec = parse_spec(
        spec_table(
            global_segment_size=requested,
            max_mr_size=largest,
            max_chunk_size=chunk,
            egm_numa_nodes=",".join(map(str, sorted(ids, reverse=True))),
        )
    )
    unit = math.lcm(UNIT, *(granularities[i] for i in ids))
    if requested // unit < len(ids) or min(largest, chunk) < unit:
        with pytest.raises(PreflightError, match="less than one unit"):
            make_plan(spec, topology, granularity=lambda node: granularities[node])
        return
    plan = make_plan(spec, topology, granularity=lambda node: granularities[node])
    assert plan.alignment_bytes == unit
    assert plan.effective_bytes == requested // unit * unit
    assert plan.effective_bytes == sum(node.bytes for node in plan.nodes) == sum(item.bytes for item in plan.chunks)
    assert plan.max_chunk_bytes == min(largest, chunk) // unit * unit
    assert [node.numa_node for node in plan.nodes] == sorted(ids)
    units = [node.bytes // unit for node in plan.nodes]
    assert units == sorted(units, reverse=True)
    assert max(units) - min(units) <= 1
    for item in plan.chunks:
        assert 0 < item.bytes <= plan.max_chunk_bytes
        assert item.bytes % unit == 0
    for node in plan.nodes:
        own = [item.bytes for item in plan.chunks if item.numa_node == node.numa_node]
        assert sum(own) == node.bytes
        assert all(size == plan.max_chunk_bytes for size in own[:-1])
    assert [item.numa_node for item in plan.chunks] == sorted(item.numa_node for item in plan.chunks)
    assert plan.largest_object_bytes == max(item.bytes for item in plan.chunks)
    assert make_plan(spec, topology, granularity=lambda node: granularities[node]) == plan
    assert Plan.from_json(plan.to_json()) == plan


def test_alignment_is_the_common_multiple_of_slab_and_every_nodes_granularity(spec: MakeSpec) -> None:
    plan = make_plan(spec(), two_nodes(), granularity=lambda node: [32 * MIB, 48 * MIB][node])
    assert plan.alignment_bytes == 96 * MIB


@pytest.mark.parametrize(
    ("name", "machine", "nodes", "chunks"),
    [
        ("dev-shm", "laptop", [0], 4),
        ("dev-shm", "vm-h200", [0], 4),
        ("hgx-h200", "hgx-h200", [0, 1], 64),
        ("gb200-nvl72", "gb200-tray", [0, 1], 40),
        ("gb300-nvl72", "gb300-tray", [0, 1], 40),
    ],
)
def test_every_spec_in_plans_resolves_on_its_machine(
    name: str, machine: str, nodes: list[int], chunks: int, topology: Load, tmp_path: Path
) -> None:
    spec = load_spec(PLANS / f"{name}.toml", environ={})
    granularity = assumed_granularity(spec.pool.memory)
    plan = make_plan(spec, topology(machine), granularity=granularity)
    assert [node.numa_node for node in plan.nodes] == nodes
    assert len(plan.chunks) == chunks
    assert plan.effective_bytes == spec.pool.global_segment_size
    tree = machines.lay_out(machines.describe(machine), tmp_path / "sys")
    assert make_plan(spec, read_topology(tree), granularity=granularity) == plan


def test_the_development_spec_resolves_on_the_machine_at_hand() -> None:
    plan = make_plan(load_spec(PLANS / "dev-shm.toml", environ={}), read_topology(environ={}), granularity=page)
    assert plan.effective_bytes == 256 * MIB


def test_a_plan_names_the_gpus_next_to_each_node_and_who_said_so(topology: Load) -> None:
    plan = make_plan(load_spec(PLANS / "gb200-nvl72.toml"), topology("gb200-tray"), granularity=page)
    assert plan.nodes[0].gpus == ("0008:01:00.0", "0009:01:00.0")
    assert plan.nodes[1].gpus == ("0018:01:00.0", "0019:01:00.0")
    assert "GPU 0018:01:00.0 is next to node 1 (sysfs)" in plan.sources
    assert plan.local_buffer_bytes == GIB
    assert plan.fingerprint == topology("gb200-tray").fingerprint()


def test_gpus_restrict_auto_to_their_nodes(topology: Load, spec: MakeSpec) -> None:
    plan = make_plan(spec(), topology("gb200-tray"), gpus=["00000018:01:00.0"], granularity=page)
    assert [(node.numa_node, node.gpus) for node in plan.nodes] == [(1, ("0018:01:00.0",))]


def test_gpus_restrict_a_list_and_may_not_lead_outside_of_it(topology: Load, spec: MakeSpec) -> None:
    tray = topology("gb200-tray")
    plan = make_plan(spec(egm_numa_nodes="0,1"), tray, gpus=["0019:01:00.0"], granularity=page)
    assert [node.numa_node for node in plan.nodes] == [1]
    with pytest.raises(UsageError, match=r"next to node\(s\) 1, which egm_numa_nodes = \"0\" leaves out"):
        make_plan(spec(egm_numa_nodes="0"), tray, gpus=["0019:01:00.0"], granularity=page)


def test_numa_and_capacity_take_the_place_of_the_specs(spec: MakeSpec) -> None:
    plan = make_plan(spec(), two_nodes(), numa="1", capacity="48MiB", granularity=page)
    assert [(node.numa_node, node.bytes) for node in plan.nodes] == [(1, 48 * MIB)]
    assert plan.requested_bytes == 48 * MIB
    assert make_plan(spec(egm_numa_nodes="0"), two_nodes(), numa=[1], granularity=page).nodes[0].numa_node == 1
    assert len(make_plan(spec(egm_numa_nodes="0"), two_nodes(), numa="auto", granularity=page).nodes) == 2


def test_auto_without_a_gpu_is_every_eligible_node_for_shm_alone(spec: MakeSpec) -> None:
    assert [node.numa_node for node in make_plan(spec(), two_nodes(), granularity=page).nodes] == [0, 1]
    for kind in ("cuda-posix", "cuda-fabric"):
        with pytest.raises(PreflightError, match="no GPU is visible") as caught:
            make_plan(spec(memory=kind), two_nodes(), granularity=page)
        assert '"0,1"' in caught.value.hint


def test_auto_with_a_gpu_takes_its_node_alone_for_shm_too(spec: MakeSpec) -> None:
    machine = two_nodes(gpus=(Gpu(0, "", "x", "0001:00:00.0", 1, "cuda"),))
    assert [node.numa_node for node in make_plan(spec(), machine, granularity=page).nodes] == [1]


def refused(kind: type[EgmError], said: str, spec: Spec, topology: Topology, **more: Any) -> EgmError:
    with pytest.raises(kind) as caught:
        make_plan(spec, topology, granularity=more.pop("granularity", page), **more)
    assert said in str(caught.value)
    assert caught.value.hint
    return caught.value


def test_a_pool_that_is_off_is_not_planned(spec: MakeSpec) -> None:
    error = refused(UsageError, "the pool is off", spec(enable_egm_store_pool=False), two_nodes())
    assert error.exit_code == 2


def test_less_than_one_unit_a_node_is_refused_with_the_numbers(spec: MakeSpec) -> None:
    error = refused(PreflightError, "(33554431 bytes)", spec(global_segment_size=2 * UNIT - 1), two_nodes())
    assert "16 MiB for each of 2 node(s)" in error.message
    assert "at least 32 MiB" in error.hint
    assert make_plan(spec(global_segment_size=2 * UNIT), two_nodes(), granularity=page).chunks


@pytest.mark.parametrize("key", ["max_mr_size", "max_chunk_size"])
def test_a_maximum_below_one_unit_is_refused_with_its_name(key: str, spec: MakeSpec) -> None:
    refused(PreflightError, f"{key} = 16777215 bytes", spec(**{key: UNIT - 1}), two_nodes())


def test_an_unknown_node_names_the_known_ones_and_their_roles(topology: Load, spec: MakeSpec) -> None:
    error = refused(PreflightError, "NUMA node 77 does not exist", spec(), topology("gb200-tray"), numa="0,77")
    assert "0 (pool), 1 (pool), 2 (gpu-memory), 3 (no-memory)" in error.message
    assert error.hint == "choose from node(s) 0,1"
    assert error.exit_code == 3


@pytest.mark.parametrize(("node", "role"), [(10, "a GPU's own memory"), (3, "no memory")])
def test_a_node_without_cpus_or_memory_is_refused_with_its_role(
    node: int, role: str, topology: Load, spec: MakeSpec
) -> None:
    refused(PreflightError, role, spec(), topology("gb200-tray"), numa=[node])


def test_a_node_that_the_cpuset_forbids_is_refused(spec: MakeSpec) -> None:
    nodes = two_nodes().nodes
    machine = two_nodes(nodes=(replace(nodes[0], allowed=False, role="not-allowed"), nodes[1]))
    refused(PreflightError, "cpuset", spec(), machine, numa="0,1")
    with_gpu = replace(machine, gpus=(Gpu(0, "", "x", "0001:00:00.0", 0, "sysfs"),))
    refused(PreflightError, "which GPU 0001:00:00.0 is next to", spec(), with_gpu)


@pytest.mark.parametrize("text", ["1,,3", "-1", "+1", "1x"])
def test_a_bad_list_is_wrong_usage(text: str, spec: MakeSpec) -> None:
    assert refused(UsageError, "which is no node number", spec(), two_nodes(), numa=text).exit_code == 2


def test_gpus_without_a_known_node_ask_for_a_list(spec: MakeSpec) -> None:
    machine = two_nodes(gpus=(Gpu(0, "", "x", "0001:00:00.0", None, "none"),))
    error = refused(PreflightError, "no CPU node is known for GPU 0001:00:00.0", spec(), machine)
    assert "egm_numa_nodes" in error.hint
    assert make_plan(spec(), machine, numa="0", granularity=page).nodes[0].gpus == ()


def test_a_gpu_that_is_not_there_names_those_that_are(topology: Load, spec: MakeSpec) -> None:
    error = refused(
        PreflightError, "no visible GPU at 0001:01:00.0", spec(), topology("vm-h200"), gpus=["0001:01:00.0"]
    )
    assert "0000:8d:00.0, 0000:a7:00.0" in error.hint
    refused(UsageError, "is not a PCI address", spec(), topology("vm-h200"), gpus=["gpu0"])
    refused(UsageError, "both given", spec(), topology("vm-h200"), gpus=["0000:8d:00.0"], numa="0")


def test_more_than_a_nodes_free_memory_is_refused_with_the_numbers(spec: MakeSpec) -> None:
    nodes = two_nodes().nodes
    machine = two_nodes(nodes=(nodes[0], replace(nodes[1], memory_free=GIB - 1)))
    error = refused(PreflightError, "node 1 has", spec(global_segment_size=2 * GIB), machine)
    assert error.facts == {"numa_node": 1, "needed_bytes": GIB, "free_bytes": GIB - 1}
    assert str(GIB - 1) in error.message


def test_more_than_the_headroom_is_refused_with_the_numbers(spec: MakeSpec) -> None:
    error = refused(PreflightError, "cgroups leave", spec(), two_nodes(headroom=GIB - 1))
    assert error.facts == {"needed_bytes": GIB, "headroom_bytes": GIB - 1}
    assert make_plan(spec(), two_nodes(headroom=GIB), granularity=page)


def test_the_local_buffer_counts_as_well(spec: MakeSpec) -> None:
    refused(PreflightError, "cgroups leave", spec(local_buffer_size=1), two_nodes(headroom=GIB))
    nodes = two_nodes().nodes
    tight = two_nodes(nodes=(replace(nodes[0], memory_free=GIB // 2), nodes[1]))
    assert make_plan(spec(), tight, granularity=page)
    refused(PreflightError, "node 0 has", spec(local_buffer_size=1), tight)


def test_on_a_single_node_the_headroom_decides_since_node_totals_can_lie(spec: MakeSpec) -> None:
    lying = Topology((NumaNode(0, (0,), GIB, GIB // 2),), headroom=20 * GIB)
    assert make_plan(spec(global_segment_size=10 * GIB), lying, granularity=page).effective_bytes == 10 * GIB
    refused(PreflightError, "cgroups leave", spec(global_segment_size=21 * GIB), lying)
    refused(PreflightError, "node 0 has", spec(), replace(lying, headroom=None))


def test_a_gpus_own_memory_makes_it_no_single_node_machine(spec: MakeSpec) -> None:
    # MemAvailable of a Grace with one GPU covers the HBM too.
    machine = Topology(
        (NumaNode(0, (0,), 4 * GIB, GIB // 2), NumaNode(1, (), 96 * GIB, 90 * GIB, role="gpu-memory")),
        headroom=80 * GIB,
    )
    refused(PreflightError, "node 0 has", spec(), machine)


def test_huge_pages_must_be_reserved_and_the_file_is_named(spec: MakeSpec) -> None:
    error = refused(PreflightError, "512 free huge pages of 2 MiB, and the pool needs 1024", spec(
        huge_pages=True, global_segment_size=4 * GIB), two_nodes())  # fmt: skip
    assert "/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages" in error.hint
    assert "reserve 512 more" in error.hint


def test_huge_pages_set_the_alignment_and_leave_the_headroom_alone(spec: MakeSpec) -> None:
    huge = {2 * MIB: 0, 32 * MIB: 100}
    machine = two_nodes(headroom=0, nodes=tuple(replace(node, huge_pages=huge) for node in two_nodes().nodes))
    plan = make_plan(spec(huge_pages=True), machine, granularity=page)
    assert (plan.huge_page_bytes, plan.alignment_bytes) == (32 * MIB, 32 * MIB)
    refused(PreflightError, "0 free huge pages of 2 MiB", spec(huge_pages="2MiB"), machine)
    refused(PreflightError, "huge pages of 1 GiB do not exist", spec(huge_pages="1GiB"), machine)
    refused(PreflightError, "cgroups leave", spec(huge_pages=True, local_buffer_size=1), machine)


def test_a_machine_without_huge_pages_is_said(spec: MakeSpec) -> None:
    machine = two_nodes(nodes=tuple(replace(node, huge_pages={}) for node in two_nodes().nodes))
    refused(PreflightError, "has no huge pages", spec(huge_pages=True), machine)


@pytest.mark.parametrize(("memory", "fits"), [("cuda-fabric", 3000), ("shm", 5000)])
def test_a_descriptor_that_readers_would_refuse_is_refused(memory: str, fits: int, spec: MakeSpec) -> None:
    machine = Topology((NumaNode(0, (0,), 1 << 50, 1 << 49),))
    table = {"memory": memory, "egm_numa_nodes": "0", "max_mr_size": UNIT}
    assert len(make_plan(spec(**table, global_segment_size=fits * UNIT), machine, granularity=page).chunks) == fits
    error = refused(PreflightError, "6000 chunks", spec(**table, global_segment_size=6000 * UNIT), machine)
    assert error.facts["chunks"] == 6000


def test_an_absurd_capacity_is_refused_at_once(spec: MakeSpec) -> None:
    refused(PreflightError, "chunks", spec(global_segment_size=(1 << 63) - 1, max_mr_size=UNIT), two_nodes())
    refused(UsageError, "more than any machine", spec(), two_nodes(), capacity="99999999999TiB")


def test_a_machine_without_an_eligible_node_is_said(spec: MakeSpec) -> None:
    refused(PreflightError, "no NUMA node can hold pool memory: 2 (no-cpus)", spec(), Topology(
        (NumaNode(2, (), GIB, GIB, role="no-cpus"),)))  # fmt: skip
