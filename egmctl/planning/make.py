"""From a spec and a topology to a plan: pure, and every refusal tells its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from egmctl.errors import PreflightError, UsageError
from egmctl.planning.addresses import is_loopback, parse_listen_address
from egmctl.planning.arithmetic import DESCRIPTOR_LIMIT, alignment_of, descriptor_bytes, shares
from egmctl.planning.capacity import check_capacity
from egmctl.planning.plan import Plan, PlanNode, cut_chunks
from egmctl.planning.spec import Spec, bounded_size, parse_node_list
from egmctl.topology.bdf import Bdf
from egmctl.topology.model import ROLES, Gpu, NumaNode, Topology
from egmctl.units import format_size

__all__ = ["assumed_granularity", "make_plan"]

# What HOST_NUMA memory is allocated in multiples of, as measured; a page of shm is 4 KiB or, on Grace, 64 KiB.
_GRANULARITY: Mapping[str, int] = {"cuda-fabric": 2 << 20, "cuda-posix": 2 << 20, "shm": 64 << 10}


def assumed_granularity(kind: str) -> Callable[[int], int]:
    """The granularity for planning without the memory at hand (another machine's topology): it divides the slab, as
    every one seen does. On the machine itself ask `ProviderMemory.granularity`."""
    return lambda _node: _GRANULARITY[kind]


def make_plan(
    spec: Spec,
    topology: Topology,
    *,
    gpus: Sequence[str] | None = None,
    numa: str | Sequence[int] | None = None,
    capacity: int | str | None = None,
    granularity: Callable[[int], int],
) -> Plan:
    """Resolve ``spec`` for the machine ``topology``.

    ``gpus`` (BDFs) restricts the choice to the nodes of these GPUs; ``numa`` ("auto", "0,1" or ids) and ``capacity``
    take the place of the spec's ``egm_numa_nodes`` and ``global_segment_size``; ``granularity(node)`` is the
    allocation granularity of the memory kind on a node, in bytes.

    Raises `UsageError` (exit 2) when the feature is off or an argument is malformed, `PreflightError` (exit 3) for
    what this machine cannot do.
    """
    pool = spec.pool
    if not pool.enable_egm_store_pool:
        raise UsageError(
            "the pool is off: enable_egm_store_pool is not true",
            where=spec.source or pool.name,
            hint="write enable_egm_store_pool = true under [pool] to turn it on",
        )
    if gpus and numa is not None:
        raise UsageError(
            "GPUs and NUMA nodes are both given", hint="use either --gpu or --numa: each decides about the nodes"
        )
    requested = pool.global_segment_size if capacity is None else bounded_size(capacity, "capacity")
    nodes, near, sources = _choose_nodes(spec, topology, gpus, _wish(pool.egm_numa_nodes, numa))
    huge = _huge_page_size(pool.huge_pages, nodes)
    unit = alignment_of([granularity(node.id) for node in nodes] + ([huge] if huge else []))
    count = requested // unit
    if count < len(nodes):
        raise PreflightError(
            f"{format_size(requested)} ({requested} bytes) is less than one unit of {format_size(unit)} for each of "
            f"{len(nodes)} node(s)",
            where=pool.name,
            hint=f"ask for at least {format_size(unit * len(nodes))}, or for fewer nodes",
            facts={"requested_bytes": requested, "alignment_bytes": unit, "nodes": [node.id for node in nodes]},
        )
    bound, which = min((pool.max_mr_size, "max_mr_size"), (pool.max_chunk_size, "max_chunk_size"))
    largest = bound // unit * unit
    if largest == 0:
        raise PreflightError(
            f"{which} = {bound} bytes is less than one unit of {format_size(unit)} ({unit} bytes)",
            where=pool.name,
            hint=f"set {which} to at least {format_size(unit)}",
            facts={which: bound, "alignment_bytes": unit},
        )
    share = shares(count, [node.id for node in nodes])
    plan_nodes = tuple(PlanNode(node.id, share[node.id] * unit, near.get(node.id, ())) for node in nodes)
    _check_descriptor(pool.name, spec.mooncake.protocol, plan_nodes, largest)
    chunks = cut_chunks(plan_nodes, largest)
    check_capacity(pool.name, topology, {n.numa_node: n.bytes for n in plan_nodes}, pool.local_buffer_size, huge)
    return Plan(
        pool=pool.name,
        memory_kind=pool.memory,
        requested_bytes=requested,
        effective_bytes=count * unit,
        alignment_bytes=unit,
        max_chunk_bytes=largest,
        largest_object_bytes=max(chunk.bytes for chunk in chunks),
        local_buffer_bytes=pool.local_buffer_size,
        huge_page_bytes=huge,
        nodes=plan_nodes,
        chunks=chunks,
        fingerprint=topology.fingerprint(),
        group=pool.group,
        lease_ttl=pool.lease_ttl,
        client_expiry=pool.client_expiry,
        mooncake=spec.mooncake,
        sources=tuple(sources),
        warnings=topology.warnings + _open_health(pool.health_addr),
        health_addr=pool.health_addr,
    )


def _open_health(address: str | None) -> tuple[str, ...]:
    if address is None or is_loopback(parse_listen_address(address, name="health_addr")[0]):
        return ()
    return (f"health_addr = {address!r} is open to other hosts: whoever reaches it learns the pool's state and sizes",)


def _wish(spec: str | tuple[int, ...], numa: str | Sequence[int] | None) -> str | tuple[int, ...]:
    if numa is None:
        return spec
    if isinstance(numa, str):
        return parse_node_list(numa, name="--numa")
    if not numa:
        raise UsageError("the list of NUMA nodes is empty", hint='write "auto" or node numbers, such as "0,1"')
    return tuple(sorted(set(numa)))


def _choose_nodes(
    spec: Spec, topology: Topology, gpus: Sequence[str] | None, wish: str | tuple[int, ...]
) -> tuple[list[NumaNode], dict[int, tuple[str, ...]], list[str]]:
    """(nodes ascending, BDFs of the GPUs next to each, why these nodes)."""
    chosen = _choose_gpus(topology, gpus)
    sources: list[str] = []
    if isinstance(wish, str):
        if chosen:
            ids = _nodes_of(chosen, sources)
        elif spec.pool.memory == "shm":
            ids = [node.id for node in topology.eligible()]
            sources.append("no visible GPU: every eligible node")
        else:
            raise PreflightError(
                f"egm_numa_nodes is auto, and no GPU is visible to say which nodes {spec.pool.memory} memory goes to",
                where=spec.pool.name,
                hint="look at `egmctl topology` and CUDA_VISIBLE_DEVICES, or list the nodes: egm_numa_nodes = "
                f'"{",".join(str(node.id) for node in topology.eligible()) or "0"}"',
                facts={"warnings": list(topology.warnings)},
            )
    else:
        ids = list(wish)
        sources.append("nodes listed explicitly")
        if gpus:
            outside = sorted(set(_nodes_of(chosen, sources)) - set(ids))
            if outside:
                raise UsageError(
                    f"the chosen GPUs are next to node(s) {_join(outside)}, which egm_numa_nodes = "
                    f'"{_join(ids)}" leaves out',
                    where=spec.pool.name,
                    hint='choose other GPUs, or write egm_numa_nodes = "auto"',
                )
            ids = _nodes_of(chosen, [])
    if not ids:
        raise PreflightError(
            f"no NUMA node can hold pool memory: {topology.describe_nodes()}",
            where=spec.pool.name,
            hint="a pool node is online, has CPUs and memory, and is allowed by the cpuset",
        )
    near = {number: tuple(gpu.bdf for gpu in chosen if gpu.numa_node == number) for number in ids}
    nodes = [_check_node(number, topology, spec.pool.name, () if wish != "auto" else near[number]) for number in ids]
    return nodes, near, sources


def _choose_gpus(topology: Topology, wanted: Sequence[str] | None) -> list[Gpu]:
    ordered = sorted(topology.gpus, key=lambda gpu: Bdf.parse(gpu.bdf))
    if not wanted:
        return ordered
    addresses = {str(Bdf.parse(text)) for text in wanted}
    missing = sorted(addresses - {gpu.bdf for gpu in ordered})
    if missing:
        known = ", ".join(gpu.bdf for gpu in ordered) or "none"
        raise PreflightError(
            f"no visible GPU at {', '.join(missing)}",
            where="--gpu",
            hint=f"visible GPUs: {known}",
            facts={"missing": missing, "visible": [gpu.bdf for gpu in ordered]},
        )
    return [gpu for gpu in ordered if gpu.bdf in addresses]


def _nodes_of(gpus: Sequence[Gpu], sources: list[str]) -> list[int]:
    unknown = [gpu.bdf for gpu in gpus if gpu.numa_node is None]
    if unknown:
        raise PreflightError(
            f"no CPU node is known for GPU {', '.join(unknown)}: neither sysfs nor CUDA says",
            where="egm_numa_nodes",
            hint='list the nodes yourself, such as egm_numa_nodes = "0,1" (`egmctl topology` shows them)',
            facts={"gpus": unknown},
        )
    for gpu in gpus:
        note = f"; {gpu.note}" if gpu.note else ""
        sources.append(f"GPU {gpu.bdf} is next to node {gpu.numa_node} ({gpu.source}{note})")
    return sorted({gpu.numa_node for gpu in gpus if gpu.numa_node is not None})


def _check_node(number: int, topology: Topology, pool: str, because: Sequence[str]) -> NumaNode:
    """The node, if it can hold pool memory; ``because`` are the GPUs that led to it."""
    node = topology.node(number)
    if node is not None and node in topology.eligible():
        return node
    near = f", which GPU {', '.join(because)} is next to," if because else ""
    if node is None:
        message = f"NUMA node {number}{near} does not exist here; known: {topology.describe_nodes()}"
    else:
        role = "not-allowed" if node.role == "pool" else node.role
        message = (
            f"NUMA node {number}{near} cannot hold pool memory ({ROLES[role]}); known: {topology.describe_nodes()}"
        )
    eligible = _join([node.id for node in topology.eligible()])
    raise PreflightError(
        message,
        where=pool,
        hint=f"choose from node(s) {eligible}" if eligible else "no node of this machine can hold pool memory",
        facts={"numa_node": number, "nodes": {str(node.id): node.role for node in topology.nodes}},
    )


def _huge_page_size(wish: bool | int, nodes: Sequence[NumaNode]) -> int:
    """0, or the page size in bytes: the one asked for, else the smallest with free pages on every node."""
    if wish is False:
        return 0
    common = sorted(set.intersection(*(set(node.huge_pages) for node in nodes)))
    if wish is not True:
        if wish in common:
            return wish
        raise PreflightError(
            f"huge pages of {format_size(wish)} do not exist on node(s) {_join([node.id for node in nodes])}",
            where="huge_pages",
            hint=f"this machine has {', '.join(map(format_size, common)) or 'no huge pages'}",
            facts={"huge_page_bytes": wish, "known": common},
        )
    if not common:
        raise PreflightError(
            "this machine has no huge pages", where="huge_pages", hint="write huge_pages = false, or use another kernel"
        )
    reserved = [size for size in common if all(node.huge_pages[size] for node in nodes)]
    return (reserved or common)[0]


def _check_descriptor(pool: str, protocol: str, nodes: Sequence[PlanNode], largest: int) -> None:
    count = sum(-(-node.bytes // largest) for node in nodes)
    needed = descriptor_bytes(protocol, count)
    if needed > DESCRIPTOR_LIMIT:
        raise PreflightError(
            f"{count} chunks of at most {format_size(largest)} need a descriptor of up to {format_size(needed)}, and "
            f"readers refuse more than {format_size(DESCRIPTOR_LIMIT)}",
            where=pool,
            hint="raise max_mr_size and max_chunk_size, or make several pools",
            facts={"chunks": count, "descriptor_bytes": needed, "limit_bytes": DESCRIPTOR_LIMIT},
        )


def _join(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
