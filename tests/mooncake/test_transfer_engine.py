"""The Transfer Engine child over real shared memory: served, killed, replaced, stopped, orphaned."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from egmctl.memory import Chunk, ChunkSpec, provider_memory
from egmctl.mooncake.descriptor import tcp_descriptor
from egmctl.mooncake.handshake import HandshakeServer
from egmctl.mooncake.master import MasterClient, Segment, new_uuid
from egmctl.mooncake.transfer_engine import LAST_PORT, TransferEngineChild, TransferEngineError
from tests.support.master import Master
from tests.support.stock import StockClient, StockEngine

MIB = 1 << 20
CHUNK = 16 * MIB


@contextmanager
def made_chunks(count: int, nbytes: int = CHUNK) -> Iterator[list[Chunk]]:
    memory = provider_memory("shm", total_bytes=count * max(nbytes, CHUNK))
    chunks: list[Chunk] = []
    try:
        for index in range(count):
            chunks.append(memory.create(ChunkSpec(index, 0, nbytes), lambda done: None))
        yield chunks
    finally:
        for chunk in chunks:
            memory.release(chunk)
        memory.close()


@pytest.fixture
def chunks() -> Iterator[list[Chunk]]:
    with made_chunks(2) as made:
        yield made


@pytest.fixture
def child() -> Iterator[TransferEngineChild]:
    started = TransferEngineChild()
    yield started
    started.stop()


def eventually(condition: Callable[[], object], within: float = 10.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def written(engine: StockEngine, endpoint: str, address: int, value: bytes) -> bool:
    return engine.write(endpoint, address, value) == 0


def write_and_read_back(endpoint: str, chunk: Chunk, value: bytes) -> None:
    with StockEngine() as engine:
        assert engine.write(endpoint, chunk.address + 4096, value) == 0
        assert bytes(chunk.host_view()[4096 : 4096 + len(value)]) == value
        assert engine.read(endpoint, chunk.address + 4096, len(value)) == value


@contextmanager
def endpoint_for(child: TransferEngineChild, chunks: list[Chunk]) -> Iterator[HandshakeServer]:
    """Our own handshake server in front of the child."""
    published = b""

    def provide() -> bytes:
        return published

    with HandshakeServer("127.0.0.1", 0, provide) as server:
        assert child.data_port is not None
        published = tcp_descriptor(
            server.endpoint,
            [(chunk.address, chunk.spec.nbytes) for chunk in chunks],
            data_host="127.0.0.1",
            data_port=child.data_port,
        ).to_bytes()
        yield server


@contextmanager
def mounted(master: Master, server: HandshakeServer, chunks: list[Chunk]) -> Iterator[None]:
    """The chunks at the Master, kept there by pings."""
    uuid = new_uuid()
    over = threading.Event()
    client = MasterClient(master.address)
    pinging = MasterClient(master.address)

    def ping() -> None:
        while not over.wait(1.0):
            with suppress(Exception):
                pinging.ping(uuid)

    thread = threading.Thread(target=ping)
    try:
        for chunk in chunks:
            client.mount_segment(
                Segment(
                    id=new_uuid(),
                    name=f"{server.endpoint}/numa0/{chunk.spec.index}",
                    base=chunk.address,
                    size=chunk.spec.nbytes,
                    te_endpoint=server.endpoint,
                    protocol="tcp",
                    host_id="",
                ),
                uuid,
            )
        client.remount_segments([], uuid)
        thread.start()
        yield
    finally:
        over.set()
        if thread.is_alive():
            thread.join()
        client.close()
        pinging.close()


def test_an_unmodified_store_client_puts_into_the_memfds_and_gets_it_back(
    any_master: Master, chunks: list[Chunk], child: TransferEngineChild
) -> None:
    child.start(chunks)
    source = random.Random(1)
    objects = {f"key/{size}": source.randbytes(size) for size in (1, 1000, 65536, 1 << 20, 5_000_001)}
    with (
        endpoint_for(child, chunks) as server,
        mounted(any_master, server, chunks),
        StockClient(any_master.address) as stock,
        MasterClient(any_master.address) as located,
    ):
        for key, value in objects.items():
            assert stock.put(key, value) == 0
            [replica] = located.get_replica_list(key).replicas
            assert replica.te_endpoint == server.endpoint
            home = next(c for c in chunks if c.address <= replica.address < c.address + c.spec.nbytes)
            offset = replica.address - home.address
            assert home.host_view()[offset : offset + len(value)] == value
        for key, value in objects.items():
            assert stock.get(key) == value


def test_a_running_store_client_goes_on_after_the_child_was_killed_and_replaced(
    master: Master, chunks: list[Chunk]
) -> None:
    deaths: list[str] = []
    child = TransferEngineChild(on_death=deaths.append)
    try:
        port = child.start(chunks)
        value = random.Random(2).randbytes(300_000)
        with (
            endpoint_for(child, chunks) as server,
            mounted(master, server, chunks),
            StockClient(master.address) as stock,
        ):
            assert stock.put("before", value) == 0
            asked = server.answered
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)  # the client's connection lies idle, which is what kept the port busy
            eventually(lambda: deaths)
            assert "SIGKILL" in deaths[0]
            assert not child.alive()
            began = time.monotonic()
            assert child.restart() == port
            assert time.monotonic() - began < 20
            eventually(lambda: stock.get("before") == value)
            assert stock.put("after", value[::-1]) == 0
            assert stock.get("after") == value[::-1]
            assert server.answered == asked, "the client asked for the descriptor again"
    finally:
        child.stop()
    assert len(deaths) == 1


def test_ten_replacements_in_a_row_keep_the_data_port(chunks: list[Chunk], child: TransferEngineChild) -> None:
    port = child.start(chunks)
    assert port <= LAST_PORT
    with endpoint_for(child, chunks) as server, StockEngine() as engine:
        for turn in range(10):
            value = bytes([turn]) * 5000
            eventually(partial(written, engine, server.endpoint, chunks[0].address, value))
            assert chunks[0].host_view()[:5000] == value
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            assert child.restart() == port


def test_a_port_beside_the_data_port_that_somebody_took_is_got_round(
    chunks: list[Chunk], child: TransferEngineChild
) -> None:
    port = child.start(chunks)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    with socket.socket() as above, socket.socket() as below:
        for stranger, place in ((above, port + 1), (below, port - 1)):
            with suppress(OSError):  # taken by somebody else: as good
                stranger.bind(("", place))
                stranger.listen()
        assert child.restart() == port


def test_a_restart_whose_port_stays_taken_fails_in_time_and_a_later_one_succeeds(
    chunks: list[Chunk], child: TransferEngineChild
) -> None:
    port = child.start(chunks)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    eventually(lambda: not child.alive())
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("", port))
        stranger.listen()
        began = time.monotonic()
        with pytest.raises(TransferEngineError, match=str(port)):
            child.restart(timeout=3)
        assert time.monotonic() - began < 6
        assert not child.alive()
    assert child.restart() == port


def test_more_chunks_than_one_packet_carries_are_all_served(child: TransferEngineChild) -> None:
    with made_chunks(150, 65536) as many:
        child.start(many)
        with endpoint_for(child, many) as server:
            for chunk in (many[0], many[63], many[64], many[149]):
                write_and_read_back(server.endpoint, chunk, os.urandom(3000))
        child.stop()


def test_the_last_stop_ends_the_process_at_once_and_is_repeatable(chunks: list[Chunk]) -> None:
    deaths: list[str] = []
    child = TransferEngineChild(on_death=deaths.append)
    child.start(chunks)
    process = psutil.Process(child.pid)
    began = time.monotonic()
    child.stop()
    assert time.monotonic() - began < 1
    assert not process.is_running()
    child.stop()
    assert child.pid is None
    with pytest.raises(TransferEngineError, match="stopped"):
        child.restart()
    assert deaths == []
    assert not [thread for thread in threading.enumerate() if thread.name == "te-keeper"]


def test_a_child_that_is_stopped_by_a_signal_blocks_nobody(chunks: list[Chunk], child: TransferEngineChild) -> None:
    port = child.start(chunks)
    assert child.responds()
    assert child.pid is not None
    first = child.pid
    os.kill(first, signal.SIGSTOP)
    began = time.monotonic()
    assert child.alive()
    assert not child.responds(timeout=0.3)
    assert time.monotonic() - began < 1
    began = time.monotonic()
    assert child.restart() == port
    assert time.monotonic() - began < 20
    assert child.pid != first
    assert child.responds()
    assert not psutil.pid_exists(first)


def test_a_late_answer_is_not_taken_for_the_next_one(chunks: list[Chunk], child: TransferEngineChild) -> None:
    child.start(chunks)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    assert not child.responds(timeout=0.1)
    os.kill(child.pid, signal.SIGCONT)
    assert all(child.responds(timeout=5) for _ in range(3))


def test_signals_meant_for_the_agent_do_not_end_the_child(chunks: list[Chunk], child: TransferEngineChild) -> None:
    child.start(chunks)
    assert child.pid is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(child.pid, number)
    assert child.responds(timeout=5)
    assert child.alive()


def test_a_start_under_way_is_interrupted_by_stop(chunks: list[Chunk], monkeypatch: pytest.MonkeyPatch) -> None:
    child = TransferEngineChild()
    with socket.socket() as stranger:
        port = child.start(chunks)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        eventually(lambda: not child.alive())
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("", port))
        stranger.listen()
        errors: list[BaseException] = []

        def restart() -> None:
            try:
                child.restart(timeout=60)
            except TransferEngineError as error:
                errors.append(error)

        thread = threading.Thread(target=restart)
        thread.start()
        time.sleep(0.5)
        child.stop()
        thread.join(10)
        assert not thread.is_alive()
        assert "stopped" in str(errors[0])


def test_a_range_that_is_taken_in_the_child_is_a_clear_error(chunks: list[Chunk], child: TransferEngineChild) -> None:
    class Twice:
        """The same place again, which the kernel refuses."""

        spec = chunks[0].spec
        address = chunks[0].address

        def share(self) -> object:
            return chunks[0].share()

        def host_view(self) -> memoryview:
            return chunks[0].host_view()

    with pytest.raises(TransferEngineError, match=f"{chunks[0].address:#x}"):
        child.start([*chunks, Twice()])  # type: ignore[list-item]
    assert not child.alive()
    assert child.pid is None


def test_no_descriptor_is_left_behind_by_starts_and_restarts(chunks: list[Chunk]) -> None:
    def cycle() -> None:
        child = TransferEngineChild()
        child.start(chunks)
        child.restart()
        child.stop()

    cycle()
    before = len(os.listdir("/proc/self/fd"))
    cycle()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_child_holds_no_descriptor_of_its_parent(chunks: list[Chunk], child: TransferEngineChild) -> None:
    with open("/dev/zero") as ours:
        os.set_inheritable(ours.fileno(), True)
        child.start(chunks)
        held = [os.readlink(path) for path in Path(f"/proc/{child.pid}/fd").iterdir()]
        assert "/dev/zero" not in held
        assert not [name for name in held if "egm-chunk" in name], "a chunk's descriptor is still open in the child"
        maps = Path(f"/proc/{child.pid}/maps").read_text()
        assert f"{chunks[0].address:x}-" in maps


def test_what_the_engine_prints_goes_to_the_log_and_nowhere_else(
    chunks: list[Chunk], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        child = TransferEngineChild(log_fd=file.fileno())
        child.start(chunks)
        child.stop()
    assert log.read_text()
    assert capfd.readouterr() == ("", "")


PARENT = """
import sys, threading, time
from egmctl.memory import ChunkSpec, provider_memory
from egmctl.mooncake.transfer_engine import TransferEngineChild
memory = provider_memory("shm", total_bytes=1 << 24)
chunk = memory.create(ChunkSpec(0, 0, 1 << 24), lambda done: None)
child = TransferEngineChild()
starter = threading.Thread(target=child.start, args=([chunk],))
starter.start()
starter.join()
print(child.pid, child.data_port, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("frozen", [False, True], ids=["running", "stopped by a signal"])
def test_the_child_does_not_outlive_a_parent_that_was_killed(frozen: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            pid, _port = map(int, parent.stdout.readline().split())
            time.sleep(0.2)  # the thread that asked for the start has ended by now; that alone must not end the child
            assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
            if frozen:
                os.kill(pid, signal.SIGSTOP)
        finally:
            parent.kill()
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 5)
