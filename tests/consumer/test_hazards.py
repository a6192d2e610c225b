"""Ways in which wrong bytes could be returned or written, each made to happen against a real Master."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from egmctl.consumer import EgmStore, Timing
from egmctl.consumer.errors import (
    AmbiguousSegment,
    GetFailed,
    InterruptedPut,
    LeaseExpired,
    ObjectExists,
    ObjectNotFound,
    ProviderGone,
    StaleAllocation,
    StoreError,
    Unreachable,
)
from egmctl.errors import EgmError
from egmctl.mooncake.admin import AdminClient
from egmctl.mooncake.descriptor import SegmentDescriptor
from egmctl.mooncake.master import ReplicateConfig
from tests.consumer.mini_provider import MiniProvider
from tests.consumer.support import Background, Memory, PausingCopier, payload, until
from tests.support.master import Master

MIB = 1 << 20
SIZE = 4 * MIB
OLD, NEW = payload("old", SIZE), payload("new", SIZE)


@pytest.fixture
def copier() -> PausingCopier:
    return PausingCopier()


@pytest.fixture
def slow(master: Master, provider: MiniProvider, copier: PausingCopier) -> Iterator[EgmStore]:
    """A store whose next copy stops in the middle."""
    with EgmStore.connect(master.address, copier=copier, timing=Timing(retry=2.0)) as store:
        yield store
        copier.go.set()


@pytest.fixture
def target(slow: EgmStore) -> Memory:
    memory = Memory(SIZE)
    slow.register_buffer(memory.address, memory.nbytes)
    return memory


# hazard 16: overwritten or removed by force during a read


def test_a_get_during_which_the_key_was_overwritten_by_force_returns_the_new_object(
    store: EgmStore, slow: EgmStore, target: Memory, copier: PausingCopier
) -> None:
    store.put("k", OLD)
    reading = Background(lambda: slow.get_into("k", target.address, SIZE))
    assert copier.paused.wait(10)
    store.remove("k", force=True)
    store.put("filler", payload("filler", SIZE))  # takes the space that is being read
    store.put("k", NEW)
    copier.go.set()
    assert reading.result() == SIZE
    assert target.read(SIZE) == NEW


def test_a_get_during_which_the_key_was_removed_by_force_says_so(
    store: EgmStore, slow: EgmStore, target: Memory, copier: PausingCopier
) -> None:
    store.put("k", OLD)
    reading = Background(lambda: slow.get_into("k", target.address, SIZE))
    assert copier.paused.wait(10)
    store.remove("k", force=True)
    store.put("filler", NEW)
    copier.go.set()
    with pytest.raises(ObjectNotFound):
        reading.result()


def test_the_same_place_taken_by_the_same_key_again_is_still_another_object(
    store: EgmStore, slow: EgmStore, target: Memory, copier: PausingCopier
) -> None:
    store.put("k", OLD)
    reading = Background(lambda: slow.get_into("k", target.address, SIZE))
    assert copier.paused.wait(10)
    place = store._engine.master.locate(["k"])()[0].places[0]  # type: ignore[union-attr]
    for _ in range(8):
        store.remove("k", force=True)
        store.put("k", NEW)
        again = store._engine.master.locate(["k"])()[0].places[0]  # type: ignore[union-attr]
        if again.address == place.address:
            break
    assert again.address == place.address, "the allocator did not give the same place again"
    copier.go.set()
    assert reading.result() == SIZE
    assert target.read(SIZE) == NEW


# hazard 3: a Master started anew


def test_a_get_during_which_the_master_was_restarted_is_done_again(
    master: Master, slow: EgmStore, target: Memory, copier: PausingCopier, provider: MiniProvider
) -> None:
    with EgmStore.connect(master.address) as store:
        one_chunk = ReplicateConfig(preferred_segments=(f"{provider.endpoint}/numa0/0",))
        store.put("so that the provider is bound", OLD)
        master.restart()
        provider.order("mount")
        store.put("k", OLD, config=one_chunk)
        before = store._engine.master.locate(["k"])()[0].places[0]  # type: ignore[union-attr]
        reading = Background(lambda: slow.get_into("k", target.address, SIZE))
        assert copier.paused.wait(10)
        master.restart()
        provider.order("mount")
        store.put(
            "k", NEW, config=one_chunk
        )  # the first put after a start gets the same place and the same replica number again
        after = store._engine.master.locate(["k"])()[0].places[0]  # type: ignore[union-attr]
        copier.go.set()
        assert reading.result() == SIZE
        assert target.read(SIZE) == NEW
    assert before == after, "nothing but the connection may tell the two apart"


def test_a_put_during_which_the_master_was_restarted_publishes_no_mixture(
    master: Master, slow: EgmStore, target: Memory, copier: PausingCopier, provider: MiniProvider
) -> None:
    target.write(OLD)
    writing = Background(lambda: slow.put_from("k", target.address, SIZE))
    assert copier.paused.wait(10)
    master.restart()
    provider.order("mount")
    with EgmStore.connect(master.address) as store:
        copier.go.set()
        assert writing.result() == SIZE
        assert store.get("k") == OLD


def test_a_put_is_not_ended_at_another_master_than_the_one_that_gave_the_space(
    master: Master, slow: EgmStore, target: Memory, copier: PausingCopier, provider: MiniProvider
) -> None:
    target.write(OLD)
    writing = Background(lambda: slow.put_from("k", target.address, SIZE))
    assert copier.paused.wait(10)
    master.restart()
    provider.order("mount")
    with EgmStore.connect(master.address) as store:
        # The same client has the same key under way at the new Master: a PutEnd would publish space never written.
        reserved = slow._engine.master.putting(["k"], [SIZE], ReplicateConfig())
        reserved.send()
        reserved()
        copier.go.set()
        assert writing.result() == SIZE
        assert copier.copies == 2  # begun anew
        assert store.get("k") == OLD


# hazard 8: a copy that outlasts its lease


def test_a_transfer_that_outlasted_its_lease_asks_again_before_it_says_done(
    store: EgmStore, slow: EgmStore, target: Memory, copier: PausingCopier
) -> None:
    store.put("k", OLD)
    transfer = slow.get_into_async("k", target.address, SIZE)
    assert copier.paused.wait(10)
    time.sleep(2.2)  # the Master's lease is 2 s
    store.remove("k")  # not by force: the lease is over
    store.put("other", NEW)
    copier.go.set()
    until(transfer.done)
    with pytest.raises(ObjectNotFound):
        transfer.result()


def test_a_lease_is_renewed_while_a_long_copy_is_waited_for(
    store: EgmStore, slow: EgmStore, target: Memory, copier: PausingCopier
) -> None:
    store.put("k", OLD)
    reading = Background(lambda: slow.get_into("k", target.address, SIZE))
    assert copier.paused.wait(10)
    time.sleep(3.0)
    with pytest.raises(StoreError, match="OBJECT_HAS_LEASE"):
        store.remove("k")
    copier.go.set()
    assert reading.result() == SIZE
    assert target.read(SIZE) == OLD


def test_a_session_refuses_to_read_after_its_lease(store: EgmStore, memory: Memory) -> None:
    store.put("k", OLD)
    with store.session(["k"]) as session:
        assert session.read_into("k", 0, memory.address, 1000) == 1000
        time.sleep(2.1)
        with pytest.raises(LeaseExpired):
            session.read_into("k", 0, memory.address, 1000)
        assert session.renew() == ()
        assert session.read_into("k", 1000, memory.address, 1000) == 1000
        assert memory.read(1000) == OLD[1000:2000]


# hazard 9: a put that outlived its time


def test_a_put_later_than_its_deadline_is_not_published(
    master: Master, provider: MiniProvider, copier: PausingCopier
) -> None:
    with EgmStore.connect(master.address, copier=copier, timing=Timing(put_deadline=0.5)) as store:
        memory = Memory(SIZE)
        store.register_buffer(memory.address, SIZE)
        transfer = store.put_from_async("k", memory.address, SIZE)
        time.sleep(0.8)
        copier.go.set()
        with pytest.raises(InterruptedPut):
            transfer.result()
        assert not store.exists("k")
        assert store.put("k", b"next") == 4  # revoked: the key is free, long before the Master's own 30 s


def test_a_late_put_leaves_the_retry_of_the_same_key_alone(copier: PausingCopier) -> None:
    with (
        Master(flags=("--put_start_discard_timeout_sec=1",)) as master,
        MiniProvider(master.address, chunks=[32 * MIB]),
        EgmStore.connect(master.address, copier=copier, timing=Timing(put_deadline=1.0)) as store,
        EgmStore.connect(master.address) as other,
    ):
        memory = Memory(SIZE)
        store.register_buffer(memory.address, SIZE)
        transfer = store.put_from_async("k", memory.address, SIZE)
        assert copier.paused.wait(10)
        time.sleep(1.5)
        other.put("k", NEW)
        copier.go.set()
        with pytest.raises(InterruptedPut):
            transfer.result()
        assert other.get("k") == NEW


# hazard 1: a provider that comes back on the same endpoint, at the same addresses


@pytest.fixture
def lasting() -> Iterator[Master]:
    """A Master that goes on listing a dead provider's segments for 4 s."""
    with Master(client_ttl=4) as master:
        yield master


