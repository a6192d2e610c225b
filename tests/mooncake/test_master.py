"""The Master's client against real Masters of both versions: every call, every error code that has a meaning for us."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from egmctl.errors import UsageError
from egmctl.mooncake import calls
from egmctl.mooncake.admin import AdminClient
from egmctl.mooncake.codec import CodecError, build, decode
from egmctl.mooncake.errors import MasterLost, MasterRpcError, MasterTimeout, MasterUnreachable
from egmctl.mooncake.master import (
    NEED_REMOUNT,
    OK,
    SEGMENT_DRAINING,
    SEGMENT_OK,
    Failure,
    MasterClient,
    MasterRefused,
    ReplicateConfig,
    Segment,
    Uuid,
    error_name,
    new_uuid,
)
from tests.support.master import ALL_VERSIONS, Master, MasterMissing

MIB = 1 << 20
BASE = 1 << 44


def segment(name: str = "host:1/numa0/0", *, base: int = BASE, size: int = 64 * MIB) -> Segment:
    return Segment(new_uuid(), name, base, size, "127.0.0.1:1", "tcp")


@pytest.fixture
def client(any_master: Master) -> Any:
    with MasterClient(any_master.address) as client:
        yield client


@pytest.fixture
def mounted(client: MasterClient) -> tuple[MasterClient, Uuid, Segment]:
    """A Master with one chunk of 64 MiB, the id of the client that owns it, and the chunk."""
    return client, *mount(client)


def mount(client: MasterClient, **which: Any) -> tuple[Uuid, Segment]:
    me, chunk = new_uuid(), segment(**which)
    client.mount_segment(chunk, me)
    client.remount_segments([], me)
    return me, chunk


def refused(number: int, act: Callable[[], object]) -> None:
    with pytest.raises(MasterRefused) as caught:
        act()
    assert (caught.value.number, caught.value.name) == (number, error_name(number))
    assert str(number) in str(caught.value)


# -- the client and its segments


def test_the_master_says_that_it_is_ready(client: MasterClient) -> None:
    assert client.service_ready() == "2.0.0"
    assert client.storage_config().fsdir == ""


def test_exact_control_mounts_what_is_named_and_the_empty_remount_settles_the_client(client: MasterClient) -> None:
    me, first, second = new_uuid(), segment("a"), segment("b", base=2 * BASE)
    assert client.ping(me) == NEED_REMOUNT
    client.mount_segment(first, me)
    assert client.ping(me) == NEED_REMOUNT
    assert client.query_segment_status_by_id(first.id) == SEGMENT_OK
    client.remount_segments([], me)
    assert client.ping(me) == OK
    assert client.query_segment_status_by_id(second.id) is None
    client.remount_segments([second], me)  # of a client that is OK: success, and nothing done
    assert client.query_segment_status_by_id(second.id) is None
    client.mount_segment(second, me)
    assert client.query_segment_status_by_id(second.id) == SEGMENT_OK
    assert client.query_segment_status("b") == SEGMENT_OK
    assert client.query_segment_status("c") is None


def test_a_new_client_may_mount_by_remounting(client: MasterClient) -> None:
    me, chunks = new_uuid(), [segment(f"s{index}", base=BASE * (index + 1)) for index in range(3)]
    client.remount_segments(chunks, me)
    assert client.ping(me) == OK
    assert [client.query_segment_status_by_id(chunk.id) for chunk in chunks] == [SEGMENT_OK] * 3


def test_a_segment_arrives_as_it_was_sent(any_master: Master, client: MasterClient) -> None:
    me = new_uuid()
    chunk = Segment(new_uuid(), "10.0.0.1:7/numa1/3", (1 << 46) - (1 << 24), 16 * MIB, "10.0.0.1:7", "nvlink", "host")
    client.mount_segment(chunk, me)
    (row,) = AdminClient(any_master.admin_address).segments_detail()
    assert (row.segment_id, row.client_id, row.name) == (chunk.id, me, chunk.name)
    assert (row.base, row.size, row.te_endpoint, row.protocol) == (chunk.base, chunk.size, "10.0.0.1:7", "nvlink")


def test_unmounting_is_idempotent_for_anybody_and_takes_the_objects_along(mounted: Any) -> None:
    client, me, chunk = mounted
    client.put_start(me, "k", 100)
    client.put_end(me, "k")
    client.unmount_segment(new_uuid(), me)
    client.unmount_segment(chunk.id, new_uuid())
    assert client.query_segment_status_by_id(chunk.id) is None
    client.unmount_segment(chunk.id, me)
    refused(-704, lambda: client.get_replica_list("k"))


def test_a_graceful_unmount_drains_first_and_ends_by_itself(mounted: Any) -> None:
    client, me, chunk = mounted
    client.put_start(me, "k", 100)
    client.put_end(me, "k")
    refused(-600, lambda: client.graceful_unmount_segment(new_uuid(), me, 1000))
    refused(-101, lambda: client.graceful_unmount_segment(chunk.id, new_uuid(), 1000))
    client.graceful_unmount_segment(chunk.id, me, 1000)
    assert client.query_segment_status_by_id(chunk.id) == SEGMENT_DRAINING
    assert client.get_replica_list("k").replicas
    refused(-1010, lambda: client.mount_segment(chunk, me))
    refused(-200, lambda: client.put_start(me, "new", 100))
    deadline = time.monotonic() + 10
    while client.query_segment_status_by_id(chunk.id) is not None and time.monotonic() < deadline:
        client.ping(me)
        time.sleep(0.05)
    assert client.query_segment_status_by_id(chunk.id) is None
    refused(-704, lambda: client.get_replica_list("k"))


@pytest.mark.parametrize("version", ALL_VERSIONS)
def test_a_silent_client_is_forgotten_and_told_to_remount(version: str) -> None:
    try:
        master = Master(version, client_ttl=1, suspicion_ttl=1)
    except MasterMissing as missing:
        pytest.skip(str(missing))
    with master, MasterClient(master.address) as client:
        me, chunk = mount(client)
        deadline = time.monotonic() + 20
        while client.query_segment_status_by_id(chunk.id) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert client.query_segment_status_by_id(chunk.id) is None
        assert client.ping(me) == NEED_REMOUNT


def test_tasks_are_fetched_and_their_outcome_reported(client: MasterClient) -> None:
    me, _ = mount(client, name="a")
    other, _ = mount(client, name="b", base=2 * BASE)
    client.put_start(me, "k", 100, ReplicateConfig(preferred_segments=("a",)))
    client.put_end(me, "k")
    assert client.fetch_tasks(me) == []
    body = build(bytes.fromhex("fd800c800c84800cff"), ("k", "default", ["b"]))
    made = decode(client.rpc.call("CreateCopyTask", body)).value
    (task,) = client.fetch_tasks(me) + client.fetch_tasks(other)
    assert task.id == made
    assert task.type == 0
    assert '"key":"k"' in task.payload
    refused(-1400, lambda: client.complete_task(me, new_uuid(), succeeded=True))
    owner = me if not client.fetch_tasks(me) else other
    client.complete_task(owner, task.id, succeeded=False, message="not done here")
    state = decode(client.rpc.call("QueryTask", build(calls.UUID, task.id))).value
    assert (state[2], state[6]) == (2, "not done here")
    assert client.fetch_tasks(me) == []


# -- objects


def test_an_object_is_reserved_then_published_then_located_then_removed(mounted: Any) -> None:
    client, me, chunk = mounted
    (replica,) = client.put_start(me, "k", 1000)
    assert (replica.status, replica.kind, replica.size, replica.protocol) == (2, "memory", 1000, "tcp")
    assert replica.te_endpoint == chunk.te_endpoint
    assert chunk.base <= replica.address <= chunk.base + chunk.size - 1000
    assert not client.exist_key("k")
    client.put_end(me, "k")
    assert client.exist_key("k")
    located = client.get_replica_list("k")
    assert located.lease_ttl_ms == 2000
    assert located.replicas == (replica._replace(status=3),)
    client.remove("k", force=True)
    assert not client.exist_key("k")


def test_error_codes_are_those_of_the_table(mounted: Any) -> None:
    client, me, _ = mounted
    stranger = new_uuid()
    for call in (client.get_replica_list, client.remove):
        refused(-704, lambda call=call: call("missing"))
    refused(-704, lambda: client.put_end(me, "missing"))
    refused(-704, lambda: client.put_revoke(me, "missing"))
    refused(-600, lambda: client.put_start(me, "", 10))
    refused(-600, lambda: client.put_start(me, "zero", 0))
    client.put_start(me, "k", 100)
    refused(-705, lambda: client.put_start(me, "k", 100))
    refused(-705, lambda: client.put_start(stranger, "k", 100))
    refused(-703, lambda: client.get_replica_list("k"))
    refused(-703, lambda: client.remove("k"))
    refused(-703, lambda: client.remove("k", force=True))
    refused(-601, lambda: client.put_end(stranger, "k"))
    refused(-601, lambda: client.put_revoke(stranger, "k"))
    client.put_end(me, "k", checksum=7)
    client.put_end(me, "k")
    refused(-705, lambda: client.put_start(me, "k", 100))
    refused(-700, lambda: client.put_revoke(me, "k"))
    client.get_replica_list("k")
    refused(-706, lambda: client.remove("k"))
    client.put_start(me, "gone", 100)
    client.put_revoke(me, "gone")
    refused(-704, lambda: client.put_revoke(me, "gone"))
    refused(-704, lambda: client.put_end(me, "gone"))
    refused(-200, lambda: client.put_start(me, "large", 65 * MIB))


def test_there_is_no_space_without_a_segment(client: MasterClient) -> None:
    refused(-200, lambda: client.put_start(new_uuid(), "k", 100))


def test_a_refusal_names_the_call_the_key_and_what_to_do(mounted: Any) -> None:
    client, me, _ = mounted
    with pytest.raises(MasterRefused) as caught:
        client.put_start(me, "a\nb" + "x" * 500, 1 << 40)
    error = caught.value
    assert "PutStart of a?bxxx" in error.message
    assert "NO_AVAILABLE_HANDLE (-200)" in error.message
    assert len(error.message) < 300
    assert error.where == client.address
    assert "largest chunk" in error.hint
    assert error.document()["facts"] == {"call": "PutStart", "number": -200, "name": "NO_AVAILABLE_HANDLE"}


def test_keys_may_hold_any_bytes(mounted: Any) -> None:
    client, me, _ = mounted
    keys: list[str | bytes] = ["ü", b"\x00\xff/?&% \n", "k" * (1 << 20), b"\xed\xa0\x80"]
    for key in keys:
        client.put_start(me, key, 10)
        client.put_end(me, key)
    assert client.batch_exist_key(keys) == [True] * 4
    client.remove(b"\x00\xff/?&% \n", force=True)
    assert client.batch_exist_key(keys) == [True, False, True, True]


def test_preferred_segments_steer_placement(client: MasterClient) -> None:
    me, _ = mount(client, name="a")
    _, there = mount(client, name="b", base=2 * BASE)
    for index in range(20):
        (replica,) = client.put_start(me, f"k{index}", 1000, ReplicateConfig(preferred_segments=("b",)))
        assert there.base <= replica.address < there.base + there.size


def test_every_field_of_the_config_is_understood(mounted: Any) -> None:
    client, me, _ = mounted
    config = ReplicateConfig(
        replica_num=1,
        soft_pin_action=1,
        soft_pin_ttl_ms=5000,
        with_hard_pin=False,
        preferred_segments=("x", "y"),
        preferred_segment="z",
        prefer_alloc_in_same_node=False,
        data_type=1,
        host_id="host",
        group_ids=("g",),
    )
    assert client.put_start(me, "k", 100, config)
    refused(-600, lambda: client.put_start(me, "l", 100, replace(config, group_ids=("g", "h"))))
    pair = client.batch_put_start(me, ["l", "m"], [1, 1], replace(config, group_ids=("g", "h")))
    assert all(isinstance(item, tuple) for item in pair)


def test_a_tenant_is_sent_along(any_master: Master, mounted: Any) -> None:
    client, me, _ = mounted
    client.put_start(me, "k", 100)
    client.put_end(me, "k")
    with MasterClient(any_master.address, tenant_id="") as other:
        assert other.exist_key("k")  # the empty tenant is the default one


# -- batches


def test_a_batch_answers_for_each_key_in_order(mounted: Any) -> None:
    client, me, chunk = mounted
    started = client.batch_put_start(me, ["a", "b", "a", "", "c"], [10, 20, 30, 40, 0])
    assert [item[0].size for item in started[:2]] == [10, 20]
    assert started[2:] == [Failure(-705), Failure(-600), Failure(-600)]
    assert client.batch_put_end(me, ["a", "nothing"]) == [None, Failure(-704)]
    assert client.batch_put_revoke(me, ["a", "b", "b"]) == [Failure(-700), None, Failure(-704)]
    located = client.batch_get_replica_list(["a", "b", "a"])
    assert located[0] == located[2]
    assert located[0].replicas[0].te_endpoint == chunk.te_endpoint
    assert located[1] == Failure(-704)
    assert client.batch_exist_key(["a", "b"]) == [True, False]
    assert client.batch_remove(["a", "b"], force=True) == [None, Failure(-704)]
    assert client.batch_exist_key(["a", "b"]) == [False, False]
    # Last, since the Master evicts others to make room for what can never fit.
    assert client.batch_put_start(me, ["c", "large"], [1, 1 << 40])[1] == Failure(-200)


def test_checksums_are_given_for_each_key_of_a_batch(mounted: Any) -> None:
    client, me, _ = mounted
    client.batch_put_start(me, ["a", "b"], [1, 1])
    assert client.batch_put_end(me, ["a", "b"], [7, None]) == [None, None]


def test_an_empty_batch_has_an_empty_answer(mounted: Any) -> None:
    client, me, _ = mounted
    assert client.batch_put_start(me, [], []) == []
    assert client.batch_put_end(me, []) == []
    assert client.batch_put_revoke(me, []) == []
    assert client.batch_get_replica_list([]) == []
    assert client.batch_exist_key([]) == []
    assert client.batch_remove([]) == []


def test_unequal_lists_are_refused_before_anything_is_sent(client: MasterClient) -> None:
    with pytest.raises(UsageError, match="2 keys and 1 sizes"):
        client.batch_put_start(new_uuid(), ["a", "b"], [1])
    with pytest.raises(UsageError, match="1 keys and 2 checksums"):
        client.batch_put_end(new_uuid(), ["a"], [1, 2])
    assert client.epoch == 0


@pytest.mark.parametrize("count", [255, 256, 70_000])
def test_batches_of_every_width_of_length_are_understood(mounted: Any, count: int) -> None:
    client, me, _ = mounted
    keys = [f"k{index}" for index in range(count)]
    assert client.batch_exist_key(keys, timeout=60) == [False] * count
    client.batch_put_start(me, keys[:300], [16] * min(count, 300))
    client.batch_put_end(me, keys[:300])
    found = client.batch_get_replica_list(keys, timeout=60)
    assert len({item.replicas[0].address for item in found[:255]}) == 255
    assert found[300:] == [Failure(-704)] * (count - min(count, 300))


def test_batches_can_be_under_way_together(mounted: Any) -> None:
    client, me, _ = mounted
    parts = [[f"{part}/{index}" for index in range(64)] for part in range(8)]
    starts = [client.submit_batch_put_start(me, keys, [100] * 64) for keys in parts]
    ends = []
    for keys, reply in zip(parts, starts, strict=True):
        assert all(isinstance(item, tuple) for item in reply.result())
        ends.append(client.submit_batch_put_end(me, keys))
    assert [end.result() for end in ends] == [[None] * 64] * 8
    located = [client.submit_batch_get_replica_list(keys) for keys in parts]  # not before: a Master keeps no order
    addresses = [item.replicas[0].address for reply in located for item in reply.result()]
    assert len(set(addresses)) == 512
    revoked = client.submit_batch_put_revoke(me, ["none"]).result()
    assert (revoked, client.submit_batch_exist_key(["0/0"]).result()) == ([Failure(-704)], [True])
    assert client.submit_batch_remove(parts[0], force=True).result() == [None] * 64
    assert client.epoch == 1


def test_everything_can_be_removed_at_once(mounted: Any) -> None:
    client, me, _ = mounted
    client.batch_put_start(me, ["a", "b"], [1, 1])
    client.batch_put_end(me, ["a", "b"])
    assert client.remove_all(force=True) == 2
    assert client.batch_exist_key(["a", "b"]) == [False, False]


def test_the_usual_answers_to_a_batch_are_read_as_columns(mounted: Any) -> None:
    client, me, _ = mounted
    keys, sizes = [f"k{at}" for at in range(9)], [4096 * (at + 1) for at in range(9)]
    granted = client.prepare_batch_put_start(me, keys, sizes, ReplicateConfig())().result()
    assert isinstance(granted, calls.Spots)
    assert (list(granted.sizes), list(granted.statuses), list(granted.leases)) == (sizes, [2] * 9, [])
    again = client.prepare_batch_put_start(me, ["new", *keys], [1, *sizes], ReplicateConfig())().result()
    assert not isinstance(again, calls.Spots)  # one is granted, the others exist
    assert [isinstance(each, Failure) for each in again] == [False] + [True] * 9
    assert client.prepare_batch_put_end(me, keys)().result() == [None] * 9
    located = client.prepare_batch_get_replica_list(keys)().result()
    assert isinstance(located, calls.Spots)
    assert [list(each) for each in located[2:6]] == [list(each) for each in granted[2:6]]
    one_by_one = client.batch_get_replica_list(keys)
    for at, told in enumerate(one_by_one):
        (its,) = told.replicas
        assert (its.id, its.status, its.address) == (located.ids[at], 3, located.addresses[at])
        assert (its.protocol, its.te_endpoint) == (located.protocols[at], located.te_endpoints[at])
        assert told.lease_ttl_ms == located.leases[at]


def test_replica_ids_are_unique_and_rise_over_one_masters_life(any_master: Master, mounted: Any) -> None:
    client, me, chunk = mounted
    ids: list[int] = []
    for _ in range(5):  # the same key again after each way of ending it
        ids.append(client.put_start(me, "k", 100)[0].id)
        client.put_revoke(me, "k")
        ids.append(client.put_start(me, "k", 100)[0].id)
        client.put_end(me, "k")
        assert client.get_replica_list("k").replicas[0].id == ids[-1]
        client.remove("k", force=True)
    ids += [item[0].id for item in client.batch_put_start(me, [f"b{i}" for i in range(50)], [10] * 50)]
    assert ids == sorted(set(ids))
    lock = threading.Lock()

    def work(name: int) -> None:
        for index in range(30):
            (replica,) = client.put_start(me, f"{name}/{index}", 10)
            with lock:
                ids.append(replica.id)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ids) == 60 + 240
    assert len(set(ids)) == len(ids)
    before = ids[0]
    any_master.restart()  # and another Master counts anew: an id means nothing without the connection's epoch
    client.mount_segment(chunk, me)
    assert client.put_start(me, "k", 100)[0].id == before


# -- trouble


def test_a_master_that_does_not_know_a_call_says_so(client: MasterClient) -> None:
    with pytest.raises(MasterRpcError, match="not registered") as caught:
        client.rpc.call("NoSuchCall", b"")
    assert caught.value.number == 11
    with pytest.raises(MasterRpcError, match="invalid rpc") as caught:
        client.rpc.call("Ping", b"")
    assert caught.value.number == 4
    assert client.ping(new_uuid()) == NEED_REMOUNT
    assert client.epoch == 1


def test_an_answer_of_another_form_is_refused_not_misread(client: MasterClient) -> None:
    body = client.rpc.call("ServiceReady")
    with pytest.raises(CodecError, match="does not know"):
        calls.read_answer("Ping", calls.PING_ANSWER, body)
    longer = build(bytes.fromhex("87fd030104ff01"), (5, 1, 99))  # a newer Master may append a field
    assert calls.read_answer("Ping", calls.PING_ANSWER, longer) == (5, 1, 99)
    shorter = build(bytes.fromhex("87fd03ff01"), (5,))
    with pytest.raises(CodecError, match="does not know"):
        calls.read_answer("Ping", calls.PING_ANSWER, shorter)


def test_replicas_of_other_kinds_than_memory_are_read() -> None:
    rows = [
        (1, (0, ((10, 4096, "tcp", "h:1"),)), 3),
        (2, (1, ((10, 4096, "nof", "h:2"),)), 3),
        (3, (2, ("/file", 10)), 3),
        (4, (3, ((1, 2), 10, "h:3")), 3),
        (5, (4, ("/file", 512, 10, 16, 1)), 3),
    ]
    value = decode(build(calls.LOCATED_ANSWER, (rows, 10_000, None))).value
    located = calls.to_located(value)
    assert [replica.kind for replica in located.replicas] == ["memory", "nof", "disk", "local-disk", "file"]
    assert [replica.size for replica in located.replicas] == [10] * 5
    assert [replica.address for replica in located.replicas] == [4096, 4096, 0, 0, 0]
    assert [replica.te_endpoint for replica in located.replicas] == ["h:1", "h:2", "", "h:3", ""]


def test_a_killed_master_is_noticed_at_once_and_its_successor_reached(any_master: Master, client: MasterClient) -> None:
    me = new_uuid()
    client.ping(me)
    assert (client.epoch, client.connected()) == (1, True)
    any_master.kill()
    deadline = time.monotonic() + 5
    while client.connected() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not client.connected()
    began = time.monotonic()
    with pytest.raises(MasterUnreachable):
        client.ping(me)
    assert time.monotonic() - began < 2
    any_master.start()
    assert client.ping(me) == NEED_REMOUNT
    assert (client.epoch, client.connected()) == (2, True)


def test_a_stopped_master_leaves_a_mount_unanswered_and_its_late_answer_is_heard(any_master: Master) -> None:
    with MasterClient(any_master.address, timeout=10) as client:
        me, chunk = new_uuid(), segment()
        client.ping(me)
        any_master.pause()
        try:
            with pytest.raises(MasterTimeout) as caught:
                client.mount_segment(chunk, me, timeout=0.3)
            assert client.connected()
            assert caught.value.may_take_effect
            reply = caught.value.reply
            assert reply is not None
            heard = threading.Event()
            reply.add_done_callback(lambda _: heard.set())
            assert not heard.wait(0.2)
        finally:
            any_master.resume()
        assert heard.wait(10)
        reply.result(0)
        assert client.query_segment_status_by_id(chunk.id) == SEGMENT_OK
        assert client.epoch == 1


def test_a_master_killed_with_a_request_in_hand_leaves_it_uncertain(any_master: Master, client: MasterClient) -> None:
    me = new_uuid()
    client.ping(me)
    any_master.pause()
    threading.Timer(0.3, any_master.kill).start()
    began = time.monotonic()
    with pytest.raises(MasterLost) as caught:
        client.mount_segment(segment(), me)
    assert time.monotonic() - began < 3
    assert caught.value.may_take_effect
    deadline = time.monotonic() + 5
    while any_master.alive and time.monotonic() < deadline:
        time.sleep(0.01)


def test_many_threads_put_and_find_their_own_objects(mounted: Any) -> None:
    client, me, _ = mounted
    wrong: list[object] = []

    def work(name: int) -> None:
        try:
            for index in range(40):
                key, size = f"{name}/{index}", 1 + name * 100 + index
                (replica,) = client.put_start(me, key, size)
                client.put_end(me, key)
                located = client.get_replica_list(key).replicas[0]
                if (located.size, located.address, located.id) != (size, replica.address, replica.id):
                    wrong.append(key)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert client.epoch == 1
