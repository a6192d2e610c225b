"""Lists of like elements read column by column: as the decoder reads them, or not at all."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egmctl.mooncake import calls
from egmctl.mooncake.codec import CodecError, Failure, Frame, Message, build, encode, write_message
from egmctl.mooncake.columns import Column, Columns, read_columns
from egmctl.mooncake.decoder import decoder
from egmctl.mooncake.literals import Array, Scalar, Sequence, Struct, Text, parse_literal
from tests.mooncake.test_codec import TYPES, _values
from tests.support.reference_codec import literal_of

PUT_START = b"\x84" + calls.REPLICAS_ANSWER
LOCATED = b"\x84" + calls.LOCATED_ANSWER


def rows(found: Columns, count: int) -> list[Any]:
    """What the decoder would have made."""

    def filled(part: Any, at: int) -> Any:
        if isinstance(part, Column):
            value = found.values[part][at]
            return value.decode("utf-8", "surrogateescape") if part in texts else value
        if isinstance(part, (tuple, list)):
            return type(part)(filled(each, at) for each in part)
        return part

    texts = {at for at, column in enumerate(found.values) if column and isinstance(column[0], bytes)}
    return [filled(found.element, at) for at in range(count)]


def replica(number: int, endpoint: str = "127.0.0.1:17813", status: int = 2, kind: int = 0) -> tuple[Any, ...]:
    return number, (kind, ((4096, 0x402000000 + number * 4096, "tcp", endpoint),)), status


# Chars are bytes in the decoder's rows as well, so they are left out where texts are told from them by their type.
LISTS = TYPES.filter(lambda kind: b"\x0c" not in literal_of(kind).replace(b"\x80\x0c", b""))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_what_is_read_as_columns_is_what_the_decoder_reads(data: st.DataObject) -> None:
    kind = Sequence(data.draw(LISTS))
    literal = literal_of(kind)
    value = data.draw(_values(kind.element))
    count = data.draw(st.integers(0, 5))
    values = [value] * count if data.draw(st.booleans()) else [data.draw(_values(kind.element)) for _ in range(count)]
    payload, width = encode(literal, values, width=data.draw(st.integers(0, 2)))
    tail = data.draw(st.sampled_from([b"", b"", b"more"]))
    frame = Frame(literal, width, 0 if tail else None, 0, len(payload) + len(tail))
    found = read_columns(payload + tail, frame)
    if found is not None:
        assert repr(rows(found, count)) == repr(decoder(literal, width)(payload, 0, len(payload))[0])


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_what_is_damaged_is_never_read_as_anything_that_the_decoder_refuses(data: st.DataObject) -> None:
    kind = Sequence(data.draw(LISTS))
    literal = literal_of(kind)
    payload, width = encode(literal, [data.draw(_values(kind.element))] * data.draw(st.integers(1, 4)))
    whole = Frame(literal, width, None, 0, len(payload))
    read_columns(payload, whole)  # its layout is remembered
    damaged = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(damaged)))
        if data.draw(st.booleans()) and place < len(damaged):
            damaged[place] = data.draw(st.sampled_from([0, 1, 2, 3, 255]))
        else:
            del damaged[place : place + data.draw(st.integers(1, 4))]
    broken = bytes(damaged)
    found = read_columns(broken, Frame(literal, width, None, 0, len(broken)))
    if found is None:
        return
    got, stop = decoder(literal, width)(broken, 0, len(broken))
    assert stop == len(broken)
    assert repr(rows(found, len(got))) == repr(got)


def test_endpoints_may_differ_as_long_as_their_lengths_do_not() -> None:
    spots = calls.read_spots(PUT_START, build(PUT_START, [[replica(1, "10.0.0.1:1")], [replica(2, "10.0.0.2:1")]]))
    assert spots is not None
    assert spots.te_endpoints == ["10.0.0.1:1", "10.0.0.2:1"]
    assert (
        calls.read_spots(PUT_START, build(PUT_START, [[replica(1, "10.0.0.1:1")], [replica(2, "10.0.0.10:1")]])) is None
    )


@pytest.mark.parametrize("located", [False, True])
def test_what_is_usual_among_others_makes_columns_all_the_same(located: bool) -> None:
    wanted = LOCATED if located else PUT_START
    replicas: list[Any] = [
        [replica(1, "10.0.0.1:1")],
        Failure(-704),
        [replica(2, "10.0.0.10:1")],
        [],
        [replica(3, "10.0.0.1:1"), replica(4, "10.0.0.10:1")],
        [replica(5, status=4)],
        [(6, (2, ("/a/file", 4096)), 2)],
    ]
    answers = replicas
    if located:
        answers = [each if isinstance(each, Failure) else (each, 5000 + at, None) for at, each in enumerate(replicas)]
    body = build(wanted, answers)
    assert calls.read_spots(wanted, body) is None
    at, spots = calls.spots_of(calls.read_answer("X", wanted, body), 2)
    assert list(at) == ([0, 2, 4] if located else [0, 2])
    assert list(spots.te_endpoints) == ["10.0.0.1:1", "10.0.0.10:1", "10.0.0.1:1"][: len(at)]
    assert list(spots.leases) == ([5000, 5002, 5004] if located else [])
    assert list(spots.ids) == [1, 2, 3][: len(at)]
    assert set(spots.statuses) == {2}
    everything, same = calls.spots_of(spots, 2)
    assert list(everything) == list(range(len(at)))
    assert same is spots
    nothing, none = calls.spots_of(spots, 3)
    assert not nothing
    assert not none.ids


@pytest.mark.parametrize(
    "answers",
    [
        [],
        [Failure(-200)],
        [[replica(1)], Failure(-705)],
        [Failure(-705), [replica(1)]],
        [[replica(1)], []],
        [[replica(1), replica(2)], [replica(3), replica(4)]],
        [[(1, (2, ("/a/file", 4096)), 3)], [(2, (2, ("/b/file", 4096)), 3)]],
    ],
    ids=["none", "a failure", "a failure behind", "a failure ahead", "no replica", "two replicas", "on disk"],
)
def test_what_is_not_usual_is_left_to_the_decoder(answers: list[Any]) -> None:
    body = build(PUT_START, answers)
    assert calls.read_spots(PUT_START, body) is None
    assert calls.read_answer("BatchPutStart", PUT_START, body) == answers


def test_fields_that_a_newer_master_appended_are_no_hindrance() -> None:
    answers = [[replica(7)], [replica(8)]]
    payload, width = encode(PUT_START, answers)
    for tail in (b"\1\1", b"\1" * 200, payload[1:]):
        body = write_message(Message(PUT_START, answers, width, 1, tail))
        spots = calls.read_spots(PUT_START, body)
        assert spots is not None
        assert list(spots.ids) == [7, 8]
    kind = parse_literal(calls._REPLICA)
    longer = PUT_START.replace(b"\x01\xff\x01", b"\x01\x04\xff\x01")  # one more number in each replica
    assert parse_literal(longer) != kind
    spots = calls.read_spots(PUT_START, build(longer, [[(*replica(7), 99)], [(*replica(8), 98)]]))
    assert spots is not None
    assert (list(spots.ids), list(spots.statuses)) == ([7, 8], [2, 2])


@pytest.mark.parametrize("body", [b"", b"\0" * 3, b"\1" * 40, build(LOCATED, [])[:-1] + b"\xff"])
def test_what_is_no_answer_at_all_is_the_decoders_to_refuse(body: bytes) -> None:
    assert calls.read_spots(PUT_START, body) is None
    with pytest.raises(CodecError):
        calls.read_answer("BatchPutStart", PUT_START, body)


def test_a_type_that_asks_for_far_more_than_the_message_holds_is_left_at_once() -> None:
    row = Array(Array(Array(Array(Scalar("Q"), 59), 59), 59), 59)  # twelve million numbers
    for element in (row, Struct((Scalar("Q"), Array(Scalar("Q"), 63))), Struct((Text(), Scalar("Q")))):
        literal = literal_of(Sequence(element))
        for body in (b"\1", b"\1" * 8, b"\2" * 300):
            began = time.monotonic()
            assert read_columns(body, Frame(literal, 0, None, 0, len(body))) is None
            assert time.monotonic() - began < 0.5
