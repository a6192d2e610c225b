"""Messages to and from the Master, against what a stock client and a real Master said to each other."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egmctl.mooncake import codec
from egmctl.mooncake.codec import CodecError, Failure, build, decode, read_frame, write_message
from egmctl.mooncake.decoder import decoder
from egmctl.mooncake.link import function_id
from egmctl.mooncake.literals import (
    Array,
    Expected,
    Map,
    Optional,
    Scalar,
    Sequence,
    Struct,
    Text,
    Type,
    Variant,
    Void,
    minimum_size,
    parse_literal,
)
from tests.support.reference_codec import Damaged, literal_of, reference_decode

FRAMES = [
    json.loads(line)
    for path in sorted((Path(__file__).parent / "frames").glob("*.jsonl"))
    for line in path.read_text().splitlines()
]
BODIES = sorted({bytes.fromhex(frame["body"]) for frame in FRAMES if frame["body"]})
KEYS = bytes.fromhex("fd84800c800cff")
CONFIG = (1, 0, 0, 0, None, False, [], "", [], False, 0, "", None)


def test_there_are_recorded_frames_to_compare_with() -> None:
    assert sum(bool(frame["body"]) for frame in FRAMES) == 84


@pytest.mark.parametrize("body", BODIES, ids=[f"{index}" for index in range(len(BODIES))])
def test_a_recorded_body_decodes_and_is_written_again_byte_for_byte(body: bytes) -> None:
    assert write_message(decode(body)) == body


def test_recorded_requests_of_the_older_client_are_built_byte_for_byte() -> None:
    bodies = {bytes.fromhex(f["body"]) for f in FRAMES if f["dir"] == "req" and f["body"]}
    plain = [body for body in bodies if decode(body).total_width is None]
    assert len(plain) > 10
    for body in plain:
        message = decode(body)
        assert build(message.literal, message.value) == body


def test_recorded_function_numbers_are_computed_from_their_names() -> None:
    named = {(frame["fn"], frame["fid"]) for frame in FRAMES if frame["dir"] == "req"}
    assert len(named) >= 13
    assert all(function_id(name) == number for name, number in named)
    assert function_id("BatchPutStart") == 1455298594
    assert function_id("QuerySegmentStatusById") == 1463800915


def test_a_location_is_read_from_a_message_with_compatible_tails() -> None:
    messages = map(decode, BODIES)
    message = next(m for m in messages if m.literal.startswith(b"\x87\xfd\x84") and m.total_width is not None)
    assert message.value == ([(1, (0, ((1100, 0x7F4F90000000, "tcp", "127.0.0.1:15221"),)), 3)], 10000, None)
    assert message.tail == b"\x00\x01\x07default"


@pytest.mark.parametrize(
    ("literal", "value", "body"),
    [
        (
            "fdfd04048989ff800c01800cff",
            ((1, 2), "k", 4, "default"),
            "8b227a1b04fdfd04048989ff800c01800cff0001000000000000000200000000000000016b040000000764656661756c74",
        ),
        (
            "fdfd04048989ff84800c8404fd0404040685040b84800c800c84800c0b06800c8584800cff800cff",
            ((1, 2), ["a", "b"], [1, 2], CONFIG, "default"),
            "a5c0705804fdfd04048989ff84800c8404fd0404040685040b84800c800c84800c0b06800c8584800cff800cff000100000000000000"
            "0200000000000000020161016202010000000000000002000000000000000100000000000000000000000000000000000000000000"
            "00000000000000000000000764656661756c74",
        ),
        (
            "fdfd04048989ff84fd800c8504ff01800cff",
            ((1, 2), [("a", None), ("b", 7)], 4, "default"),
            "c9a77ef504fdfd04048989ff84fd800c8504ff01800cff00010000000000000002000000000000000201610001620107000000000000"
            "00040000000764656661756c74",
        ),
        (
            "fd84800c800cff",
            (["a", "b"], "default"),
            "638df70004fd84800c800cff0002016101620764656661756c74",
        ),
    ],
    ids=["PutRevoke", "BatchPutStart", "BatchPutEnd", "BatchGetReplicaList"],
)
def test_a_whole_request_is_built_as_the_masters_accept_it(literal: str, value: Any, body: str) -> None:
    assert build(bytes.fromhex(literal), value).hex() == body


@pytest.mark.parametrize(
    ("count", "meta", "length"), [(255, 0x04, 1), (256, 0x0C, 2), (65535, 0x0C, 2), (65536, 0x14, 4), (70000, 0x14, 4)]
)
def test_all_lengths_are_as_wide_as_the_longest_needs(count: int, meta: int, length: int) -> None:
    body = build(KEYS, (["k"] * count, "default"))
    assert body[4] == meta
    payload = body[4 + 1 + len(KEYS) + 1 :]
    assert payload[: length + length + 1] == count.to_bytes(length, "little") + (1).to_bytes(length, "little") + b"k"
    assert payload.endswith((7).to_bytes(length, "little") + b"default")
    assert decode(body).value == (["k"] * count, "default")


def test_one_long_string_widens_the_lengths_as_well() -> None:
    body = build(KEYS, (["k" * (1 << 20)], "default"))
    assert body[4] == 0x14
    assert decode(body).value[0] == ["k" * (1 << 20)]


def test_lengths_wider_than_needed_are_read() -> None:
    payload, width = codec.encode(KEYS, (["a"], "t"), width=3)
    assert width == 3
    body = struct.pack("<IB", codec.type_hash(KEYS) | 1, 0x1C) + KEYS + b"\0" + payload
    assert decode(body).value == (["a"], "t")


@pytest.mark.parametrize(("width", "size"), [(1, 2), (2, 4), (3, 8)])
def test_a_total_length_of_any_width_bounds_payload_and_tail(width: int, size: int) -> None:
    message = codec.Message(KEYS, (["a"], "t"), 0, width, b"tail")
    body = write_message(message)
    assert body[4] == 0x04 | width
    assert int.from_bytes(body[5 : 5 + size], "little") == len(body)
    assert decode(body) == message
    assert decode(body + b"junk") == message


def test_the_short_form_without_a_literal_is_read_by_the_expected_one() -> None:
    literal = bytes.fromhex("870b01")
    body = struct.pack("<I", codec.type_hash(literal)) + b"\x01\x01"
    assert decode(body, literal).value is True
    with pytest.raises(CodecError):
        decode(body, KEYS)


def test_keys_of_any_bytes_survive() -> None:
    keys = [b"\x00\xff\xfe", "ü/?&%".encode(), b"", b"\xed\xa0\x80"]
    value = decode(build(KEYS, (keys, b"t"))).value
    assert [key.encode("utf-8", "surrogateescape") for key in value[0]] == keys
    assert build(KEYS, value) == build(KEYS, (keys, "t"))


def test_an_expected_is_its_value_or_a_failure() -> None:
    literal = bytes.fromhex("84870b01")
    assert decode(build(literal, [True, Failure(-704), False])).value == [True, Failure(-704), False]


def test_a_struct_without_padding_is_recognised_by_its_alignments() -> None:
    assert parse_literal(bytes.fromhex("fd04048989ff")) == Struct((Scalar("Q"), Scalar("Q")))
    assert parse_literal(bytes.fromhex("fd01068282ff")) == Struct((Scalar("i"), Scalar("B")))
    assert parse_literal(bytes.fromhex("fd85048504ff")) == Struct((Optional(Scalar("Q")),) * 2)
    assert parse_literal(bytes.fromhex("fdfafaff")) == Struct((Void(), Void()))


@pytest.mark.parametrize(
    "literal",
    [
        "",
        "00",
        "fd",
        "fd04",
        "84",
        "8004",
        "85ff",
        "0101",
        "86ff",
        "8104",
        "81fa83",
        "fc",
        "ff",
        "8900",
        "81010101",
    ],
)
def test_a_literal_that_makes_no_sense_is_refused(literal: str) -> None:
    with pytest.raises(CodecError):
        parse_literal(bytes.fromhex(literal))


def test_an_array_says_its_size_in_base_127() -> None:
    assert parse_literal(bytes.fromhex("810482")) == Array(Scalar("Q"), 1)
    assert parse_literal(bytes.fromhex("810402" + "82")) == Array(Scalar("Q"), 128)


def test_a_literal_cannot_nest_or_grow_without_end() -> None:
    for literal in (b"\x85" * 5000 + b"\x01", b"\x85" * 100 + b"\x01", b"\x86" + b"\x01" * 300 + b"\xff"):
        with pytest.raises(CodecError):
            parse_literal(literal)
    assert isinstance(parse_literal(b"\x85" * 20 + b"\x01"), Optional)


@pytest.mark.parametrize(
    ("literal", "payload"),
    [
        ("84800c", "ffffffffffffffff"),
        ("84fa", "ffffffffffffff7f"),
        ("8404", "0000000001000000"),
        ("800c", "00000000ffffffff"),
        ("82800c04", "ffffffffffffffff"),
        ("8484fa", "0100000000000000ffffffffffffffff"),
    ],
)
def test_a_length_beyond_the_message_takes_no_memory(literal: str, payload: str) -> None:
    data = bytes.fromhex(literal)
    body = struct.pack("<IB", codec.type_hash(data) | 1, 0x1C) + data + b"\0" + bytes.fromhex(payload)
    with pytest.raises(CodecError):
        decode(body)


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("04", -1),
        ("04", 1 << 64),
        ("04", "x"),
        ("800c", 5),
        ("800c", "\ud800"),
        ("fd04048989ff", (1,)),
        ("fd04048989ff", (1, 2, 3)),
        ("8404", None),
        ("8601800cff", (2, 0)),
        ("810484", [1, 2]),
        ("84800c", ["a", None]),
    ],
)
def test_a_value_that_does_not_fit_its_type_is_refused(literal: str, value: Any) -> None:
    with pytest.raises(CodecError, match="does not fit"):
        build(bytes.fromhex(literal), value)


@pytest.mark.parametrize("literal", ["800c", "fd800c800cff", "8486800cff", "85800c"])
@pytest.mark.parametrize("tail", [b"", b"tail"])
def test_a_string_cannot_reach_beyond_its_message(literal: str, tail: bytes) -> None:
    kind = bytes.fromhex(literal)
    value = {"800c": "abc", "fd800c800cff": ("x", "abc"), "8486800cff": [(0, "abc")], "85800c": "abc"}[literal]
    good = write_message(codec.Message(kind, value, 0, 1))
    assert decode(good).value == value
    assert good[-4:] == b"\x03abc"
    for length in (4, 5, 200, 255):
        with pytest.raises(CodecError):
            decode(good[:-4] + bytes((length,)) + b"abc" + tail)


def test_bytes_left_over_are_refused_unless_the_message_announces_a_tail() -> None:
    body = build(KEYS, (["a"], "t"))
    with pytest.raises(CodecError, match="after its payload"):
        decode(body + b"x")


# -- properties

INTEGERS = {f: (-(1 << n - 1), (1 << n - 1) - 1) for f, n in (("b", 8), ("h", 16), ("i", 32), ("q", 64))}
INTEGERS |= {f: (0, (1 << n) - 1) for f, n in (("B", 8), ("H", 16), ("I", 32), ("Q", 64))}


def _values(kind: Type) -> st.SearchStrategy[Any]:
    if isinstance(kind, Scalar):
        if kind.format == "?":
            return st.booleans()
        if kind.format == "c":
            return st.binary(min_size=1, max_size=1)
        if kind.format in "fd":
            return st.floats(width=32 if kind.format == "f" else 64, allow_nan=False)
        return st.integers(*INTEGERS[kind.format])
    if isinstance(kind, Text):
        return st.binary(max_size=12).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
    if isinstance(kind, Void):
        return st.none()
    if isinstance(kind, Struct):
        return st.tuples(*map(_values, kind.members))
    if isinstance(kind, Array):
        return st.lists(_values(kind.element), min_size=kind.count, max_size=kind.count)
    if isinstance(kind, Sequence):
        return st.lists(_values(kind.element), max_size=4)
    if isinstance(kind, Map):
        return st.lists(st.tuples(_values(kind.key), _values(kind.value)), max_size=4)
    if isinstance(kind, Optional):
        return st.none() | _values(kind.value)
    if isinstance(kind, Expected):
        return _values(kind.value) | _values(kind.error).map(Failure)
    assert isinstance(kind, Variant)
    return st.one_of(
        *[_values(item).map(lambda v, i=i: (i, v)) for i, item in enumerate(kind.alternatives)]  # type: ignore[misc]
    )


LEAVES = st.sampled_from([Scalar(f) for f in "iIqQbBhH?cfd"] + [Text(), Text()])


def _grown(children: st.SearchStrategy[Type]) -> st.SearchStrategy[Type]:
    sized = children.filter(lambda kind: minimum_size(kind) > 0)
    return st.one_of(
        st.lists(children | st.just(Void()), min_size=1, max_size=5).map(lambda kinds: Struct(tuple(kinds))),
        st.lists(children, min_size=1, max_size=4).map(lambda kinds: Variant(tuple(kinds))),
        sized.map(Sequence),
        # An optional nothing is told apart from None by no Python value; Mooncake has none.
        sized.filter(lambda kind: not isinstance(kind, Optional)).map(Optional),
        st.builds(Expected, children | st.just(Void()), st.just(Scalar("i"))),
        st.builds(Map, sized, children),
        st.builds(Array, sized, st.integers(1, 3)),
    )


TYPES = st.recursive(LEAVES, _grown, max_leaves=8)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_value_of_any_type_survives_and_both_decoders_agree(data: st.DataObject) -> None:
    kind = data.draw(TYPES)
    literal = literal_of(kind)
    assert parse_literal(literal) == kind
    value = data.draw(_values(kind))
    width = data.draw(st.integers(0, 3))
    payload, wide = codec.encode(literal, value, width=width)
    got, stop = decoder(literal, wide)(payload, 0, len(payload))
    assert (got, stop) == (value, len(payload))
    assert reference_decode(kind, payload, wide) == (value, len(payload))
    assert decode(build(literal, value)).value == value


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_both_decoders_agree_on_damaged_payloads(data: st.DataObject) -> None:
    kind = data.draw(st.one_of(TYPES, TYPES.map(lambda inner: Struct((inner, Text())))))
    payload, width = codec.encode(literal_of(kind), data.draw(_values(kind)), width=data.draw(st.integers(0, 1)))
    damaged = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(damaged)))
        if data.draw(st.booleans()) and place < len(damaged):
            damaged[place] = data.draw(st.sampled_from([0, 1, 2, 3, 255]))
        else:
            del damaged[place : place + data.draw(st.integers(1, 4))]
    broken = bytes(damaged)
    try:
        wanted: Any = reference_decode(kind, broken, width)
    except Damaged:
        with pytest.raises(CodecError):
            decoder(literal_of(kind), width)(broken, 0, len(broken))
        return
    got = decoder(literal_of(kind), width)(broken, 0, len(broken))
    assert repr(got) == repr(wanted)  # as text, since a NaN is not equal to itself


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(BODIES), st.data())
def test_a_damaged_recorded_body_is_read_as_the_reference_reads_it_or_refused(body: bytes, data: st.DataObject) -> None:
    damaged = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged)))
        match data.draw(st.sampled_from(["change", "cut", "insert", "delete"])):
            case "change" if place < len(damaged):
                damaged[place] = data.draw(st.integers(0, 255))
            case "cut":
                del damaged[place:]
            case "insert":
                damaged[place:place] = data.draw(st.binary(min_size=1, max_size=9))
            case _:
                del damaged[place : place + 1]
    try:
        message = decode(bytes(damaged))
    except CodecError:
        return
    frame = read_frame(bytes(damaged))
    wanted, taken = reference_decode(parse_literal(frame.literal), bytes(damaged[frame.start : frame.end]), frame.width)
    assert repr(message.value) == repr(wanted)
    assert message.tail == bytes(damaged[frame.start + taken : frame.end])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_from_anywhere_give_a_message_or_a_codec_error(body: bytes) -> None:
    try:
        decode(body)
    except CodecError:
        pass


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([*range(1, 13), *range(0x80, 0x8A), 0x91, 0xFA, 0xFD, 0xFF]), max_size=30),
    st.binary(max_size=60),
)
def test_a_literal_from_anywhere_with_its_right_hash_gives_a_value_or_a_codec_error(
    codes: list[int], payload: bytes
) -> None:
    literal = bytes(codes)
    try:
        decode(struct.pack("<IB", codec.type_hash(literal) | 1, 4) + literal + b"\0" + payload)
    except CodecError:
        pass


def test_a_deep_type_is_compiled_as_well_as_a_flat_one() -> None:
    kind: Type = Scalar("Q")
    value: Any = 7
    for index in range(20):
        kind, value = (Sequence(kind), [value]) if index % 2 else (Optional(kind), value)
    literal = literal_of(kind)
    assert decode(build(literal, value)).value == value
