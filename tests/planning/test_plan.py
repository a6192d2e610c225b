from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from egmctl.errors import FailedError, PreflightError, StalePlanError, UsageError
from egmctl.planning import Plan, Spec, check_plan_fits, load_document, make_plan, save_plan
from egmctl.topology import Topology
from egmctl.units import GIB, MIB

Load = Callable[[str], Topology]


@pytest.fixture
def plan(spec: Callable[..., Spec], topology: Load) -> Plan:
    wish = spec(global_segment_size="100MiB", max_mr_size="32MiB", local_buffer_size="1MiB", group="kv")
    return make_plan(wish, topology("hgx-h200"), granularity=lambda _: 4096)


def test_the_document_has_what_other_tools_rely_on(plan: Plan) -> None:
    document = plan.to_json()
    assert document["schema"] == "egmctl/plan/1"
    assert (document["pool"], document["memory_kind"]) == ("p", "shm")
    assert (document["requested_bytes"], document["effective_bytes"]) == (100 * MIB, 96 * MIB)
    assert (document["alignment_bytes"], document["max_chunk_bytes"]) == (16 * MIB, 32 * MIB)
    assert document["nodes"][1] == {
        "numa_node": 1,
        "bytes": 48 * MIB,
        "gpus": ["0000:9b:00.0", "0000:ab:00.0", "0000:cb:00.0", "0000:db:00.0"],
    }
    assert document["chunks"][1] == {"index": 1, "numa_node": 0, "bytes": 16 * MIB}


def test_a_plan_survives_saving_and_loading(plan: Plan, tmp_path: Path) -> None:
    save_plan(plan, tmp_path / "plan.json")
    assert load_document(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    with pytest.raises(FailedError, match="cannot save the plan"):
        save_plan(plan, tmp_path / "none" / "plan.json")


def test_a_spec_and_a_plan_are_told_apart_by_what_they_hold(tmp_path: Path) -> None:
    dev = Path(__file__).parents[2] / "plans/dev-shm.toml"
    assert isinstance(load_document(dev), Spec)
    with pytest.raises(UsageError, match="cannot read it: No such file"):
        load_document(tmp_path / "none")
    with pytest.raises(UsageError, match="cannot read it: Is a directory"):
        load_document(tmp_path)


def edited(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(document)
    *folders, name = path.split(".")
    place: Any = document
    for folder in folders:
        place = place[int(folder)] if folder.isdigit() else place[folder]
    if value is None:
        del place[name]
    else:
        place[name] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("schema", "egmctl/plan/2", "schema 'egmctl/plan/2'"),
        ("requested_bytes", 200 * MIB, "effective_bytes"),
        ("effective_bytes", 80 * MIB, "effective_bytes"),
        ("effective_bytes", 0, "effective_bytes"),
        ("effective_bytes", -5, "out of range"),
        ("effective_bytes", "96MiB", "wrong type"),
        ("effective_bytes", True, "wrong type"),
        ("effective_bytes", None, "effective_bytes is missing"),
        ("alignment_bytes", 4096, "alignment_bytes"),
        ("alignment_bytes", 0, "alignment_bytes"),
        ("max_chunk_bytes", 33 * MIB, "max_chunk_bytes"),
        ("max_chunk_bytes", 16 * MIB, "the chunks are not"),
        ("max_chunk_bytes", 0, "max_chunk_bytes"),
        ("largest_object_bytes", 64 * MIB, "largest_object_bytes"),
        ("huge_page_bytes", 64 * MIB, "huge page"),
        ("nodes.0.bytes", 64 * MIB, "node 0 has 67108864 bytes, its even share"),
        ("nodes.0.numa_node", 1, "not in ascending order"),
        ("nodes.0.numa_node", 5, "not in ascending order"),
        ("nodes.0.gpus", ["gpu0"], "not a PCI address"),
        ("nodes.0.gpus", [5], "not a string"),
        ("nodes.0.more", 1, "unknown key 'more' in nodes"),
        ("nodes", [], "nodes are missing"),
        ("nodes", [5], "not an object"),
        ("chunks.0.bytes", 16 * MIB, "the chunks are not the nodes' shares"),
        ("chunks.0.numa_node", 1, "from chunk 0 on"),
        ("chunks.3.index", 7, "from chunk 3 on"),
        ("chunks", [], "the chunks are not"),
        ("memory_kind", "hbm", "memory_kind = 'hbm'"),
        ("memory_kind", "cuda-fabric", "protocol = 'tcp' does not go with"),
        ("pool", "../x", "not a pool name"),
        ("lease_ttl", 0, "lease_ttl"),
        ("mooncake.master_server_addr", "10.0.0.1:50051", "would connect to themselves"),
        ("mooncake.local_hostname", None, "local_hostname is missing"),
        ("mooncake.more", "x", "unknown key 'more'"),
        ("fingerprint", 5, "fingerprint has the wrong type"),
        ("group", 5, "group has the wrong type"),
        ("more", 1, "unknown key 'more' in the plan"),
    ],
)
def test_a_plan_edited_by_hand_is_refused(plan: Plan, path: str, value: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(edited(plan.to_json(), path, value)))
    with pytest.raises(UsageError) as caught:
        load_document(tmp_path / "plan.json")
    assert said in caught.value.message
    assert caught.value.where == str(tmp_path / "plan.json")
    assert "egmctl plan" in caught.value.hint


