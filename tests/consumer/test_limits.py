"""Bounds, second choices and what is said: mappings, replicas, buffers, puts whose end is not known."""

from __future__ import annotations

import array
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from egmctl.bench.buffers import registered
from egmctl.consumer import EgmStore, Timing
from egmctl.consumer.engine import in_turn, split_batch
from egmctl.consumer.errors import GetFailed, InterruptedPut, InvalidBuffer, ObjectNotFound, TransferTimeout
from egmctl.consumer.host_copy import Completion, Fragment, HostCopier
from egmctl.consumer.master_link import Location
from egmctl.memory.driver import CudaError
from egmctl.mooncake.master import ReplicateConfig
from tests.consumer.mini_provider import MiniProvider
from tests.consumer.support import Memory, PausingCopier, payload
from tests.support.master import Master

MIB = 1 << 20
TWO = ReplicateConfig(replica_num=2)


class Failing:
    """Copies but for the first ``times``, which fail as those of a broken GPU do."""

    def __init__(self) -> None:
        self.inner = HostCopier(1)
        self.times = 0
        self.late = False

    def copy(
        self, fragments: Sequence[Fragment], *, device: int | None = None, stream: int | None = None
    ) -> Completion:
        if not self.times:
            return self.inner.copy(fragments)
        self.times -= 1
        if self.late:
            return Broken()
        raise CudaError("cuMemcpyAsync", "CUDA_ERROR_INVALID_VALUE", 1)


class Broken:
    def wait(self, timeout: float | None = None) -> bool:
        raise CudaError("cuEventQuery", "CUDA_ERROR_ECC_UNCORRECTABLE", 214)

    def done(self) -> bool:
        return True


@pytest.fixture
def copier() -> Iterator[Failing]:
    copier = Failing()
    yield copier
    copier.inner.close()


@pytest.fixture
def pair(master: Master, copier: Failing) -> Iterator[EgmStore]:
    """A store on two pools, so that an object may have two replicas."""
    with (
        MiniProvider(master.address, chunks=[32 * MIB]),
        MiniProvider(master.address, chunks=[32 * MIB]),
        EgmStore.connect(master.address, copier=copier, timing=Timing(retry=1.0)) as store,
    ):
        yield store


def test_by_default_idle_mappings_have_a_bound(store: EgmStore) -> None:
    assert 0 < store._engine.mappings._max_count <= 4096


@pytest.mark.parametrize("late", [False, True], ids=["when it is queued", "when it is waited for"])
def test_where_a_copy_from_one_replica_fails_the_next_is_tried(pair: EgmStore, copier: Failing, late: bool) -> None:
    data = payload("two", 100_000)
    pair.put("k", data, config=TWO)
    copier.times, copier.late = 1, late
    assert pair.get("k") == data
    assert copier.times == 0


def test_when_no_replica_can_be_copied_the_reason_of_each_is_told(pair: EgmStore, copier: Failing) -> None:
    pair.put("k", b"two", config=TWO)
    copier.times = 10
    with pytest.raises(GetFailed, match="no replica could be copied") as failed:
        pair.get("k")
    reasons = failed.value.facts["reasons"]
    assert len(reasons) == 2
    assert all("CUDA_ERROR_INVALID_VALUE" in reason for reason in reasons)
    assert copier.times == 8, "each place once"


def test_the_failure_of_the_only_replica_is_told_as_it_is(pair: EgmStore, copier: Failing) -> None:
    pair.put("k", b"one")
    copier.times = 1
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        pair.get("k")


def test_a_buffer_that_is_not_one_piece_is_refused(store: EgmStore) -> None:
    numbers = memoryview(bytearray(range(100)))
    for wrong in (numbers[::2], numbers[::-1], "text"):
        with pytest.raises(InvalidBuffer, match="object 'k'"):
            store.put("k", wrong)  # type: ignore[arg-type]
    assert not store.exists("k")
    store.put("read-only", numbers.toreadonly()[10:20])
    store.put("numbers", memoryview(array.array("q", [1, 2])))
    assert store.get("read-only") == bytes(range(10, 20))
    assert len(store.get("numbers")) == 16


def test_a_put_that_came_too_late_says_that_its_space_was_given_back(master: Master, provider: MiniProvider) -> None:
    copier = PausingCopier()
    with EgmStore.connect(master.address, copier=copier, timing=Timing(put_deadline=0.3)) as store:
        memory = Memory(MIB)
        store.register_buffer(memory.address, MIB)
        transfer = store.put_from_async("k", memory.address, MIB)
        time.sleep(0.5)
        copier.go.set()
        with pytest.raises(InterruptedPut) as late:
            transfer.result()
        assert late.value.facts["revoked"] is True


def test_a_put_whose_master_is_gone_does_not_claim_that_its_space_was_given_back() -> None:
    pausing = PausingCopier()
    with (
        Master() as master,
        MiniProvider(master.address, chunks=[32 * MIB]),
        EgmStore.connect(master.address, copier=pausing, timing=Timing(retry=0.3, request=0.5)) as store,
    ):
        memory = Memory(MIB)
        store.register_buffer(memory.address, MIB)
        transfer = store.put_from_async("k", memory.address, MIB)
        assert pausing.paused.wait(10)
        master.kill()
        pausing.go.set()
        with pytest.raises(InterruptedPut) as cut:
            transfer.result()
        assert cut.value.facts["revoked"] is None