def _reborn(first: MiniProvider, master: Master) -> MiniProvider:
    """The next incarnation: same endpoint, same addresses, no rule kept, its memory full of another's bytes."""
    address = first.addresses[0]
    second = MiniProvider(
        master.address,
        chunks=[32 * MIB],
        port=first.port,
        address=address,
        exclusive=False,
        socket_path=first.socket_path,
    )
    second.start()
    assert (second.endpoint, second.addresses[0]) == (first.endpoint, address)
    second.order("fill", chunk=0, value=0xEE)
    return second


def test_a_reborn_provider_never_passes_its_bytes_as_the_old_object(lasting: Master) -> None:
    with (
        MiniProvider(lasting.address, chunks=[32 * MIB], address=0x5A5_0000_0000) as first,
        EgmStore.connect(lasting.address, timing=Timing(retry=0.3)) as store,
        EgmStore.connect(lasting.address, timing=Timing(retry=0.3)) as fresh,
    ):
        memory = Memory(SIZE)
        store.register_buffer(memory.address, SIZE)
        store.put("k", OLD)
        assert store.get("k") == OLD
        with store.session(["k"]) as session:
            session.read_into("k", 0, memory.address, 1000)
            first.kill()
            second = _reborn(first, lasting)
            try:
                with pytest.raises(ProviderGone):
                    session.read_into("k", 0, memory.address, 1000)
                for reader in (store, fresh):
                    with pytest.raises(AmbiguousSegment):
                        reader.get("k")
                    # A put may be given space in the old segment, which is the new one's memory as well.
                    with pytest.raises(AmbiguousSegment):
                        reader.put("n", NEW)
                assert set(second.order("peek", chunk=0, offset=0, nbytes=SIZE)) == {"e"}
                until(lambda: _not_found(fresh, "k"), 15)
                second.order("exclusive", value=True)
                for reader in (store, fresh):
                    reader.put(f"n{id(reader)}", NEW)
                    assert reader.get(f"n{id(reader)}") == NEW
            finally:
                second.close()


