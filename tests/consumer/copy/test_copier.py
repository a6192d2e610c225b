"""Fragments arrive whole, in the order streams ask for, and what they borrowed comes back."""

from __future__ import annotations

import logging
import random
import threading
import time
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egmctl.consumer.copy import CopyOptions, Kernels, Strategy, install_kernels, make_copier
from egmctl.consumer.copy.jobs import TableJob
from egmctl.consumer.errors import InvalidRequest, StoreClosed
from egmctl.errors import EgmError, PreflightError
from egmctl.memory.driver import CudaError
from tests.consumer.copy.conftest import ROOM, Machine, ModelMachine
from tests.model.config import Fault
from tests.model.kernels import ModelKernels

SIZES = st.one_of(
    st.integers(1, 70), st.sampled_from([127, 128, 129, 656, 4095, 4096, 16384, 16385, 40000]), st.just(0)
)


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Fragments (destination offset, source offset, bytes) that do not overlap on either side, at any alignment."""
    pieces = draw(st.lists(st.tuples(SIZES, st.integers(0, 33), st.integers(0, 33)), min_size=1, max_size=12))
    fragments, at_destination, at_source = [], 64, 64
    for nbytes, gap, other in pieces:
        at_destination += gap
        at_source += other
        fragments.append((at_destination, at_source, nbytes))
        at_destination += nbytes
        at_source += nbytes
    return draw(st.permutations(fragments))


@pytest.fixture(scope="module")
def sides(machine: Machine) -> tuple[int, int]:
    return machine.hbm(), machine.dram()


@pytest.mark.parametrize("strategy", ["engine", "kernel", "auto"])
@pytest.mark.parametrize("direction", ["get", "put"])
@settings(max_examples=25, deadline=None)
@given(fragments=layouts(), seed=st.integers(0, 1 << 30))
def test_every_byte_of_every_fragment_arrives_and_none_beside_them_changes(
    machine: Machine,
    sides: tuple[int, int],
    strategy: str,
    direction: str,
    fragments: list[tuple[int, int, int]],
    seed: int,
) -> None:
    destination, source = sides if direction == "get" else sides[::-1]
    data = random.Random(seed).randbytes(ROOM)
    machine.write(source, data)
    before = random.Random(seed + 1).randbytes(ROOM)
    machine.write(destination, before)
    copier = machine.copier(strategy=strategy)
    try:
        assert copier.copy([(destination + d, source + s, n) for d, s, n in fragments], device=0).wait()
    finally:
        copier.close()
    expected = bytearray(before)
    for d, s, n in fragments:
        expected[d : d + n] = data[s : s + n]
    assert machine.read(destination, ROOM) == bytes(expected)


def test_a_fragment_longer_than_a_row_of_the_table_arrives_whole(machine: Machine) -> None:
    nbytes = (3 << 20) + 17
    source, destination = machine.dram(nbytes + 1), machine.hbm(nbytes)
    data = random.Random(3).randbytes(nbytes)
    machine.write(source + 1, data)
    copier = machine.copier()
    copier.copy([(destination, source + 1, nbytes)], device=0, strategy="kernel").wait()
    assert machine.read(destination, nbytes) == data
    copier.close()


@pytest.mark.parametrize("strategy", ["engine", "kernel"])
def test_a_copy_starts_after_what_its_stream_holds(model: ModelMachine, strategy: Strategy) -> None:
    first, second, third = model.dram(), model.hbm(), model.dram()
    model.write(first, b"new" * 100)
    stream = model.driver.stream_create()
    model.driver.config.copy_delay = 0.1
    model.driver.memcpy_async(second, first, 300, stream)
    model.driver.config.copy_delay = 0.0
    copier = model.copier()
    copier.copy([(third, second, 300)], device=0, stream=stream, strategy=strategy).wait()
    assert model.read(third, 300) == b"new" * 100
    copier.close()
    model.driver.stream_destroy(stream)


def test_a_stream_can_be_made_to_go_on_after_a_copy(model: ModelMachine) -> None:
    first, second, third = model.dram(), model.hbm(), model.dram()
    model.write(first, b"seen" * 100)
    stream = model.driver.stream_create()
    copier = model.copier()
    model.driver.config.copy_delay = 0.1
    copier.copy([(second, first, 400)], device=0).order(stream)
    model.driver.config.copy_delay = 0.0
    model.driver.memcpy_async(third, second, 400, stream)
    model.driver.stream_synchronize(stream)
    assert model.read(third, 400) == b"seen" * 100
    copier.close()
    model.driver.stream_destroy(stream)


def test_waiting_with_a_limit_says_false_and_the_copy_goes_on(model: ModelMachine) -> None:
    source, destination = model.dram(), model.hbm()
    copier = model.copier()
    model.driver.config.copy_delay = 0.3
    completion = copier.copy([(destination, source, 64)], device=0)
    assert not completion.done()
    begin = time.monotonic()
    assert completion.wait(0.02) is False
    assert time.monotonic() - begin < 0.25
    assert completion.wait(5) is True
    assert completion.done()
    copier.close()


def test_threads_copy_at_the_same_time_without_mixing_up_bytes(model: ModelMachine) -> None:
    source, destination = model.dram(), model.hbm()
    data = random.Random(5).randbytes(ROOM)
    model.write(source, data)
    copier = model.copier()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            base = number * (ROOM // 8)
            for size in (7, 656, 4096):
                for _ in range(20):
                    at = [base + size * n * 2 for n in range(10)]
                    copier.copy([(destination + a, source + a, size) for a in at], device=0).wait()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert model.read(destination + ROOM // 8, 7) == data[ROOM // 8 : ROOM // 8 + 7]
    copier.close()


def test_close_gives_back_everything_and_refuses_more(model: ModelMachine) -> None:
    source, destination = model.dram(), model.hbm()
    before = model.driver.leaks()
    copier = model.copier()
    copier.copy([(destination + 2 * n, source + 2 * n, 1) for n in range(50)], device=0)
    copier.copy([(destination, source, 1000)], device=0)
    copier.close()
    copier.close()
    assert model.driver.leaks() == before
    with pytest.raises(StoreClosed):
        copier.copy([(destination, source, 1)], device=0)


@pytest.mark.parametrize("during", ["stream_create", "event_record"])
def test_close_waits_for_a_copy_that_another_thread_is_queueing(
    model: ModelMachine, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    copier = model.copier()
    source, destination = model.hbm(), model.dram()
    model.write(source, b"\x5a" * ROOM)
    queueing, go = threading.Event(), threading.Event()
    original = getattr(model.driver, during)

    def slow(*arguments: int) -> object:
        result = original(*arguments)
        queueing.set()
        assert go.wait(10)
        return result

    monkeypatch.setattr(model.driver, during, slow)
    outcome: list[object] = []

    def copy() -> None:
        try:
            outcome.append(copier.copy([(destination, source, ROOM)]).wait(10))
        except EgmError as error:
            outcome.append(error)

    worker, closer = threading.Thread(target=copy), threading.Thread(target=copier.close)
    worker.start()
    assert queueing.wait(10)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive(), "its stream would be destroyed under it"
    go.set()
    worker.join(10)
    closer.join(10)
    assert outcome == [True]
    assert model.read(destination, ROOM) == b"\x5a" * ROOM
    assert {"streams", "events"}.isdisjoint(model.driver.leaks())


def test_copies_that_nobody_waits_for_do_not_pile_up(model: ModelMachine) -> None:
    source, destination = model.dram(), model.hbm()
    copier = model.copier()
    for _ in range(500):
        copier.copy([(destination, source, 8)], device=0)
        time.sleep(0.0005)
    copier.copy([(destination, source, 8)], device=0).wait()
    assert model.driver.leaks()["streams"] < 100
    assert model.driver.leaks()["events"] < 200
    copier.close()


@pytest.mark.parametrize("call", ["stream_create", "event_create", "event_record", "memcpy_async", "host_alloc"])
def test_a_copy_that_could_not_be_queued_leaves_the_copier_usable_and_loses_nothing(
    model: ModelMachine, call: str
) -> None:
    source, destination = model.dram(), model.hbm()
    before = model.driver.leaks()
    fragments = [(destination + 32 * n, source + 32 * n, 16) for n in range(20)]
    copier = model.copier()
    model.driver._counts.clear()
    model.driver.config.faults.append(Fault(call))
    queue = fragments[:2] if call == "memcpy_async" else fragments
    with pytest.raises(CudaError):
        copier.copy(queue, device=0, strategy="engine" if call == "memcpy_async" else "kernel")
    model.write(source, b"x" * 1000)
    copier.copy(fragments, device=0, strategy="kernel").wait()
    assert model.read(destination + 32 * 19, 16) == b"x" * 16
    copier.close()
    assert model.driver.leaks() == before


def test_a_device_that_fails_is_told_by_wait_and_done(model: ModelMachine) -> None:
    source, destination = model.dram(), model.hbm()
    copier = model.copier()
    model.driver.config.copy_delay = 0.05
    completion = copier.copy([(destination, source, 64)], device=0)
    model.driver.config.faults.append(
        Fault("event_synchronize", nth=0, name="CUDA_ERROR_ECC_UNCORRECTABLE", number=214)
    )
    with pytest.raises(CudaError, match="ECC_UNCORRECTABLE"):
        completion.wait()
    assert completion.done()
    with pytest.raises(CudaError, match="ECC_UNCORRECTABLE"):
        completion.wait(1)


def test_a_driver_without_batches_copies_one_by_one(model: ModelMachine) -> None:
    source, destination = model.dram(), model.hbm()
    data = random.Random(6).randbytes(ROOM)
    model.write(source, data)
    model.driver.config.faults.append(Fault("memcpy_batch_async", nth=0, name="FUNCTION_NOT_FOUND", number=-2))
    copier = model.copier(strategy="engine")
    at = [8192 * n for n in range(60)]
    for _ in range(2):
        copier.copy([(destination + a, source + a, 4096) for a in at], device=0).wait()
    assert all(model.read(destination + a, 4096) == data[a : a + 4096] for a in at)
    assert model.driver.calls.count("memcpy_batch_async") == 1
    copier.close()


class Watched(ModelKernels):
    """Notes the tables it is given."""

    def __init__(self, machine: ModelMachine) -> None:
        super().__init__(machine.driver)
        self.tables: list[TableJob] = []

    def copy_table(self, device: int, stream: int, job: TableJob) -> None:
        self.tables.append(job)
        super().copy_table(device, stream, job)


def test_auto_sends_many_small_fragments_by_the_kernel_and_large_ones_by_the_engine(model: ModelMachine) -> None:
    source, destination = model.dram(8 << 20), model.hbm(8 << 20)
    kernels: Kernels = (watched := Watched(model))
    copier = make_copier(model.driver, [0], model.options(), kernels=kernels)
    small = [(destination + 8192 * n, source + 8192 * n, 4096) for n in range(30)]
    large = [(destination + (n << 20), source + (n << 20), 512 << 10) for n in range(4, 6)]
    model.driver.calls.clear()
    copier.copy(small + large, device=0).wait()
    assert [(job.rows, job.put) for job in watched.tables] == [(30, False)]
    assert model.driver.calls.count("memcpy_async") == 2

    copier.copy([(s, d, n) for d, s, n in small], device=0).wait()
    assert watched.tables[-1].put
    copier.copy(small[:3], device=0).wait()
    assert len(watched.tables) == 2
    copier.close()


def test_neighbouring_fragments_become_one_copy(model: ModelMachine) -> None:
    source, destination = model.dram(), model.hbm()
    copier = model.copier(strategy="engine")
    model.driver.calls.clear()
    copier.copy([(destination + 64 * n, source + 64 * n, 64) for n in range(1000)], device=0).wait()
    assert model.driver.calls.count("memcpy_async") == 1
    assert "memcpy_batch_async" not in model.driver.calls
    copier.close()


def test_without_a_compiler_auto_uses_the_engine_and_warns_once(
    model: ModelMachine, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(driver: object) -> Kernels:
        raise PreflightError("NVRTC cannot be found", hint="install it")

    source, destination = model.dram(), model.hbm()
    model.write(source, b"y" * 4096)
    fragments = [(destination + 32 * n, source + 32 * n, 16) for n in range(20)]
    install_kernels(missing)
    try:
        copier = make_copier(model.driver, [0], model.options())
        with caplog.at_level(logging.WARNING):
            copier.copy(fragments, device=0).wait()
            copier.copy(fragments, device=0).wait()
        assert len(caplog.records) == 1
        assert "NVRTC cannot be found" in caplog.text
        assert model.read(destination + 32 * 19, 16) == b"y" * 16
        with pytest.raises(PreflightError):
            copier.copy(fragments, device=0, strategy="kernel")
        copier.close()
    finally:
        install_kernels(None)


@pytest.mark.parametrize("strategy", ["engine", "kernel", "auto"])
def test_fragments_may_come_as_a_buffer_of_integers(machine: Machine, strategy: Strategy) -> None:
    source, destination = machine.dram(), machine.hbm()
    data = random.Random(7).randbytes(ROOM)
    machine.write(source, data)
    at = random.Random(8).sample(range(ROOM // 1024), 100)
    table = array("Q", [number for a in at for number in (destination + 1024 * a, source + 1024 * a, 656)])
    copier = machine.copier()
    copier.copy(table, device=0, strategy=strategy).wait()
    assert all(machine.read(destination + 1024 * a, 656) == data[1024 * a : 1024 * a + 656] for a in at)
    copier.close()


def test_nothing_to_copy_is_done_at_once(model: ModelMachine) -> None:
    copier = model.copier()
    model.driver.calls.clear()
    completion = copier.copy([(4096, 8192, 0)], device=0)
    assert completion.done()
    assert completion.wait(0)
    assert model.driver.calls == []
    copier.close()


def test_a_gpu_that_was_not_named_and_a_negative_size_are_refused(model: ModelMachine) -> None:
    copier = model.copier()
    with pytest.raises(InvalidRequest, match="GPU 1"):
        copier.copy([(4096, 8192, 1)], device=1)
    for wrong in (
        [(4096, 8192, -1)],
        [(4096, 8192)],
        [(4096, 8192, 1 << 60)],
        [4096],
        array("d", [1.0]),
        array("I", [1]),
    ):
        with pytest.raises(InvalidRequest):
            copier.copy(wrong, device=0)
    copier.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"strategy": "fast"},
        {"order": "sorted"},
        {"streams": 0},
        {"blocks": 0},
        {"threads": 100},
        {"kernel_below": -1},
    ],
)
def test_options_that_cannot_be_meant_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        CopyOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [4, 20, 100])
def test_pieces_of_a_batch_are_queued_one_behind_the_other(model: ModelMachine, count: int) -> None:
    piece = 1 << 20
    source, destination = model.dram(2 * count * piece), model.hbm(2 * count * piece)
    data = random.Random(9).randbytes(2 * count * piece)
    model.write(source, data)
    copier = model.copier()
    fragments = [(destination + 2 * n * piece, source + 2 * n * piece, piece) for n in range(count)]
    made = model.driver.calls.count("stream_create")
    first, second = (copier.copy(half, device=0) for half in (fragments, fragments))
    assert model.driver.calls.count("stream_create") - made == 1
    assert set(copier._pools[0]._lanes) == {(False, 1)}
    assert model.driver.calls.count("memcpy_batch_async") == 2 * -(-count // 64), "long ones begin before all is queued"
    second.wait()
    assert first.done(), "what was queued before it is over before it"
    for to, _, nbytes in fragments:
        assert model.read(to, nbytes) == data[to - destination :][:nbytes]
    copier.close()


def test_neighbours_of_a_batch_stay_in_its_order_however_large_they_become(model: ModelMachine) -> None:
    piece = 1 << 20
    source, destination = model.dram(40 * piece), model.hbm(40 * piece)
    copier = model.copier()
    for first, count in ((0, 2), (2, 20), (22, 8)):
        fragments = [(destination + n * piece, source + n * piece, piece) for n in range(first, first + count)]
        copier.copy(fragments, device=0).wait()
    assert set(copier._pools[0]._lanes) == {(False, 1)}
    copier.copy([(destination, source, 20 * piece)], device=0).wait()
    assert set(copier._pools[0]._lanes) == {(False, 1), (False, 0)}
    copier.close()


def test_a_stream_goes_on_after_all_of_a_copy_on_two_streams(model: ModelMachine) -> None:
    piece = 1 << 20
    source, destination, third = model.dram(40 * piece), model.hbm(40 * piece), model.dram(40 * piece)
    model.write(source, b"s" * 40 * piece)
    copier = model.copier()
    model.driver.config.copy_delay = 0.01
    stream = model.driver.stream_create()
    copier.copy([(destination + 2 * n * piece, source + 2 * n * piece, piece) for n in range(20)], device=0).order(
        stream
    )
    model.driver.memcpy_async(third, destination, 40 * piece, stream)
    model.driver.stream_synchronize(stream)
    assert all(model.read(third + 2 * n * piece, piece) == b"s" * piece for n in (0, 1, 18, 19))
    model.driver.stream_destroy(stream)
    copier.close()


def test_waiting_for_a_device_that_stands_still_ends(model: ModelMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = model.dram(), model.hbm()
    copier = model.copier()
    completion = copier.copy([(destination, source, 64)], device=0)
    with monkeypatch.context() as still:
        still.setattr(model.driver, "event_query", lambda event: False)
        began = time.monotonic()
        assert completion.wait(0.3) is False
        assert 0.3 <= time.monotonic() - began < 5
    assert completion.wait(10)
    copier.close()
