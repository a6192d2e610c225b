"""A plan: what is to exist on one machine, to the byte. Saved as ``egmctl/plan/1`` and checked wholly when loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from egmctl.errors import FailedError, UsageError
from egmctl.memory.base import ChunkSpec, MemoryKind
from egmctl.planning.addresses import parse_listen_address
from egmctl.planning.arithmetic import SLAB, cut, shares
from egmctl.planning.spec import KINDS, MooncakeSpec, Spec, check_pool_name, parse_mooncake, spec_from_toml
from egmctl.topology.bdf import Bdf

__all__ = ["SCHEMA", "Plan", "PlanChunk", "PlanNode", "load_document", "save_plan"]

SCHEMA = "egmctl/plan/1"
_PLAN_LIMIT = 4 << 20


@dataclass(frozen=True)
class PlanNode:
    """What one NUMA node gives, and the visible GPUs next to it."""

    numa_node: int
    bytes: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanChunk:
    """One chunk: ``index`` counts over the whole pool, nodes in ascending order."""

    index: int
    numa_node: int
    bytes: int

    def spec(self) -> ChunkSpec:
        return ChunkSpec(self.index, self.numa_node, self.bytes)


@dataclass(frozen=True)
class Plan:
    """Everything `provision` needs; sizes in bytes, times in seconds. ``fingerprint`` is the topology's
    (`egmctl.topology.Topology.fingerprint`), ``huge_page_bytes`` 0 for ordinary pages, ``sources`` says why these
    nodes were chosen; ``health_addr`` as in the spec."""

    pool: str
    memory_kind: MemoryKind
    requested_bytes: int
    effective_bytes: int
    alignment_bytes: int
    max_chunk_bytes: int
    largest_object_bytes: int
    local_buffer_bytes: int
    huge_page_bytes: int
    nodes: tuple[PlanNode, ...]
    chunks: tuple[PlanChunk, ...]
    fingerprint: str
    group: str | None
    lease_ttl: float
    client_expiry: float
    mooncake: MooncakeSpec
    sources: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    health_addr: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The document ``egmctl/plan/1``."""
        document = asdict(self)
        for name in ("nodes", "chunks", "sources", "warnings"):
            document[name] = list(document[name])
        for node in document["nodes"]:
            node["gpus"] = list(node["gpus"])
        return {"schema": SCHEMA, **document}

    @classmethod
    def from_json(cls, document: object, *, where: str = "plan") -> Plan:
        """From the document. Everything that can be computed again is, and must agree: a plan edited by hand into
        something that `plan` would not write is refused (`UsageError`)."""
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            found = document.get("schema") if isinstance(document, dict) else type(document).__name__
            raise UsageError(
                f"not a plan: schema {found!r}, expected {SCHEMA!r}",
                where=where,
                hint="make one with `egmctl plan SPEC --out FILE` of this version",
            )
        try:
            plan = _from_document(document)
            _check_sums(plan)
        except _Wrong as wrong:
            raise UsageError(
                f"not a valid plan: {wrong}",
                where=where,
                hint="plans are not edited: change the spec and run `egmctl plan SPEC --out FILE` again",
            ) from None
        return plan


class _Wrong(Exception):
    """What is wrong with a document, before it is known where the document came from."""


def _field(document: Mapping[str, Any], name: str, kind: type, *more: type) -> Any:
    if name not in document:
        raise _Wrong(f"{name} is missing")
    value = document[name]
    if not isinstance(value, (kind, *more)) or (isinstance(value, bool) and kind is not bool):
        raise _Wrong(f"{name} has the wrong type ({type(value).__name__})")
    if isinstance(value, int) and not 0 <= value < 1 << 63:
        raise _Wrong(f"{name} = {value} is out of range")
    return value


def _exact(document: Mapping[str, Any], names: Mapping[str, Any], what: str, extra: str = "") -> None:
    for key in document:
        if key not in names and key != extra:
            raise _Wrong(f"unknown key {str(key)[:80]!r} in {what}")


def _texts(document: Mapping[str, Any], name: str) -> tuple[str, ...]:
    values = _field(document, name, list)
    if not all(isinstance(value, str) for value in values):
        raise _Wrong(f"{name} holds something that is not a string")
    return tuple(values)


