"""The segment descriptor: what a provider publishes so that consumers find, import and address its memory.

Stock fields first, so that unmodified readers take it as one of their own; what is ours sits under ``"egm"``, which
they ignore. For ``nvlink`` a buffer's ``shm_name`` is its 64-byte fabric handle in upper-case hex; that is the only
place where a handle appears. Memory that is local only is never part of a descriptor: what is listed is published.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from egmctl.errors import FailedError, PreflightError

__all__ = [
    "FABRIC_HANDLE_BYTES",
    "MAX_DESCRIPTOR_BYTES",
    "Buffer",
    "DescriptorError",
    "EgmChunk",
    "EgmFields",
    "SegmentDescriptor",
    "nvlink_descriptor",
    "parse_descriptor",
    "tcp_descriptor",
]

MAX_DESCRIPTOR_BYTES = 1 << 20
"""Stock readers refuse a larger handshake message (the type byte and the final newline count)."""

FABRIC_HANDLE_BYTES = 64
EGM_VERSION = 1
_ADDRESS_END = 1 << 64
_MAX_TEXT = 4096
_MAX_CHUNKS = 1 << 20
_HEX_HANDLE = re.compile(r"[0-9A-Fa-f]{128}")


class DescriptorError(FailedError):
    """A descriptor that is malformed, too large or contradicts itself."""

    code = "descriptor"


@dataclass(frozen=True)
class Buffer:
    """A published range ``[addr, addr + length)`` of the provider; ``handle`` (64 bytes, nvlink) or empty."""

    name: str
    addr: int
    length: int
    handle: bytes = field(default=b"", repr=False)

    @property
    def end(self) -> int:
        return self.addr + self.length


@dataclass(frozen=True)
class EgmChunk:
    """A buffer as the chunk of a pool that it is."""

    index: int
    numa_node: int
    addr: int
    length: int


@dataclass(frozen=True)
class EgmFields:
    """What an egmctl consumer reads beyond the stock fields.

    ``nonce`` names the agent incarnation. ``exclusive`` says that the Master lists nothing under this endpoint but
    this incarnation's segments; before that a located address is ambiguous. ``socket`` is the agent's control socket,
    worth trying only where ``host_id`` is one's own.
    """

    pool: str
    nonce: str
    kind: str
    socket: str
    host_id: str
    exclusive: bool
    chunks: tuple[EgmChunk, ...] = ()
    version: int = EGM_VERSION

    def document(self) -> dict[str, Any]:
        """As JSON. ``chunks`` are runs, in the order of the buffers: (first index, count, node)."""
        runs: list[dict[str, int]] = []
        for chunk in self.chunks:
            last = runs[-1] if runs else None
            if last and last["index"] + last["count"] == chunk.index and last["numa_node"] == chunk.numa_node:
                last["count"] += 1
            else:
                runs.append({"index": chunk.index, "count": 1, "numa_node": chunk.numa_node})
        return {
            "version": self.version,
            "pool": self.pool,
            "nonce": self.nonce,
            "kind": self.kind,
            "socket": self.socket,
            "host_id": self.host_id,
            "exclusive": self.exclusive,
            "chunks": runs,
        }


@dataclass(frozen=True)
class SegmentDescriptor:
    """One endpoint's published memory. ``buffers`` are as listed; `covering` finds the one that holds a range."""

    name: str
    protocol: str
    buffers: tuple[Buffer, ...]
    data_host: str = ""
    data_port: int = 0
    proto_version: int = 1
    timestamp: str = ""
    egm: EgmFields | None = None
    _sorted: tuple[Buffer, ...] = field(init=False, repr=False, compare=False, default=())
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False, default=())
    _chunks: dict[int, EgmChunk] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Raises `DescriptorError` when two buffers overlap, one is outside 64-bit addresses, or the chunks of
        ``egm`` are not the buffers, one for one and in order."""
        ordered = tuple(sorted(self.buffers, key=lambda buffer: buffer.addr))
        end = 0
        for buffer in ordered:
            if buffer.addr < 0 or buffer.length <= 0 or buffer.end > _ADDRESS_END:
                raise _malformed(f"buffer {buffer.addr:#x}+{buffer.length:#x} is not a range of addresses", self.name)
            if buffer.addr < end:
                raise _malformed(f"the buffer at {buffer.addr:#x} overlaps the one before it", self.name)
            end = buffer.end
        object.__setattr__(self, "_sorted", ordered)
        object.__setattr__(self, "_starts", tuple(buffer.addr for buffer in ordered))
        if self.egm is not None:
            chunks = self.egm.chunks
            if [(chunk.addr, chunk.length) for chunk in chunks] != [(each.addr, each.length) for each in self.buffers]:
                raise _malformed("the chunks of egm are not the buffers, one for one and in order", self.name)
            object.__setattr__(self, "_chunks", {chunk.addr: chunk for chunk in chunks})

    def covering(self, address: int, nbytes: int) -> Buffer | None:
        """The buffer that holds all of ``[address, address + nbytes)``, or None; ranges never span buffers."""
        position = bisect_right(self._starts, address) - 1
        if position < 0 or nbytes < 0:
            return None
        buffer = self._sorted[position]
        return buffer if address < buffer.end and address + nbytes <= buffer.end else None

    def chunk_at(self, address: int, nbytes: int) -> EgmChunk | None:
        """The chunk of an egmctl pool that holds all of the range, or None."""
        buffer = self.covering(address, nbytes)
        return None if buffer is None else self._chunks.get(buffer.addr)

    def document(self) -> dict[str, Any]:
        """As JSON, handles included: for the wire, never for people."""
        buffers: list[dict[str, Any]] = []
        for buffer in self.buffers:
            entry: dict[str, Any] = {"name": buffer.name, "addr": buffer.addr, "length": buffer.length}
            if self.protocol == "nvlink":
                entry["shm_name"] = buffer.handle.hex().upper()
            buffers.append(entry)
        document: dict[str, Any] = {
            "name": self.name,
            "protocol": self.protocol,
            "tcp_data_port": self.data_port,
            "tcp_proto_version": self.proto_version,
            "timestamp": self.timestamp,
            "buffers": buffers,
        }
        if self.protocol == "tcp":
            document["tcp_data_host"] = self.data_host
            document["rdma_server_name"] = ""
        if self.egm is not None:
            document["egm"] = self.egm.document()
        return document

    def to_bytes(self) -> bytes:
        """As it travels, ending in a newline. Raises `PreflightError` over what stock readers take (1 MiB)."""
        data = json.dumps(self.document(), separators=(",", ":"), ensure_ascii=True).encode() + b"\n"
        if len(data) + 1 > MAX_DESCRIPTOR_BYTES:
            raise PreflightError(
                f"the descriptor of {len(self.buffers)} chunks takes {len(data)} bytes; "
                f"Mooncake's readers refuse more than {MAX_DESCRIPTOR_BYTES - 1}",
                where=self.name,
                hint="use larger chunks (max_chunk_size, max_mr_size) or a smaller pool",
                facts={"chunks": len(self.buffers), "bytes": len(data), "limit": MAX_DESCRIPTOR_BYTES - 1},
            )
        return data


def nvlink_descriptor(
    name: str, buffers: Sequence[tuple[int, int, int, bytes]], *, egm: EgmFields | None = None
) -> SegmentDescriptor:
    """For ``cuda-fabric``: ``buffers`` are (NUMA node, address, length, 64-byte fabric handle).

    Raises `DescriptorError` for a handle of another size: what cannot be imported is not published.
    """
    for node, address, _, handle in buffers:
        if len(handle) != FABRIC_HANDLE_BYTES:
            raise _malformed(
                f"the buffer at {address:#x} on NUMA node {node} has a handle of {len(handle)} bytes, "
                f"not {FABRIC_HANDLE_BYTES}",
                name,
            )
    return SegmentDescriptor(
        name=name,
        protocol="nvlink",
        buffers=tuple(Buffer(f"cpu:{node}", address, length, handle) for node, address, length, handle in buffers),
        timestamp=_now(),
        egm=egm,
    )


def tcp_descriptor(
    name: str,
    buffers: Sequence[tuple[int, int]],
    *,
    data_host: str,
    data_port: int,
    egm: EgmFields | None = None,
) -> SegmentDescriptor:
    """For the kinds that stock clients reach over TCP: ``buffers`` are (address, length).

    ``data_port`` is the Transfer Engine child's, at ``data_host``; protocol version 2 is what 0.3.13 and later speak.
    """
    if not 0 < data_port < 65536:
        raise _malformed(f"data port {data_port} is not a port", name)
    return SegmentDescriptor(
        name=name,
        protocol="tcp",
        buffers=tuple(Buffer(name, address, length) for address, length in buffers),
        data_host=data_host,
        data_port=data_port,
        proto_version=2,
        timestamp=_now(),
        egm=egm,
    )


def parse_descriptor(data: bytes, *, where: str = "") -> SegmentDescriptor:
    """A descriptor as some endpoint or metadata server gave it; ``where`` names that place in errors.

    Nothing in it is trusted: size, types, ranges and handles are checked, unknown fields are ignored. Raises
    `DescriptorError`. Buffers without a handle in an nvlink descriptor are left out, as stock readers do.
    """
    if len(data) > MAX_DESCRIPTOR_BYTES:
        raise _malformed(f"is larger than {MAX_DESCRIPTOR_BYTES} bytes", where)
    try:
        document = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _malformed("is not JSON", where) from error
    reader = _Reader(where)
    top = reader.mapping(document, "the document")
    protocol = reader.text(top, "protocol", "")
    nvlink = protocol == "nvlink"
    listed = [reader.buffer(entry, nvlink) for entry in reader.items(top.get("buffers", []), "buffers")]
    buffers = tuple(buffer for buffer in listed if buffer.handle or not nvlink)
    egm = top.get("egm")
    return SegmentDescriptor(
        name=reader.text(top, "name", ""),
        protocol=protocol,
        buffers=buffers,
        data_host=reader.text(top, "tcp_data_host", ""),
        data_port=reader.number(top, "tcp_data_port", 0, 65535),
        proto_version=reader.number(top, "tcp_proto_version", 1, 1 << 31),
        timestamp=reader.text(top, "timestamp", ""),
        egm=None if egm is None else reader.egm(egm, buffers),
    )


class _Reader:
    def __init__(self, where: str) -> None:
        self.where = where

    def mapping(self, value: Any, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _malformed(f"{name} is not an object", self.where)
        return value

    def items(self, value: Any, name: str) -> list[Any]:
        if not isinstance(value, list):
            raise _malformed(f"{name} is not a list", self.where)
        return value

    def text(self, source: dict[str, Any], name: str, default: str | None = None) -> str:
        value = source.get(name, default)
        if not isinstance(value, str) or len(value) > _MAX_TEXT or not _encodable(value):
            raise _malformed(f"{name} is not a string of at most {_MAX_TEXT} characters", self.where)
        return value

    def number(self, source: dict[str, Any], name: str, default: int | None, limit: int) -> int:
        value = source.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
            raise _malformed(f"{name} is not an integer between 0 and {limit}", self.where)
        return value

    def buffer(self, value: Any, nvlink: bool) -> Buffer:
        entry = self.mapping(value, "a buffer")
        handle = b""
        if nvlink:
            text = self.text(entry, "shm_name", "")
            if text and not _HEX_HANDLE.fullmatch(text):
                raise _malformed(f"a buffer's shm_name is not {FABRIC_HANDLE_BYTES} bytes in hex", self.where)
            handle = bytes.fromhex(text)
        address = self.number(entry, "addr", None, _ADDRESS_END - 1)
        length = self.number(entry, "length", None, _ADDRESS_END - 1)
        return Buffer(self.text(entry, "name", ""), address, length, handle)

    def egm(self, value: Any, buffers: tuple[Buffer, ...]) -> EgmFields | None:
        fields = self.mapping(value, "egm")
        version = self.number(fields, "version", None, 1 << 31)
        if version != EGM_VERSION:
            raise DescriptorError(
                f"was published by an egmctl that writes version {version} of its fields; this one reads {EGM_VERSION}",
                where=self.where,
                hint="use the same version of egmctl at both ends",
            )
        exclusive = fields.get("exclusive")
        if not isinstance(exclusive, bool):
            raise _malformed("egm.exclusive is not true or false", self.where)
        return EgmFields(
            version=version,
            pool=self.text(fields, "pool"),
            nonce=self.text(fields, "nonce"),
            kind=self.text(fields, "kind"),
            socket=self.text(fields, "socket"),
            host_id=self.text(fields, "host_id"),
            exclusive=exclusive,
            chunks=self.chunks(fields, buffers),
        )

    def chunks(self, fields: dict[str, Any], buffers: tuple[Buffer, ...]) -> tuple[EgmChunk, ...]:
        chunks: list[EgmChunk] = []
        for value in self.items(fields.get("chunks"), "egm.chunks"):
            run = self.mapping(value, "a run of egm.chunks")
            index = self.number(run, "index", None, _MAX_CHUNKS)
            node = self.number(run, "numa_node", None, 1 << 16)
            count = self.number(run, "count", None, len(buffers) - len(chunks))
            for offset in range(count):
                buffer = buffers[len(chunks)]
                chunks.append(EgmChunk(index + offset, node, buffer.addr, buffer.length))
        if len(chunks) != len(buffers) or len({chunk.index for chunk in chunks}) != len(chunks):
            raise _malformed(f"egm.chunks does not describe each of the {len(buffers)} buffers once", self.where)
        return tuple(chunks)


def _malformed(what: str, where: str) -> DescriptorError:
    return DescriptorError(
        f"segment descriptor: {what}", where=where, hint="see what answers at this endpoint, and which version it is"
    )


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _now() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
