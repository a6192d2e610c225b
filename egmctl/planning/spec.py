"""The spec a person writes: TOML with the tables ``[pool]`` and ``[mooncake]``, checked key by key."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from egmctl.errors import UsageError
from egmctl.memory.base import MemoryKind
from egmctl.planning.addresses import (
    check_pairing,
    parse_endpoint,
    parse_listen_address,
    parse_local_hostname,
    parse_metadata_server,
)
from egmctl.units import GIB, TIB, parse_size

__all__ = ["MooncakeSpec", "PoolSpec", "Spec", "load_spec", "parse_mooncake", "parse_node_list", "parse_spec"]

KINDS: tuple[MemoryKind, ...] = ("cuda-fabric", "cuda-posix", "shm")
PROTOCOLS: Mapping[str, str] = {"cuda-fabric": "nvlink", "cuda-posix": "tcp", "shm": "tcp"}
DEFAULT_MAX_MR_SIZE = TIB  # what Mooncake's Transfer Engine takes for MC_MAX_MR_SIZE unset
DEFAULT_MAX_CHUNK_SIZE = 16 * GIB  # one allocation is one uninterruptible driver call of about four seconds
_SPEC_LIMIT = 1 << 20
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
_GROUP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}\$?", re.ASCII)
_NODE = re.compile(r"[0-9]{1,5}", re.ASCII)


@dataclass(frozen=True)
class PoolSpec:
    """``[pool]``. Sizes in bytes, times in seconds. ``egm_numa_nodes`` is ``"auto"`` or ascending node ids;
    ``huge_pages`` False, True (the smallest size the nodes have) or a page size in bytes; ``health_addr`` where the
    agent answers ``/healthz``, ``/readyz`` and ``/metrics`` over HTTP, None for nowhere."""

    name: str
    memory: MemoryKind
    global_segment_size: int
    enable_egm_store_pool: bool = False
    egm_numa_nodes: str | tuple[int, ...] = "auto"
    local_buffer_size: int = 0
    max_mr_size: int = DEFAULT_MAX_MR_SIZE
    max_chunk_size: int = DEFAULT_MAX_CHUNK_SIZE
    huge_pages: bool | int = False
    group: str | None = None
    lease_ttl: float = 10.0
    client_expiry: float = 40.0
    health_addr: str | None = None


@dataclass(frozen=True)
class MooncakeSpec:
    """``[mooncake]``: who this provider is to Mooncake, under Mooncake's own names."""

    protocol: str
    local_hostname: str
    master_server_addr: str
    metadata_server: str = "P2PHANDSHAKE"
    tenant_id: str = "default"
    master_admin_addr: str | None = None


@dataclass(frozen=True)
class Spec:
    """A whole spec. ``source`` names the file it came from."""

    pool: PoolSpec
    mooncake: MooncakeSpec
    source: str = ""


def parse_node_list(text: str, *, name: str = "egm_numa_nodes") -> str | tuple[int, ...]:
    """``"auto"``, or ``"0,1"`` as ascending ids without repetition. Raises `UsageError` naming the bad entry."""
    if text.strip() == "auto":
        return "auto"
    nodes = set()
    for part in text[:4096].split(","):
        if not _NODE.fullmatch(part.strip()):
            shown = f"the entry {part.strip()[:40]!r}" if part.strip() else "an empty entry"
            raise UsageError(
                f"{name} = {text[:80]!r} has {shown}, which is no node number",
                hint='write "auto" or node numbers with commas between them, such as "0,1"',
            )
        nodes.add(int(part))
    return tuple(sorted(nodes))


def load_spec(path: Path | str, *, environ: Mapping[str, str] | None = None) -> Spec:
    """Read a TOML spec. ``environ`` (the process's own unless given) may hold ``MC_MAX_MR_SIZE``.

    Raises `UsageError` for what cannot be read, is not TOML, or breaks a rule: with the file, the key and the remedy.
    """
    where = str(path)
    try:
        with Path(path).open("rb") as file:
            content = file.read(_SPEC_LIMIT + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read the spec: {error.strerror or error}", where=where, hint="plans/ has specs to start from"
        ) from error
    return spec_from_toml(content, where=where, environ=environ)