def test_space_reserved_before_its_provider_was_bound_is_not_written_to() -> None:
    with (
        Master(client_ttl=2) as master,
        MiniProvider(master.address, chunks=[32 * MIB], address=0x5A6_0000_0000) as first,
        EgmStore.connect(master.address) as store,
        EgmStore.connect(master.address) as other,
    ):
        fetch = store._engine.bindings._fetch
        reborn: list[MiniProvider] = []

        def replaced_meanwhile(endpoint: str) -> SegmentDescriptor:
            if not reborn:
                first.kill()
                reborn.append(_reborn(first, master))
                names = AdminClient(master.admin_address)
                until(lambda: len(names.segments_detail()) == 1)
                reborn[0].order("exclusive", value=True)
                other.put("x", NEW)  # gets the very place that was reserved for "k" at the first one
            return fetch(endpoint)

        store._engine.bindings._fetch = replaced_meanwhile
        try:
            assert store.put("k", OLD) == SIZE
            assert reborn
            assert other.get("x") == NEW
            assert other.get("k") == OLD
        finally:
            for provider in reborn:
                provider.close()


def _not_found(store: EgmStore, key: str) -> bool:
    try:
        store.get(key)
    except ObjectNotFound:
        return True
    except EgmError:
        return False
    raise AssertionError("an object of a dead provider was read")


def test_a_provider_killed_during_a_get_makes_it_fail(
    store: EgmStore, slow: EgmStore, target: Memory, copier: PausingCopier, provider: MiniProvider
) -> None:
    store.put("k", OLD)
    transfer = slow.get_into_async("k", target.address, SIZE)
    assert copier.paused.wait(10)
    provider.kill()
    copier.go.set()
    with pytest.raises(ProviderGone):
        transfer.result()


def test_a_provider_killed_during_a_put_keeps_it_from_being_published(
    store: EgmStore, slow: EgmStore, target: Memory, copier: PausingCopier, provider: MiniProvider
) -> None:
    transfer = slow.put_from_async("k", target.address, SIZE)
    assert copier.paused.wait(10)
    provider.kill()
    copier.go.set()
    with pytest.raises((ProviderGone, InterruptedPut)):
        transfer.result()
    assert not store.exists("k")


def test_an_exclusive_claim_is_asked_for_again_until_it_is_made(master: Master) -> None:
    with (
        MiniProvider(master.address, chunks=[8 * MIB], exclusive=False) as provider,
        EgmStore.connect(master.address, timing=Timing(retry=10)) as store,
    ):
        putting = Background(lambda: store.put("k", OLD))
        time.sleep(0.5)
        provider.order("exclusive", value=True)
        assert putting.result() == SIZE


# hazard 2: chunks published later


def test_a_chunk_published_after_binding_is_found(store: EgmStore, provider: MiniProvider) -> None:
    store.put("k", OLD)
    provider.order("grow", nbytes=16 * MIB)
    config = ReplicateConfig(preferred_segments=(f"{provider.endpoint}/numa0/2",))
    store.put("in the new chunk", NEW, config=config)
    assert store.get("in the new chunk") == NEW
    assert provider.order("peek", chunk=2, offset=0, nbytes=64) == NEW[:64].hex()