def test_what_was_begun_without_a_master_is_done_once_it_answers(provider: MiniProvider, store: EgmStore) -> None:
    memory = Memory(MIB)
    store.register_buffer(memory.address, MIB)
    store.put("there", b"bytes")
    client: Any = store._engine.master._client
    failures = []

    def unreachable(*_: object) -> object:
        from egmctl.mooncake.master import MasterUnreachable

        failures.append(1)
        raise MasterUnreachable("cannot connect")

    client.prepare_batch_get_replica_list = client.prepare_batch_put_start = lambda *_: unreachable
    get = store.get_into_async("there", memory.address, MIB)
    put = store.put_from_async("new", memory.address, 1000)
    assert len(failures) == 2
    del client.prepare_batch_get_replica_list, client.prepare_batch_put_start
    assert put.result() == 1000
    assert get.result() == 5
    with pytest.raises(ObjectNotFound):
        store.get_into_async("not there", memory.address, MIB).result()


def test_nothing_new_from_the_master_is_seen_without_taking_it_apart(store: EgmStore, master: Master) -> None:
    store.put("a", b"1")
    store.put("b", b"2")
    asked = store._engine.master.locate(["a", "b"])
    first = asked()
    assert asked.again()() is None
    store.remove("b", force=True)
    store.put("b", b"3")
    changed = asked.again()()
    assert changed is not None
    assert changed[0] == first[0]._replace(asked_at=changed[0].asked_at, lease_until=changed[0].lease_until)  # type: ignore[union-attr]
    assert isinstance(changed[1], Location)
    assert isinstance(first[1], Location)
    assert not changed[1].still_holds(first[1].places[0], first[1])


@pytest.mark.parametrize("count", [1, 7, 32, 33, 64, 65, 256, 1000, 100_000])
def test_a_batch_is_cut_into_pieces_that_begin_and_end_short(count: int) -> None:
    pieces = split_batch(count)
    assert [at for piece in pieces for at in range(piece.start, piece.stop)] == list(range(count))
    sizes = [piece.stop - piece.start for piece in pieces]
    assert len(sizes) <= 270
    assert max(sizes[0], sizes[-1]) <= 28


class Question:
    def __init__(self, piece: int, said: list[str]) -> None:
        self.piece, self.said = piece, said
        said.append(f"make {piece}")

    def send(self) -> None:
        self.said.append(f"send {self.piece}")

    def wait(self) -> None:
        self.said.append(f"wait {self.piece}")


def played(count: int, dry: bool) -> list[str]:
    said: list[str] = []
    for question in in_turn(range(count), lambda n: Question(n, said), lambda: said.append("meanwhile"), lambda: dry):
        said.append(f"copy {question.piece}")
    return said


def test_one_question_is_under_way_while_what_the_one_before_named_is_copied() -> None:
    assert played(0, False) == []
    assert played(1, False) == ["make 0", "send 0", "meanwhile", "wait 0", "copy 0"]
    first = ["make 0", "send 0", "meanwhile", "make 1", "wait 0", "send 1", "copy 0"]
    assert played(3, False) == [*first, "make 2", "wait 1", "send 2", "copy 1", "wait 2", "copy 2"]


@pytest.mark.parametrize("dry", [False, True])
def test_every_piece_is_asked_for_once_and_more_are_under_way_when_the_copies_run_dry(dry: bool) -> None:
    said = played(20, dry)
    assert [each for each in said if each.startswith("copy")] == [f"copy {n}" for n in range(20)]
    for what in ("make", "send", "wait"):
        assert [each for each in said if each.startswith(what)] == [f"{what} {n}" for n in range(20)]
    under_way = most = 0
    for each in said:
        under_way += each.startswith("send") - each.startswith("wait")
        most = max(most, under_way)
    assert most == (4 if dry else 1)


def test_a_buffer_that_cannot_be_registered_is_given_back(monkeypatch: pytest.MonkeyPatch, store: EgmStore) -> None:
    import egmctl.bench.buffers as buffers

    closed = []
    monkeypatch.setattr(buffers.HostBuffer, "close", lambda self: closed.append(self.nbytes))

    def refuse(address: int, nbytes: int) -> None:
        raise InvalidBuffer("refused")

    with registered(store, 4096, None) as buffer:
        assert store._buffers.find(buffer.address, 4096)
    assert closed == [4096]
    assert len(store._buffers) == 0
    monkeypatch.setattr(store, "register_buffer", refuse)
    with pytest.raises(InvalidBuffer), registered(store, 100, None):
        pytest.fail("there is no buffer")
    assert closed == [4096, 100]


def test_a_transfer_on_a_device_that_stands_still_times_out(master: Master, provider: MiniProvider) -> None:
    copier = PausingCopier()
    with EgmStore.connect(master.address, copier=copier) as store:
        memory = Memory(MIB)
        store.register_buffer(memory.address, MIB)
        transfer = store.put_from_async("k", memory.address, MIB)
        began = time.monotonic()
        with pytest.raises(TransferTimeout):
            transfer.result(0.2)
        assert time.monotonic() - began < 2
        copier.go.set()
        assert transfer.result(20) == MIB
