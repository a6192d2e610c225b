"""What a machine is, as data: NUMA nodes with their roles, GPUs with their nodes; saved and loaded as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from egmctl.errors import FailedError, UsageError
from egmctl.topology.bdf import Bdf
from egmctl.topology.lists import format_list, parse_list

__all__ = ["ROLES", "SCHEMA", "Gpu", "NumaNode", "Topology", "load_topology", "save_topology"]

SCHEMA = "egmctl/topology/1"
_FILE_LIMIT = 4 << 20

ROLES: Mapping[str, str] = {
    "pool": "a CPU node with memory: can hold pool memory",
    "gpu-memory": "a GPU's own memory (HBM), not CPU DRAM",
    "no-cpus": "memory without CPUs",
    "no-memory": "no memory",
    "offline": "offline",
    "not-allowed": "not allowed by this process's cpuset",
}


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node. ``memory_free`` counts what the kernel can reclaim; both memory figures are bytes.

    ``huge_pages`` maps a huge page size in bytes to the number of free pages of that size on this node.
    """

    id: int
    cpus: tuple[int, ...]
    memory_total: int
    memory_free: int
    allowed: bool = True
    role: str = "pool"
    huge_pages: Mapping[int, int] = field(default_factory=dict)

    @property
    def cpu_list(self) -> str:
        """``"0-71"``."""
        return format_list(self.cpus)


@dataclass(frozen=True)
class Gpu:
    """One visible GPU. ``numa_node`` is the CPU node nearest to it, never its own memory's node; None if unknown.

    ``source`` says who told the node: ``sysfs``, ``cuda`` (HOST_NUMA_ID), ``only-node`` (the machine has just one),
    ``none``. ``note`` tells what the others said.
    """

    index: int
    uuid: str
    name: str
    bdf: str
    numa_node: int | None
    source: str
    note: str = ""


