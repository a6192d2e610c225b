"""Whether a machine has the memory, and whether a plan made earlier still fits it."""

from __future__ import annotations

from collections.abc import Mapping

from egmctl.errors import PreflightError, StalePlanError
from egmctl.planning.plan import Plan
from egmctl.topology.model import NumaNode, Topology
from egmctl.units import format_size

__all__ = ["check_capacity", "check_plan_fits"]


def check_capacity(
    where: str, topology: Topology, wanted: Mapping[int, int], local_buffer: int = 0, huge_page: int = 0
) -> None:
    """Raises `PreflightError`, with the numbers, unless each node has ``wanted[node]`` bytes free and the machine and
    its cgroups have headroom for the whole; the provider's own ``local_buffer`` counts with the first node.

    Where only one node has memory, the headroom alone decides: it covers the same memory, and a VM's node totals can
    be wrong. Huge pages come out of what was reserved for them, so they count against the free ones of each node.
    """
    nodes = {node.id: node for node in topology.nodes}
    if huge_page:
        for number, nbytes in sorted(wanted.items()):
            _check_huge_pages(where, nodes[number], nbytes, huge_page)
        wanted = {min(wanted): 0}
    single = len([node for node in topology.nodes if node.memory_total and node.role != "offline"]) == 1
    first = min(wanted)
    if not (single and topology.headroom is not None):
        for number, share in sorted(wanted.items()):
            nbytes = share + (local_buffer if number == first else 0)
            free = nodes[number].memory_free
            if nbytes > free:
                raise PreflightError(
                    f"node {number} has {format_size(free)} ({free} bytes) free or reclaimable, and the pool needs "
                    f"{format_size(nbytes)} ({nbytes} bytes) there",
                    where=where,
                    hint="ask for less (global_segment_size, --capacity), use more nodes, or free memory on this node",
                    facts={"numa_node": number, "needed_bytes": nbytes, "free_bytes": free},
                )
    total = sum(wanted.values()) + local_buffer
    if topology.headroom is not None and total > topology.headroom:
        left = topology.headroom
        raise PreflightError(
            f"the machine and its cgroups leave {format_size(left)} ({left} bytes), and the pool needs "
            f"{format_size(total)} ({total} bytes)",
            where=where,
            hint="ask for less (global_segment_size, --capacity), free memory, or raise the cgroup's memory limit",
            facts={"needed_bytes": total, "headroom_bytes": left},
        )


def _check_huge_pages(where: str, node: NumaNode, nbytes: int, size: int) -> None:
    free, needed = node.huge_pages.get(size, 0), -(-nbytes // size)
    if needed <= free:
        return
    file = f"/sys/devices/system/node/node{node.id}/hugepages/hugepages-{size // 1024}kB/nr_hugepages"
    raise PreflightError(
        f"node {node.id} has {free} free huge pages of {format_size(size)}, and the pool needs {needed}",
        where=where,
        hint=f"reserve {needed - free} more: echo $(($(cat {file}) + {needed - free})) | sudo tee {file}",
        facts={"numa_node": node.id, "huge_page_bytes": size, "needed_pages": needed, "free_pages": free},
    )


def check_plan_fits(plan: Plan, topology: Topology) -> None:
    """Raises `StalePlanError` (exit 6), naming what changed, when nodes, CPUs or GPUs are not those that the plan was
    made for; `PreflightError` (exit 3) when they are but the memory is no longer there.

    Call it before anything is allocated: what the plan itself already occupies would count against it.
    """
    now = topology.fingerprint()
    if now != plan.fingerprint:
        changes = _changes(plan.fingerprint, now)
        raise StalePlanError(
            f"the plan was made for another machine than this one is now: {'; '.join(changes)}",
            where=plan.pool,
            hint="make the plan again with `egmctl plan SPEC --out FILE`, here and in the same environment",
            facts={"changes": changes, "planned_for": plan.fingerprint, "found": now},
        )
    eligible = {node.id for node in topology.eligible()}
    gone = [node.numa_node for node in plan.nodes if node.numa_node not in eligible]
    if gone:
        raise StalePlanError(
            f"the plan uses node(s) {', '.join(map(str, gone))}, which cannot hold pool memory here: "
            f"{topology.describe_nodes()}",
            where=plan.pool,
            hint="make the plan again with `egmctl plan SPEC --out FILE`",
            facts={"nodes": gone},
        )
    check_capacity(
        plan.pool,
        topology,
        {node.numa_node: node.bytes for node in plan.nodes},
        plan.local_buffer_bytes,
        plan.huge_page_bytes,
    )


def _words(fingerprint: str) -> dict[str, str]:
    """``node0=0-71`` as {"node 0": "CPUs 0-71"}, ``gpu=BDF@0`` as {"GPU BDF": "next to node 0"}."""
    words = {}
    for word in fingerprint.split():
        name, _, value = word.partition("=")
        if name == "gpu":
            bdf, _, node = value.partition("@")
            words[f"GPU {bdf}"] = "next to no known node" if node == "?" else f"next to node {node}"
        else:
            words[name.replace("node", "node ")] = f"CPUs {value}"
    return words


def _changes(planned: str, found: str) -> list[str]:
    before, after = _words(planned), _words(found)
    changes = [f"{name} is gone" for name in before if name not in after]
    changes += [f"{name} is new" for name in after if name not in before]
    changes += [
        f"{name} had {before[name]}, now {after[name]}"
        if name.startswith("node")
        else f"{name} was {before[name]}, now {after[name]}"
        for name in before
        if name in after and before[name] != after[name]
    ]
    return changes or ["its record of the machine reads differently"]