def spec_from_toml(content: bytes, *, where: str, environ: Mapping[str, str] | None = None) -> Spec:
    """The same for the content of a file."""
    if len(content) > _SPEC_LIMIT:
        raise UsageError(f"larger than {_SPEC_LIMIT} bytes, so not a spec", where=where)
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # pragma: no cover - the same parser under its older name
        import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]
    try:
        table = tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise UsageError(f"not TOML: {error}", where=where, hint="plans/dev-shm.toml shows the form") from error
    default = (os.environ if environ is None else environ).get("MC_MAX_MR_SIZE")
    try:
        return parse_spec(table, max_mr_size=default, source=where)
    except UsageError as error:
        if not error.where:
            error.where = where
        else:
            error.where = f"{where}: {error.where}"
        raise


def parse_spec(table: Mapping[str, Any], *, max_mr_size: int | str | None = None, source: str = "") -> Spec:
    """A spec from the parsed TOML; pure. ``max_mr_size`` is the default for a spec that names none
    (``MC_MAX_MR_SIZE``)."""
    _refuse_unknown(table, ("pool", "mooncake"), "table", "")
    pool_table, mooncake_table = _table(table, "pool"), _table(table, "mooncake")
    pool = _parse_pool(pool_table, max_mr_size)
    return Spec(pool, parse_mooncake(mooncake_table, pool.memory), source)


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = table.get(name)
    if value is None:
        raise UsageError(f"the table [{name}] is missing", hint="plans/dev-shm.toml shows the form")
    if not isinstance(value, dict):
        raise UsageError(f"{name} is not a table", hint=f"write [{name}] on a line of its own")
    return value