@dataclass(frozen=True)
class Topology:
    """A machine at one moment. ``headroom`` is what the whole machine and this process's cgroups still allow, in
    bytes, None when not known; ``origin`` says where this was read from."""

    nodes: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...] = ()
    headroom: int | None = None
    hostname: str = ""
    origin: str = "this machine"
    warnings: tuple[str, ...] = ()

    def eligible(self) -> tuple[NumaNode, ...]:
        """The nodes that can hold pool memory: online, with CPUs and memory, allowed; ascending."""
        return tuple(node for node in self.nodes if node.role == "pool" and node.allowed)

    def node(self, number: int) -> NumaNode | None:
        return next((node for node in self.nodes if node.id == number), None)

    def fingerprint(self) -> str:
        """What a plan depends on, in words of the form ``node0=0-71`` and ``gpu=0008:01:00.0@0``.

        Memory sizes are no part of it: they change from minute to minute. Readable rather than a digest, so that a
        stale plan can say what changed.
        """
        words = [f"node{node.id}={node.cpu_list}" for node in self.eligible()]
        for gpu in sorted(self.gpus, key=lambda gpu: Bdf.parse(gpu.bdf)):
            words.append(f"gpu={gpu.bdf}@{'?' if gpu.numa_node is None else gpu.numa_node}")
        return " ".join(words)

    def describe_nodes(self) -> str:
        """``"0 (pool), 2 (gpu-memory)"``: for messages."""
        return ", ".join(f"{node.id} ({node.role})" for node in self.nodes) or "none"

    def to_json(self) -> dict[str, Any]:
        """The document ``egmctl/topology/1``."""
        return {
            "schema": SCHEMA,
            "hostname": self.hostname,
            "origin": self.origin,
            "headroom": self.headroom,
            "nodes": [
                {
                    "id": node.id,
                    "cpus": node.cpu_list,
                    "memory_total": node.memory_total,
                    "memory_free": node.memory_free,
                    "allowed": node.allowed,
                    "role": node.role,
                    "huge_pages": {str(size): free for size, free in sorted(node.huge_pages.items())},
                }
                for node in self.nodes
            ],
            "gpus": [
                {
                    "index": gpu.index,
                    "uuid": gpu.uuid,
                    "name": gpu.name,
                    "bdf": gpu.bdf,
                    "numa_node": gpu.numa_node,
                    "source": gpu.source,
                    "note": gpu.note,
                }
                for gpu in self.gpus
            ],
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_json(cls, document: object, *, where: str = "topology") -> Topology:
        """From the document; raises `UsageError` naming the field that is wrong."""
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            found = document.get("schema") if isinstance(document, dict) else type(document).__name__
            raise UsageError(
                f"not a saved topology: schema {found!r}, expected {SCHEMA!r}",
                where=where,
                hint="make one with `egmctl topology --save FILE` of this version",
            )
        try:
            return cls._from_document(document)
        except (AttributeError, KeyError, TypeError, ValueError, UsageError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise UsageError(
                f"not a valid topology: {what}", where=where, hint="save it again with `egmctl topology --save FILE`"
            ) from error

    @classmethod
    def _from_document(cls, document: dict[str, Any]) -> Topology:
        nodes = tuple(
            NumaNode(
                id=_count(node["id"], "id"),
                cpus=parse_list(_text(node["cpus"], "cpus")),
                memory_total=_count(node["memory_total"], "memory_total"),
                memory_free=_count(node["memory_free"], "memory_free"),
                allowed=_flag(node["allowed"], "allowed"),
                role=_role(node["role"]),
                huge_pages={
                    _count(int(size), "huge_pages"): _count(free, "huge_pages")
                    for size, free in node["huge_pages"].items()
                },
            )
            for node in _list(document["nodes"], "nodes")
        )
        identifiers = [node.id for node in nodes]
        if identifiers != sorted(set(identifiers)):
            raise ValueError("nodes are not in ascending order, or one is there twice")
        for node in nodes:
            if node.role == "pool" and not (node.cpus and node.memory_total and node.allowed):
                raise ValueError(f"node {node.id} has the role pool, but not the CPUs, memory and permission for it")
        gpus = tuple(
            Gpu(
                index=_count(gpu["index"], "index"),
                uuid=_text(gpu["uuid"], "uuid"),
                name=_text(gpu["name"], "name"),
                bdf=str(Bdf.parse(_text(gpu["bdf"], "bdf"))),
                numa_node=None if gpu["numa_node"] is None else _count(gpu["numa_node"], "numa_node"),
                source=_text(gpu["source"], "source"),
                note=_text(gpu["note"], "note"),
            )
            for gpu in _list(document["gpus"], "gpus")
        )
        headroom = document["headroom"]
        return cls(
            nodes=nodes,
            gpus=gpus,
            headroom=None if headroom is None else _count(headroom, "headroom"),
            hostname=_text(document["hostname"], "hostname"),
            origin=_text(document["origin"], "origin"),
            warnings=tuple(_text(line, "warnings") for line in _list(document["warnings"], "warnings")),
        )


def _count(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{name} = {value!r} is not a non-negative integer")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} = {value!r} is not a string")
    return value


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r} is not true or false")
    return value


def _role(value: object) -> str:
    if not isinstance(value, str) or value not in ROLES:
        raise ValueError(f"role = {value!r} is none of {', '.join(ROLES)}")
    return value


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > 4096:
        raise ValueError(f"{name} is not a list of at most 4096")
    return value


def save_topology(topology: Topology, path: Path | str) -> None:
    """Write the document: whole or not at all. Raises `FailedError` when the file cannot be written."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(topology.to_json(), file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise FailedError(
            f"cannot save the topology: {error.strerror or error}", where=str(target), hint="give another file"
        ) from error


def load_topology(path: Path | str) -> Topology:
    """Read what `save_topology` wrote. Raises `UsageError`."""
    where = str(path)
    try:
        with Path(path).open("rb") as file:
            content = file.read(_FILE_LIMIT + 1)
        if len(content) > _FILE_LIMIT:
            raise UsageError(f"larger than {_FILE_LIMIT} bytes, so not a saved topology", where=where)
        document = json.loads(content)
    except OSError as error:
        raise UsageError(
            f"cannot read the topology: {error.strerror or error}",
            where=where,
            hint="save one with `egmctl topology --save FILE`",
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"not JSON: {error}", where=where, hint="save one with `egmctl topology --save FILE`"
        ) from error
    return Topology.from_json(document, where=where)
