"""Segment descriptors: what is written, what is believed, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egmctl.errors import PreflightError
from egmctl.mooncake.descriptor import (
    MAX_DESCRIPTOR_BYTES,
    Buffer,
    DescriptorError,
    EgmChunk,
    EgmFields,
    SegmentDescriptor,
    nvlink_descriptor,
    parse_descriptor,
    tcp_descriptor,
)
from tests.support.stock import StockEngine

BASE = 0x1000_0000_0000
MIB = 1 << 20
HANDLE = bytes(range(64))


def egm_for(*chunks: EgmChunk, **changes: Any) -> EgmFields:
    known: dict[str, Any] = {
        "pool": "dev",
        "nonce": "ab" * 16,
        "kind": "cuda-fabric",
        "socket": "/run/egmctl/x.sock",
        "host_id": "cd" * 16,
        "exclusive": True,
    }
    return EgmFields(**{**known, **changes}, chunks=chunks)


def three_chunks() -> tuple[EgmChunk, ...]:
    return tuple(EgmChunk(i, i // 2, BASE + i * 16 * MIB, 16 * MIB) for i in range(3))


def published(**changes: Any) -> SegmentDescriptor:
    chunks = three_chunks()
    return nvlink_descriptor(
        "10.0.0.1:7000",
        [(chunk.numa_node, chunk.addr, chunk.length, bytes([chunk.index]) * 64) for chunk in chunks],
        egm=egm_for(*chunks, **changes),
    )


def test_an_nvlink_descriptor_carries_its_handles_as_upper_case_hex_in_shm_name() -> None:
    descriptor = nvlink_descriptor("h:1", [(1, BASE, MIB, b"\xab" * 64)])
    document = json.loads(descriptor.to_bytes())
    assert document["buffers"] == [{"name": "cpu:1", "addr": BASE, "length": MIB, "shm_name": "AB" * 64}]
    assert (document["protocol"], document["tcp_data_port"], document["tcp_proto_version"]) == ("nvlink", 0, 1)
    assert document["name"] == "h:1"
    assert "egm" not in document


def test_a_tcp_descriptor_names_the_data_port_and_no_handle() -> None:
    document = json.loads(tcp_descriptor("h:1", [(BASE, MIB)], data_host="h", data_port=15001).to_bytes())
    assert document["buffers"] == [{"name": "h:1", "addr": BASE, "length": MIB}]
    assert (document["tcp_data_host"], document["tcp_data_port"], document["tcp_proto_version"]) == ("h", 15001, 2)


def test_what_is_written_is_read_back_whole() -> None:
    descriptor = published()
    assert parse_descriptor(descriptor.to_bytes()) == descriptor
    assert descriptor.to_bytes().endswith(b"\n")


def test_the_egm_fields_hold_no_handle() -> None:
    text = json.dumps(json.loads(published().to_bytes())["egm"])
    assert "02" * 64 not in text
    assert "shm_name" not in text


def test_a_handle_is_never_shown() -> None:
    descriptor = nvlink_descriptor("h:1", [(0, BASE, MIB, HANDLE)])
    for text in (repr(descriptor), str(descriptor), repr(descriptor.buffers[0])):
        assert HANDLE.hex() not in text.lower()
        assert "\\x01\\x02" not in text


def test_an_error_about_a_handle_does_not_show_it() -> None:
    data = published().to_bytes().replace(b"01" * 64, b"01" * 63 + b"zz")
    with pytest.raises(DescriptorError, match="shm_name") as caught:
        parse_descriptor(data)
    assert "0101" not in json.dumps(caught.value.document())


@pytest.mark.parametrize("size", [0, 63, 65])
def test_a_chunk_without_a_fabric_handle_is_not_published(size: int) -> None:
    with pytest.raises(DescriptorError, match="64"):
        nvlink_descriptor("h:1", [(0, BASE, MIB, bytes(size))])


def test_a_buffer_without_a_handle_is_left_out_as_stock_readers_do() -> None:
    document = json.loads(nvlink_descriptor("h:1", [(0, BASE, MIB, HANDLE), (0, BASE + MIB, MIB, HANDLE)]).to_bytes())
    document["buffers"][0]["shm_name"] = ""
    assert [buffer.addr for buffer in parse_descriptor(json.dumps(document).encode()).buffers] == [BASE + MIB]


def test_five_thousand_chunks_fit_and_more_than_a_reader_takes_are_refused() -> None:
    def of(count: int) -> SegmentDescriptor:
        chunks = tuple(EgmChunk(i, 2 * i // count, BASE + (i << 30), 1 << 30) for i in range(count))
        buffers = [(chunk.numa_node, chunk.addr, chunk.length, HANDLE) for chunk in chunks]
        return nvlink_descriptor("127.0.0.1:65000", buffers, egm=egm_for(*chunks))

    data = of(5000).to_bytes()
    assert len(data) + 1 <= MAX_DESCRIPTOR_BYTES
    found = parse_descriptor(data)
    assert (found.buffers, found.egm) == (of(5000).buffers, of(5000).egm)
    with pytest.raises(PreflightError, match="5500 chunks") as caught:
        of(5500).to_bytes()
    assert "max_chunk_size" in caught.value.hint


def test_the_covering_buffer_holds_the_whole_range_or_there_is_none() -> None:
    descriptor = SegmentDescriptor(
        "h:1", "tcp", (Buffer("b", 3000, 1000), Buffer("a", 1000, 1000), Buffer("last", (1 << 64) - 10, 10))
    )
    assert descriptor.covering(1000, 1000) == Buffer("a", 1000, 1000)
    assert descriptor.covering(1999, 1) == Buffer("a", 1000, 1000)
    assert descriptor.covering(3500, 500) == Buffer("b", 3000, 1000)
    assert descriptor.covering((1 << 64) - 1, 1) == Buffer("last", (1 << 64) - 10, 10)
    for address, nbytes in ((999, 1), (999, 1000), (1999, 2), (2000, 1), (2000, 0), (4000, 0), (3000, 1001), (0, 0)):
        assert descriptor.covering(address, nbytes) is None
    assert descriptor.covering(1500, -1) is None


@given(
    starts=st.lists(st.integers(0, 400), max_size=12, unique=True),
    address=st.integers(0, 500),
    nbytes=st.integers(0, 60),
)
def test_covering_agrees_with_looking_at_every_buffer(starts: list[int], address: int, nbytes: int) -> None:
    ordered = sorted(starts)
    ends = [*ordered[1:], 1000][: len(ordered)]
    lengths = {start: min(end - start, 25) for start, end in zip(ordered, ends, strict=True)}
    descriptor = SegmentDescriptor("h:1", "tcp", tuple(Buffer("", start, lengths[start]) for start in starts))
    slow = [b for b in descriptor.buffers if b.addr <= address < b.end and address + nbytes <= b.end]
    assert descriptor.covering(address, nbytes) == (slow[0] if slow else None)


def test_a_range_leads_to_its_chunk() -> None:
    descriptor = published()
    assert descriptor.chunk_at(BASE + 33 * MIB, MIB) == three_chunks()[2]
    assert descriptor.chunk_at(BASE + 15 * MIB, 2 * MIB) is None
    assert tcp_descriptor("h:1", [(BASE, MIB)], data_host="h", data_port=1).chunk_at(BASE, 1) is None


def test_chunks_that_are_not_the_buffers_are_refused() -> None:
    with pytest.raises(DescriptorError, match="one for one"):
        tcp_descriptor("h:1", [(BASE, MIB)], data_host="h", data_port=1, egm=egm_for(EgmChunk(0, 0, BASE, 2 * MIB)))


def test_overlapping_ranges_are_refused_whichever_way_round() -> None:
    for ranges in ([(1000, 100), (1099, 5)], [(1099, 5), (1000, 100)], [(1000, 1), (1000, 1)]):
        with pytest.raises(DescriptorError, match="overlaps"):
            tcp_descriptor("h:1", ranges, data_host="h", data_port=1)


STOCK = {"buffers": [{"addr": BASE, "length": MIB, "name": "n"}], "name": "n", "protocol": "tcp", "tcp_data_port": 1}


def test_a_stock_descriptor_with_fields_nobody_knows_is_read() -> None:
    found = parse_descriptor(json.dumps({**STOCK, "rdma_server_name": "", "new": {"x": [1]}}).encode())
    assert (found.name, found.data_port, found.egm) == ("n", 1, None)
    assert found.buffers == (Buffer("n", BASE, MIB),)


def test_a_descriptor_with_nothing_but_buffers_is_read() -> None:
    found = parse_descriptor(json.dumps({"protocol": "nvlink", "buffers": []}).encode())
    assert found.buffers == ()


@pytest.mark.parametrize(
    "change",
    [
        {"name": 3},
        {"name": None},
        {"name": "\ud800"},
        {"name": "x" * 5000},
        {"protocol": []},
        {"buffers": {}},
        {"buffers": [3]},
        {"buffers": [{"addr": BASE}]},
        {"buffers": [{"addr": "1", "length": 1}]},
        {"buffers": [{"addr": True, "length": 1}]},
        {"buffers": [{"addr": 1.0, "length": 1}]},
        {"buffers": [{"addr": -1, "length": 1}]},
        {"buffers": [{"addr": 1, "length": 0}]},
        {"buffers": [{"addr": (1 << 64) - 1, "length": 2}]},
        {"buffers": [{"addr": 1 << 64, "length": 1}]},
        {"buffers": [{"addr": 1, "length": 5}, {"addr": 5, "length": 1}]},
        {"tcp_data_port": 65536},
        {"tcp_data_port": "1"},
        {"tcp_proto_version": -1},
        {"egm": 1},
        {"egm": {}},
    ],
    ids=repr,
)
def test_a_malformed_descriptor_is_one_clear_error(change: dict[str, Any]) -> None:
    data = json.dumps({**STOCK, **change}).encode()
    with pytest.raises(DescriptorError) as caught:
        parse_descriptor(data, where="10.0.0.9:1")
    assert caught.value.where
    assert caught.value.hint


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b'{"buffers": NaN}', b"[" * 200_000, b'{"a":' * 100_000],
    ids=lambda data: repr(data[:16]),
)
def test_what_is_no_json_object_is_one_clear_error(data: bytes) -> None:
    with pytest.raises(DescriptorError):
        parse_descriptor(data)


def test_a_number_of_a_million_digits_is_one_clear_error() -> None:
    with pytest.raises(DescriptorError):
        parse_descriptor(b'{"tcp_data_port":' + b"9" * 1_000_000 + b"}")


def test_more_than_a_mebibyte_is_not_even_looked_at() -> None:
    with pytest.raises(DescriptorError, match="larger"):
        parse_descriptor(b"{}" + b" " * MAX_DESCRIPTOR_BYTES)


@pytest.mark.parametrize(
    "change",
    [
        {"version": "1"},
        {"pool": 1},
        {"nonce": None},
        {"exclusive": 1},
        {"exclusive": None},
        {"chunks": None},
        {"chunks": []},
        {"chunks": [{"index": 0, "count": 4, "numa_node": 0}]},
        {"chunks": [{"index": 0, "count": 1 << 40, "numa_node": 0}]},
        {"chunks": [{"index": 0, "count": 3, "numa_node": -1}]},
        {"chunks": [{"index": 0, "count": 2, "numa_node": 0}, {"index": 0, "count": 1, "numa_node": 0}]},
        {"chunks": [7]},
    ],
    ids=repr,
)
def test_malformed_fields_of_ours_are_one_clear_error(change: dict[str, Any]) -> None:
    document = json.loads(published().to_bytes())
    document["egm"] |= change
    with pytest.raises(DescriptorError):
        parse_descriptor(json.dumps(document).encode())


def test_fields_of_another_version_say_so() -> None:
    document = json.loads(published().to_bytes())
    document["egm"]["version"] = 2
    with pytest.raises(DescriptorError, match="version 2"):
        parse_descriptor(json.dumps(document).encode())


@settings(max_examples=300)
@given(st.data())
def test_damage_anywhere_is_read_or_refused_but_never_anything_else(data: st.DataObject) -> None:
    whole = bytearray(published().to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        parse_descriptor(bytes(whole))
    except DescriptorError:
        pass


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["name", "protocol", "buffers", "tcp_data_port", "egm", "tcp_data_host", "timestamp"])


@given(st.dictionaries(names, json_values))
def test_any_json_object_is_read_or_refused_but_never_anything_else(document: dict[str, Any]) -> None:
    try:
        parse_descriptor(json.dumps(document).encode())
    except DescriptorError:
        pass


def test_our_parser_reads_a_stock_engines_own_descriptor() -> None:
    from egmctl.mooncake.handshake import fetch_descriptor

    with StockEngine(nbytes=4096) as engine:
        found = fetch_descriptor(f"127.0.0.1:{engine.port()}")
        assert found.protocol == "tcp"
        assert found.proto_version == 2
        assert found.covering(engine.buffer(), 4096) is not None
        assert found.data_port > 0