def _refuse_unknown(table: Mapping[str, Any], known: tuple[str, ...], what: str, where: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise UsageError(f"unknown {what} {key[:80]!r}", where=where, hint=hint)


class _Reader:
    """Takes typed values out of one table; every complaint names table and key."""

    def __init__(self, table: Mapping[str, Any], name: str) -> None:
        self._table = table
        self._name = name

    def has(self, key: str) -> bool:
        return key in self._table

    def _take(self, key: str, types: tuple[type, ...], wanted: str, default: Any) -> Any:
        if key not in self._table:
            if default is _REQUIRED:
                raise UsageError(f"{key} is missing", where=f"[{self._name}]", hint=f"add {key} = ... ({wanted})")
            return default
        value = self._table[key]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise UsageError(f"{key} = {value!r} is not {wanted}", where=f"[{self._name}]", hint=f"write {wanted}")
        return value

    def text(self, key: str, default: Any) -> str:
        value: str = self._take(key, (str,), "a string in quotes", default)
        if value is not None and (len(value) > 1024 or not value.isprintable()):
            raise UsageError(f"{key} is too long or holds control characters", where=f"[{self._name}]")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._take(key, (bool,), "true or false", default))

    def size(self, key: str, default: Any) -> int:
        value = self._take(key, (int, str), 'a size, such as "16GiB"', default)
        nbytes: int = self.checked(lambda: bounded_size(value, key))
        return nbytes

    def seconds(self, key: str, default: float) -> float:
        value = float(self._take(key, (int, float), "a number of seconds", default))
        if not 0 < value <= 86400:
            raise UsageError(f"{key} = {value:g} is not between 0 and 86400 seconds", where=f"[{self._name}]")
        return value

    def checked(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except UsageError as error:
            error.where = error.where or f"[{self._name}]"
            raise


_REQUIRED = object()


def _parse_pool(table: Mapping[str, Any], max_mr_size: int | str | None) -> PoolSpec:
    _refuse_unknown(table, tuple(PoolSpec.__dataclass_fields__), "key", "[pool]")
    read = _Reader(table, "pool")
    name = read.text("name", _REQUIRED)
    check_pool_name(name)
    memory = read.text("memory", _REQUIRED)
    if memory not in KINDS:
        near = difflib.get_close_matches(memory, KINDS, n=1)
        raise UsageError(
            f"memory = {memory!r} is no memory kind",
            where="[pool]",
            hint=f"did you mean {near[0]!r}?" if near else f"one of {', '.join(KINDS)}",
        )
    nodes_value = read.text("egm_numa_nodes", "auto")
    largest = read.size("max_mr_size", _REQUIRED) if read.has("max_mr_size") else default_max_mr_size(max_mr_size)
    return PoolSpec(
        name=name,
        memory=memory,
        enable_egm_store_pool=read.flag("enable_egm_store_pool", False),
        egm_numa_nodes=read.checked(lambda: parse_node_list(nodes_value)),
        global_segment_size=read.size("global_segment_size", _REQUIRED),
        local_buffer_size=read.size("local_buffer_size", 0),
        max_mr_size=largest,
        max_chunk_size=read.size("max_chunk_size", DEFAULT_MAX_CHUNK_SIZE),
        huge_pages=_huge_pages(table.get("huge_pages", False), memory),
        group=_group(read.text("group", None)),
        lease_ttl=read.seconds("lease_ttl", 10.0),
        client_expiry=read.seconds("client_expiry", 40.0),
        health_addr=_health_addr(read),
    )


def check_pool_name(name: str) -> None:
    """Raises `UsageError` unless ``name`` can be a pool's: it becomes a file name and part of segment names."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"name = {name[:80]!r} is not a pool name",
            where="[pool]",
            hint="1 to 63 of a-z, 0-9, dot, underscore and dash, the first one a letter or digit",
        )


def bounded_size(value: int | str, name: str) -> int:
    """`parse_size`, and no more than an address holds."""
    nbytes = parse_size(value, name=name)
    if nbytes >= 1 << 63:
        raise UsageError(f"{name} is more than any machine addresses", hint="sizes end below 8 EiB")
    return nbytes


def default_max_mr_size(value: int | str | None) -> int:
    """What ``MC_MAX_MR_SIZE`` says, or Mooncake's default."""
    if value is None or value == "":
        return DEFAULT_MAX_MR_SIZE
    try:
        return bounded_size(value, "MC_MAX_MR_SIZE")
    except UsageError as error:
        error.where = "environment"
        raise


def _huge_pages(value: object, memory: str) -> bool | int:
    if isinstance(value, bool):
        size: bool | int = value
    else:
        if not isinstance(value, (int, str)):
            raise UsageError(
                f"huge_pages = {value!r} is neither true, false nor a page size",
                where="[pool]",
                hint='write true, false, or a size such as "2MiB"',
            )
        size = parse_size(value, name="huge_pages")
        if size < 4096 or size & (size - 1):
            raise UsageError(
                f"huge_pages = {value!r} is not a page size", where="[pool]", hint='true, false, or such as "2MiB"'
            )
    if size is not False and memory != "shm":
        raise UsageError(
            f"huge_pages is for memory = 'shm': with {memory} the CUDA driver chooses the pages",
            where="[pool]",
            hint="remove huge_pages",
        )
    return size


def _group(value: str | None) -> str | None:
    if value is not None and not _GROUP.fullmatch(value):
        raise UsageError(f"group = {value[:40]!r} is not a group name", where="[pool]", hint="see /etc/group")
    return value


def _health_addr(read: _Reader) -> str | None:
    text = read.text("health_addr", None)
    if text is not None:
        read.checked(lambda: parse_listen_address(text, name="health_addr"))
    return text


def parse_mooncake(table: Mapping[str, Any], memory: MemoryKind) -> MooncakeSpec:
    """``[mooncake]``, with its addresses checked against each other and the protocol against the memory kind."""
    _refuse_unknown(table, tuple(MooncakeSpec.__dataclass_fields__), "key", "[mooncake]")
    read = _Reader(table, "mooncake")
    protocol = read.text("protocol", PROTOCOLS[memory])
    if protocol != PROTOCOLS[memory]:
        raise UsageError(
            f"protocol = {protocol!r} does not go with memory = {memory!r}",
            where="[mooncake]",
            hint=f"write protocol = {PROTOCOLS[memory]!r}, or leave it out",
        )
    hostname = read.text("local_hostname", _REQUIRED)
    master = read.text("master_server_addr", _REQUIRED)
    metadata = read.text("metadata_server", "P2PHANDSHAKE")
    admin = read.text("master_admin_addr", None)
    tenant = read.text("tenant_id", "default")
    if not tenant or len(tenant) > 255:
        raise UsageError("tenant_id is empty or longer than 255", where="[mooncake]", hint='the usual one is "default"')
    read.checked(lambda: parse_local_hostname(hostname))
    read.checked(lambda: parse_endpoint(master, name="master_server_addr"))
    read.checked(lambda: parse_metadata_server(metadata))
    if admin is not None:
        read.checked(lambda: parse_endpoint(admin, name="master_admin_addr"))
    read.checked(lambda: check_pairing(hostname, master))
    return MooncakeSpec(protocol, hostname, master, metadata, tenant, admin)