@pytest.mark.parametrize(
    "content", [b"{", b"{}", b'{"schema": []}', b'{"a":' * 50_000, b'{"a":' + b"1" * 5000 + b"}", b"{" * (5 << 20)]
)
def test_a_file_that_is_no_plan_is_refused_in_words(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(UsageError):
        load_document(tmp_path / "plan.json")


def test_a_plan_fits_the_machine_it_was_made_for(plan: Plan, topology: Load) -> None:
    check_plan_fits(plan, topology("hgx-h200"))


def stale(plan: Plan, topology: Topology) -> StalePlanError:
    with pytest.raises(StalePlanError) as caught:
        check_plan_fits(plan, topology)
    assert caught.value.exit_code == 6
    assert "egmctl plan" in caught.value.hint
    return caught.value


def test_a_gpu_that_is_gone_or_new_makes_a_plan_stale(plan: Plan, topology: Load) -> None:
    machine = topology("hgx-h200")
    error = stale(plan, replace(machine, gpus=machine.gpus[1:]))
    assert error.facts["changes"] == ["GPU 0000:19:00.0 is gone"]
    assert "GPU 0000:19:00.0 is gone" in error.message
    fewer = replace(plan, fingerprint=replace(machine, gpus=machine.gpus[:-1]).fingerprint())
    assert stale(fewer, machine).facts["changes"] == ["GPU 0000:db:00.0 is new"]


def test_a_gpu_at_another_node_makes_a_plan_stale(plan: Plan, topology: Load) -> None:
    machine = topology("hgx-h200")
    moved = replace(machine, gpus=(replace(machine.gpus[0], numa_node=1), *machine.gpus[1:]))
    assert stale(plan, moved).facts["changes"] == ["GPU 0000:19:00.0 was next to node 0, now next to node 1"]


def test_other_cpus_or_nodes_make_a_plan_stale(plan: Plan, topology: Load) -> None:
    machine = topology("hgx-h200")
    fewer = replace(machine, nodes=(replace(machine.nodes[0], cpus=(0, 1)), machine.nodes[1]))
    assert stale(plan, fewer).facts["changes"] == ["node 0 had CPUs 0-55,112-167, now CPUs 0-1"]
    forbidden = replace(machine, nodes=(machine.nodes[0], replace(machine.nodes[1], role="not-allowed", allowed=False)))
    assert "node 1 is gone" in stale(plan, forbidden).facts["changes"]
    stale(plan, topology("laptop"))


def test_another_amount_of_memory_does_not_unless_it_is_too_little(plan: Plan, topology: Load) -> None:
    machine = topology("hgx-h200")
    check_plan_fits(plan, replace(machine, headroom=GIB))
    with pytest.raises(PreflightError, match="cgroups leave") as caught:
        check_plan_fits(plan, replace(machine, headroom=97 * MIB - 1))
    assert caught.value.facts["needed_bytes"] == 97 * MIB
    full = replace(machine, nodes=(machine.nodes[0], replace(machine.nodes[1], memory_free=48 * MIB - 1)))
    with pytest.raises(PreflightError, match="node 1 has"):
        check_plan_fits(plan, full)


def test_a_plan_with_a_forged_fingerprint_still_needs_its_nodes(plan: Plan, topology: Load) -> None:
    laptop = topology("laptop")
    error = stale(replace(plan, fingerprint=laptop.fingerprint()), laptop)
    assert "uses node(s) 1" in error.message