# hazard 11: the loopback address of another host


def test_memory_of_another_host_is_unreachable_and_says_why(master: Master) -> None:
    with (
        MiniProvider(master.address, chunks=[8 * MIB], host_id="0" * 32),
        EgmStore.connect(master.address) as store,
    ):
        with pytest.raises(Unreachable, match="another host") as error:
            store.put("k", OLD)
        assert error.value.facts["reasons"]
        assert not store.exists("k")


def test_an_endpoint_and_a_socket_of_two_incarnations_are_not_mixed(master: Master) -> None:
    with (
        MiniProvider(master.address, chunks=[8 * MIB]) as first,
        # The second one takes over the socket's path; the first one still answers at its endpoint.
        MiniProvider(master.address, chunks=[8 * MIB], socket_path=first.socket_path, mount=False),
        EgmStore.connect(master.address, timing=Timing(retry=0.2)) as store,
        pytest.raises(StaleAllocation, match="different incarnations"),
    ):
        store.put("k", OLD)


# hazard 13: idle imports pin the provider's memory


def test_idle_mappings_go_when_their_chunk_is_withdrawn_or_its_agent_ends(
    store: EgmStore, provider: MiniProvider
) -> None:
    for index in (0, 1):
        config = ReplicateConfig(preferred_segments=(f"{provider.endpoint}/numa0/{index}",))
        store.put(f"k{index}", OLD, config=config)
    assert store._engine.mappings.count == 2
    provider.order("withdraw", chunk=0)
    until(lambda: store._engine.mappings.count == 1)  # nothing else is called: the store is idle
    with pytest.raises(StaleAllocation):
        store.get("k0")
    assert store.get("k1") == OLD
    provider.kill()
    until(lambda: store._engine.mappings.count == 0)


def test_a_get_out_of_a_chunk_withdrawn_meanwhile_is_not_believed(
    store: EgmStore, slow: EgmStore, target: Memory, copier: PausingCopier, provider: MiniProvider
) -> None:
    store.put("k", OLD)
    transfer = slow.get_into_async("k", target.address, SIZE)
    assert copier.paused.wait(10)
    for index in (0, 1):
        provider.order("withdraw", chunk=index)
    copier.go.set()
    with pytest.raises(StaleAllocation):
        transfer.result()
    until(lambda: slow._engine.mappings.count == 0)


def test_a_stopped_provider_is_read_from_all_the_same(store: EgmStore, provider: MiniProvider) -> None:
    import signal

    store.put("k", OLD)
    provider.signal(signal.SIGSTOP)
    try:
        for _ in range(20):
            assert store.get("k") == OLD
    finally:
        provider.signal(signal.SIGCONT)


def test_a_segment_of_a_stock_client_is_unreachable_and_says_why(master: Master) -> None:
    with (
        MiniProvider(master.address, chunks=[8 * MIB], egm=False),
        EgmStore.connect(master.address) as store,
        pytest.raises(Unreachable, match="another client"),
    ):
        store.put("k", OLD)


def test_a_put_given_unreachable_space_is_asked_for_again_where_it_can_be_reached(master: Master) -> None:
    with (
        MiniProvider(master.address, chunks=[64 * MIB]) as reachable,
        MiniProvider(master.address, chunks=[64 * MIB], egm=False),
        EgmStore.connect(master.address, endpoints=[reachable.endpoint]) as store,
    ):
        for index in range(40):
            data = payload(f"k{index}", 5000)
            assert store.put(f"k{index}", data) == 5000
            assert store.get(f"k{index}") == data


def test_all_replicas_of_a_put_are_written_and_each_can_be_read(master: Master) -> None:
    with (
        MiniProvider(master.address, chunks=[16 * MIB]) as first,
        MiniProvider(master.address, chunks=[16 * MIB]) as second,
        EgmStore.connect(master.address) as store,
    ):
        store.put("k", OLD, config=ReplicateConfig(replica_num=2))
        for provider in (first, second):
            assert bytes.fromhex(provider.order("peek", chunk=0, offset=0, nbytes=SIZE)) == OLD
        assert store.get("k") == OLD
        first.kill()
        assert store.get("k") == OLD  # the other replica


def test_errors_have_codes_numbers_and_hints(store: EgmStore) -> None:
    with pytest.raises(ObjectNotFound) as missing:
        store.get("nothing")
    assert missing.value.document()["code"] == "object-not-found"
    assert missing.value.facts["number"] == -704
    assert missing.value.hint
    store.put("k", b"1")
    with pytest.raises(ObjectExists):
        store.put("k", b"1")
    assert GetFailed.code != ObjectExists.code
