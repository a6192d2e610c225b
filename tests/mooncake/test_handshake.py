"""The handshake endpoint among good peers, slow ones, silent ones, rude ones and very many."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from egmctl import steps
from egmctl.errors import PreflightError, UsageError
from egmctl.mooncake.descriptor import (
    MAX_DESCRIPTOR_BYTES,
    DescriptorError,
    EgmFields,
    nvlink_descriptor,
    tcp_descriptor,
)
from egmctl.mooncake.handshake import (
    EndpointUnreachable,
    HandshakeServer,
    fetch_descriptor,
    format_endpoint,
    split_endpoint,
)
from tests.support.stock import StockEngine

BASE = 0x1000_0000_0000
MIB = 1 << 20
DESCRIPTOR = tcp_descriptor("h:1", [(BASE, MIB)], data_host="127.0.0.1", data_port=15000)
DATA = DESCRIPTOR.to_bytes()


@pytest.fixture
def server() -> Iterator[HandshakeServer]:
    with HandshakeServer("127.0.0.1", 0, lambda: DATA, peer_timeout=2.0) as running:
        yield running


def message(kind: int, body: bytes) -> bytes:
    return struct.pack("<QB", len(body) + 1, kind) + body


def connect(server: HandshakeServer) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=10)


def until_end(sock: socket.socket) -> bytes:
    """All that comes; a reset counts as an end."""
    data = b""
    with suppress(ConnectionResetError):
        while piece := sock.recv(1 << 20):
            data += piece
    return data


def exchange(server: HandshakeServer, data: bytes) -> bytes:
    with connect(server) as sock:
        sock.sendall(data)
        return until_end(sock)


def eventually(condition: Callable[[], object], within: float = 10.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def test_type_1_is_answered_with_the_descriptor_and_a_newline(server: HandshakeServer) -> None:
    answer = exchange(server, message(1, b"{}"))
    length, kind = struct.unpack_from("<QB", answer)
    assert kind == 1
    assert length == len(answer) - 8
    assert answer[9:] == DATA
    assert answer.endswith(b"}\n")


@pytest.mark.parametrize(
    ("kind", "answered", "field"), [(2, 2, "notify_msg"), (3, 3, "status"), (0, 0, "local_nic_path"), (9, 0, "qp_num")]
)
def test_other_types_get_what_a_stock_engine_says(
    server: HandshakeServer, kind: int, answered: int, field: str
) -> None:
    answer = exchange(server, message(kind, b"{}"))
    assert answer[8] == answered
    assert field in json.loads(answer[9:])


def test_a_request_in_single_bytes_is_answered(server: HandshakeServer) -> None:
    with connect(server) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in message(1, b'{"name": "x"}'):
            sock.sendall(bytes([byte]))
        assert until_end(sock)[9:] == DATA


@pytest.mark.parametrize(
    "data",
    [
        message(1, b""),
        message(1, b"{"),
        message(1, b"\xff" * 100),
        message(1, b"[" * 100_000),
        struct.pack("<Q", 0),
        struct.pack("<Q", MAX_DESCRIPTOR_BYTES + 1) + b"\x01",
        struct.pack("<Q", 2**64 - 1) + b"\x01",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["empty", "cut", "binary", "deep", "zero", "too long", "huge", "http"],
)
def test_garbage_is_closed_without_an_answer_and_the_next_peer_is_served(server: HandshakeServer, data: bytes) -> None:
    assert exchange(server, data) == b""
    assert fetch_descriptor(server.endpoint) == DESCRIPTOR


def test_a_message_of_exactly_a_mebibyte_is_answered(server: HandshakeServer) -> None:
    body = b'{"name":"' + b"x" * (MAX_DESCRIPTOR_BYTES - 1 - 11) + b'"}'
    assert len(body) + 1 == MAX_DESCRIPTOR_BYTES
    assert exchange(server, message(1, body))[9:] == DATA


def test_nothing_is_answered_while_there_is_no_descriptor() -> None:
    published = b""
    with HandshakeServer("127.0.0.1", 0, lambda: published) as server:
        with pytest.raises(EndpointUnreachable):
            fetch_descriptor(server.endpoint)
        published = DATA
        assert fetch_descriptor(server.endpoint) == DESCRIPTOR


def test_an_owner_that_fails_to_provide_costs_one_answer_only() -> None:
    answers: list[Exception | bytes] = [RuntimeError("no"), DATA]

    def provide() -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with HandshakeServer("127.0.0.1", 0, provide) as server:
        with pytest.raises(EndpointUnreachable):
            fetch_descriptor(server.endpoint)
        assert fetch_descriptor(server.endpoint) == DESCRIPTOR


def test_a_descriptor_of_a_mebibyte_arrives_whole_at_a_slow_reader() -> None:
    buffers = [(0, BASE + (i << 30), 1 << 30, bytes(64)) for i in range(5000)]
    large = nvlink_descriptor("h:1", buffers)
    with HandshakeServer("127.0.0.1", 0, large.to_bytes) as server:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(10)
            sock.connect((server.host, server.port))
            sock.sendall(message(1, b"{}"))
            data = b""
            while piece := sock.recv(65536):
                data += piece
                time.sleep(0.001)
        assert len(fetch_descriptor(server.endpoint).buffers) == 5000
        assert len(data) == struct.unpack_from("<Q", data)[0] + 8


def has_ended(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_peers_that_say_nothing_are_dropped_at_their_deadline_and_delay_nobody() -> None:
    with HandshakeServer("127.0.0.1", 0, lambda: DATA, peer_timeout=1.0) as server, ExitStack() as stack:
        began = time.monotonic()
        silent = stack.enter_context(connect(server))
        drip = stack.enter_context(connect(server))
        drip.sendall(struct.pack("<QB", 100_000, 1))
        deaf = stack.enter_context(connect(server))
        deaf.sendall(message(1, b"{}"))  # takes its answer and never closes
        while not (has_ended(silent) and has_ended(drip)):
            assert time.monotonic() - began < 10
            with suppress(OSError):
                drip.sendall(b" ")
            assert fetch_descriptor(server.endpoint) == DESCRIPTOR
            time.sleep(0.05)
        assert time.monotonic() - began > 0.9
        eventually(lambda: not server._peers)


def test_five_hundred_silent_peers_leave_the_endpoint_answering_at_once() -> None:
    with HandshakeServer("127.0.0.1", 0, lambda: DATA, peer_timeout=60) as server, ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(connect(server))
        eventually(lambda: len(server._peers) == 500)
        began = time.monotonic()
        for _ in range(20):
            assert fetch_descriptor(server.endpoint) == DESCRIPTOR
        assert time.monotonic() - began < 5


def test_five_hundred_askers_at_once_are_all_answered(server: HandshakeServer) -> None:
    with ExitStack() as stack:
        peers = [stack.enter_context(connect(server)) for _ in range(500)]
        for peer in peers:
            peer.sendall(message(1, b"{}"))
        assert all(until_end(peer)[9:] == DATA for peer in peers)
    assert server.answered == 500


def test_when_there_are_too_many_peers_the_oldest_gives_way() -> None:
    with HandshakeServer("127.0.0.1", 0, lambda: DATA, peer_timeout=60, max_peers=3) as server, ExitStack() as stack:
        first, *_ = [stack.enter_context(connect(server)) for _ in range(3)]
        eventually(lambda: len(server._peers) == 3)
        assert fetch_descriptor(server.endpoint) == DESCRIPTOR
        assert until_end(first) == b""
        assert len(server._peers) <= 3


def test_memory_for_half_sent_messages_is_bounded() -> None:
    with (
        HandshakeServer("127.0.0.1", 0, lambda: DATA, peer_timeout=60, max_buffered=2 * MIB) as server,
        ExitStack() as stack,
    ):
        for _ in range(12):
            sock = stack.enter_context(connect(server))
            with suppress(OSError):
                sock.sendall(message(1, b" " * (MIB - 2))[:-1])
        time.sleep(0.3)
        held = sum(len(peer.received) for peer in list(server._peers.values()))
        assert held == server._buffered
        assert 0 < held <= 2 * MIB
        assert fetch_descriptor(server.endpoint) == DESCRIPTOR


def test_a_peer_that_resets_is_no_trouble(server: HandshakeServer) -> None:
    for data in (b"", message(1, b"{}"), b"\x05"):
        sock = connect(server)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(data)
        sock.close()
    assert fetch_descriptor(server.endpoint) == DESCRIPTOR
    eventually(lambda: not server._peers)


def test_a_peer_that_closes_its_sending_side_early_is_dropped(server: HandshakeServer) -> None:
    with connect(server) as sock:
        sock.sendall(message(1, b"{}")[:5])
        sock.shutdown(socket.SHUT_WR)
        assert until_end(sock) == b""


def test_running_out_of_descriptors_is_survived_without_spinning(server: HandshakeServer) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir("/proc/self/fd"))
    sock = socket.socket()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken, limits[1]))
        hogs = []
        with suppress(OSError):
            while True:
                hogs.append(os.dup(0))
        before = time.thread_time_ns(), time.process_time()
        sock.connect((server.host, server.port))
        time.sleep(0.5)
        assert time.process_time() - before[1] < 0.25
        for hog in hogs:
            os.close(hog)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        sock.settimeout(5)
        sock.sendall(message(1, b"{}"))
        assert until_end(sock)[9:] == DATA
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        sock.close()


def test_other_threads_keep_their_rhythm_while_the_endpoint_is_flooded(server: HandshakeServer) -> None:
    over = threading.Event()
    body = message(1, b'{"buffers":[' + b"1," * 400_000 + b"1]}")

    def flood() -> None:
        while not over.is_set():
            with suppress(OSError):
                exchange(server, body)

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        worst, last = 0.0, time.monotonic()
        for _ in range(100):
            time.sleep(0.01)
            now = time.monotonic()
            worst, last = max(worst, now - last), now
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert worst < 0.6, "a ping every second would be late"


def test_closing_leaves_no_thread_and_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    server = HandshakeServer("127.0.0.1", 0, lambda: DATA)
    with connect(server) as sock:
        eventually(lambda: server._peers)
        server.close()
        server.close()
        assert until_end(sock) == b""
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    with pytest.raises(EndpointUnreachable):
        fetch_descriptor(server.endpoint)


def test_a_close_that_failed_can_be_repeated() -> None:
    class Failing:
        def before(self, site: str, detail: dict[str, object]) -> None:
            if site == "handshake.close":
                raise OSError("told to fail")

        def after(self, site: str, detail: dict[str, object], error: BaseException | None) -> None:
            pass

    threads = threading.active_count()
    server = HandshakeServer("127.0.0.1", 0, lambda: DATA)
    steps.watch(Failing())
    try:
        with pytest.raises(OSError, match="told"):
            server.close()
    finally:
        steps.watch(None)
    assert fetch_descriptor(server.endpoint) == DESCRIPTOR
    server.close()
    assert threading.active_count() == threads


def test_a_fixed_port_can_be_used_again_at_once_although_connections_linger() -> None:
    with HandshakeServer("127.0.0.1", 0, lambda: DATA) as server:
        port = server.port
        for _ in range(5):
            fetch_descriptor(server.endpoint)
        lingering = connect(server)
        eventually(lambda: server._peers)
    with lingering, HandshakeServer("127.0.0.1", port, lambda: DATA) as again:
        assert again.port == port
        assert fetch_descriptor(again.endpoint) == DESCRIPTOR


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_fixed_port_that_is_taken_is_refused_naming_the_holder(address: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PreflightError, match=rf"port {port} is taken by .*pid {os.getpid()}") as caught:
            HandshakeServer("127.0.0.1", port, lambda: DATA)
        assert caught.value.exit_code == 3
        assert str(port) in caught.value.where
        assert caught.value.hint
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid", "x" * 300])
def test_a_host_that_is_not_this_machine_is_refused(host: str) -> None:
    with pytest.raises(PreflightError) as caught:
        HandshakeServer(host, 0, lambda: DATA)
    assert "local_hostname" in caught.value.hint


def test_a_name_is_bound_and_told_as_given() -> None:
    with HandshakeServer("localhost", 0, lambda: DATA) as server:
        assert server.endpoint == f"localhost:{server.port}"
        assert fetch_descriptor(server.endpoint) == DESCRIPTOR


@pytest.mark.parametrize("endpoint", ["", "x", "x:", ":1", "x:0", "x:65536", "x:-1", "x:1a", "x:²"])
def test_what_is_no_endpoint_is_a_usage_error(endpoint: str) -> None:
    with pytest.raises(UsageError):
        split_endpoint(endpoint)


def test_endpoints_of_both_address_families_are_split_and_joined() -> None:
    assert split_endpoint("10.0.0.1:80") == ("10.0.0.1", 80)
    assert split_endpoint("[::1]:80") == ("::1", 80)
    assert format_endpoint("::1", 80) == "[::1]:80"


class Peer:
    """Answers one connection with given bytes, then holds it for a while."""

    def __init__(self, answer: bytes, hold: float = 0.0) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.answer, self.over = answer, threading.Event()
        self.hold = hold
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        sock, _ = self.listener.accept()
        with sock, suppress(OSError):
            sock.recv(100)
            for piece in (self.answer[i : i + 100_000] for i in range(0, len(self.answer), 100_000)):
                sock.sendall(piece)
            self.over.wait(self.hold)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        self.listener.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", EndpointUnreachable),
        (message(1, DATA)[:-3], EndpointUnreachable),
        (struct.pack("<QB", 2**63, 1), DescriptorError),
        (struct.pack("<QB", 0, 1), DescriptorError),
        (message(2, b"{}"), DescriptorError),
        (message(1, b"nonsense"), DescriptorError),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", DescriptorError),
    ],
)
def test_a_wrong_answer_is_a_clear_error_naming_the_endpoint(answer: bytes, error: type[Exception]) -> None:
    with Peer(answer) as peer, pytest.raises(error) as caught:
        fetch_descriptor(peer.endpoint, timeout=3)
    assert peer.endpoint in str(caught.value)


def test_asking_a_silent_endpoint_ends_in_time() -> None:
    with Peer(message(1, DATA)[:20], hold=5) as peer:
        began = time.monotonic()
        with pytest.raises(EndpointUnreachable, match="in time"):
            fetch_descriptor(peer.endpoint, timeout=0.4)
        assert time.monotonic() - began < 1.5


def test_asking_a_closed_port_is_a_clear_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(EndpointUnreachable, match="refused"):
            fetch_descriptor(f"127.0.0.1:{free.getsockname()[1]}")


def test_the_stock_engine_reads_our_nvlink_descriptor_from_the_endpoint() -> None:
    egm = EgmFields("dev", "ab" * 16, "cuda-fabric", "/run/x.sock", "cd" * 16, True)
    published = b""
    with HandshakeServer("127.0.0.1", 0, lambda: published) as server, StockEngine() as engine:
        from egmctl.mooncake.descriptor import EgmChunk

        chunks = (EgmChunk(0, 1, BASE, MIB), EgmChunk(1, 1, BASE + MIB, MIB))
        egm = EgmFields(**{**egm.__dict__, "chunks": chunks})
        buffers = [(chunk.numa_node, chunk.addr, chunk.length, bytes(64)) for chunk in chunks]
        published = nvlink_descriptor(server.endpoint, buffers, egm=egm).to_bytes()
        assert engine.first_buffer_address(server.endpoint) == BASE