def _tables(document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    values = _field(document, name, list)
    if not all(isinstance(value, dict) for value in values):
        raise _Wrong(f"{name} holds something that is not an object")
    return list(values)


def _seconds(document: Mapping[str, Any], name: str) -> float:
    value = float(_field(document, name, int, float))
    if not 0 < value <= 86400:
        raise _Wrong(f"{name} = {value:g} is not between 0 and 86400 seconds")
    return value


def _bdf(text: str) -> str:
    try:
        return str(Bdf.parse(text))
    except UsageError as error:
        raise _Wrong(error.message) from None


def _from_document(document: dict[str, Any]) -> Plan:
    _exact(document, Plan.__dataclass_fields__, "the plan", "schema")
    kind = _field(document, "memory_kind", str)
    if kind not in KINDS:
        raise _Wrong(f"memory_kind = {kind[:40]!r} is none of {', '.join(KINDS)}")
    mooncake_document = {key: value for key, value in _field(document, "mooncake", dict).items() if value is not None}
    name = _field(document, "pool", str)
    try:
        check_pool_name(name)
        mooncake = parse_mooncake(mooncake_document, kind)
    except UsageError as error:
        raise _Wrong(error.message) from None
    health = document.get("health_addr")
    if health is not None:
        try:
            parse_listen_address(_field(document, "health_addr", str), name="health_addr")
        except UsageError as error:
            raise _Wrong(error.message) from None
    nodes, chunks = _tables(document, "nodes"), _tables(document, "chunks")
    for node in nodes:
        _exact(node, PlanNode.__dataclass_fields__, "nodes")
    for chunk in chunks:
        _exact(chunk, PlanChunk.__dataclass_fields__, "chunks")
    group = document.get("group")
    return Plan(
        pool=name,
        memory_kind=kind,
        requested_bytes=_field(document, "requested_bytes", int),
        effective_bytes=_field(document, "effective_bytes", int),
        alignment_bytes=_field(document, "alignment_bytes", int),
        max_chunk_bytes=_field(document, "max_chunk_bytes", int),
        largest_object_bytes=_field(document, "largest_object_bytes", int),
        local_buffer_bytes=_field(document, "local_buffer_bytes", int),
        huge_page_bytes=_field(document, "huge_page_bytes", int),
        nodes=tuple(
            PlanNode(
                _field(node, "numa_node", int),
                _field(node, "bytes", int),
                tuple(_bdf(gpu) for gpu in _texts(node, "gpus")),
            )
            for node in nodes
        ),
        chunks=tuple(
            PlanChunk(_field(chunk, "index", int), _field(chunk, "numa_node", int), _field(chunk, "bytes", int))
            for chunk in chunks
        ),
        fingerprint=_field(document, "fingerprint", str),
        group=None if group is None else _field(document, "group", str),
        lease_ttl=_seconds(document, "lease_ttl"),
        client_expiry=_seconds(document, "client_expiry"),
        mooncake=mooncake,
        sources=_texts(document, "sources"),
        warnings=_texts(document, "warnings"),
        health_addr=health,
    )


def _check_sums(plan: Plan) -> None:
    unit = plan.alignment_bytes
    if unit == 0 or unit % SLAB or (plan.huge_page_bytes and unit % plan.huge_page_bytes):
        raise _Wrong(f"alignment_bytes = {unit} is no multiple of {SLAB} and of the huge page size")
    if plan.huge_page_bytes and plan.memory_kind != "shm":
        raise _Wrong(f"huge_page_bytes is for shm, not for {plan.memory_kind}")
    if plan.effective_bytes == 0 or plan.effective_bytes != plan.requested_bytes // unit * unit:
        raise _Wrong(
            f"effective_bytes = {plan.effective_bytes} is not requested_bytes = {plan.requested_bytes} rounded down "
            f"to {unit}"
        )
    if plan.max_chunk_bytes == 0 or plan.max_chunk_bytes % unit:
        raise _Wrong(f"max_chunk_bytes = {plan.max_chunk_bytes} is no multiple of alignment_bytes = {unit}")
    ids = [node.numa_node for node in plan.nodes]
    if not ids or ids != sorted(set(ids)):
        raise _Wrong("nodes are missing, not in ascending order, or one is there twice")
    expected = shares(plan.effective_bytes // unit, ids)
    for node in plan.nodes:
        if node.bytes != expected[node.numa_node] * unit or node.bytes == 0:
            raise _Wrong(
                f"node {node.numa_node} has {node.bytes} bytes, its even share of {plan.effective_bytes} is "
                f"{expected[node.numa_node] * unit}"
            )
    chunks = cut_chunks(plan.nodes, plan.max_chunk_bytes)
    if plan.chunks != chunks:
        index = next((i for i, (a, b) in enumerate(zip(plan.chunks, chunks, strict=False)) if a != b), len(chunks))
        raise _Wrong(f"the chunks are not the nodes' shares cut by max_chunk_bytes, from chunk {index} on")
    if plan.largest_object_bytes != max(chunk.bytes for chunk in chunks):
        raise _Wrong(f"largest_object_bytes = {plan.largest_object_bytes} is not the largest chunk")


def cut_chunks(nodes: tuple[PlanNode, ...], largest: int) -> tuple[PlanChunk, ...]:
    """Every node's share in chunks, numbered through."""
    sizes = [(node.numa_node, size) for node in nodes for size in cut(node.bytes, largest)]
    return tuple(PlanChunk(index, node, size) for index, (node, size) in enumerate(sizes))


def save_plan(plan: Plan, path: Path | str) -> None:
    """Write the document: whole or not at all. Raises `FailedError` when the file cannot be written."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(plan.to_json(), file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise FailedError(
            f"cannot save the plan: {error.strerror or error}", where=str(target), hint="give another file"
        ) from error


def load_document(path: Path | str, *, environ: Mapping[str, str] | None = None) -> Spec | Plan:
    """A TOML spec, or a JSON plan; told apart by the first character, since no TOML file starts with a brace.

    Raises `UsageError`.
    """
    where = str(path)
    try:
        with Path(path).open("rb") as file:
            content = file.read(_PLAN_LIMIT + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read it: {error.strerror or error}",
            where=where,
            hint="give a spec (plans/ has some to start from), or a plan saved with `egmctl plan --out FILE`",
        ) from error
    if not content.lstrip().startswith(b"{"):
        return spec_from_toml(content, where=where, environ=environ)
    if len(content) > _PLAN_LIMIT:
        raise UsageError(f"larger than {_PLAN_LIMIT} bytes, so not a plan", where=where)
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"not JSON: {error}", where=where, hint="make a plan with `egmctl plan SPEC --out FILE`"
        ) from error
    return Plan.from_json(document, where=where)
