"""The connection to a Master, against scripted peers on real sockets (what a real Master does is in test_master.py)."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from egmctl.errors import UsageError
from egmctl.mooncake import link as link_module
from egmctl.mooncake import rpc as rpc_module
from egmctl.mooncake.codec import build
from egmctl.mooncake.errors import MasterLost, MasterRpcError, MasterTimeout, MasterUnreachable
from egmctl.mooncake.rpc import Reply, RpcConnection, function_id, parse_address

Request = tuple[int, int, bytes]  # seq, function id, body


class Peer:
    """One accepted connection, seen from the other side."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(20)

    def exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.sock.recv(min(1 << 20, count - len(data)))
            if not part:
                raise EOFError
            data += part
        return data

    def request(self) -> Request:
        magic, _, _, _, seq, number, length, attachment = struct.unpack("<BBBBIIII", self.exactly(20))
        assert (magic, attachment) == (21, 0)
        return seq, number, self.exactly(length)

    def answer(self, seq: int, body: bytes, err: int = 0) -> None:
        self.sock.sendall(struct.pack("<BBBBIII", 21, 0, err, 0, seq, len(body), 0) + body)


class Server:
    """Accepts connections on a loopback port and runs ``script`` for each, in a thread of its own."""

    def __init__(self, script: Callable[[Peer], None]) -> None:
        self.script = script
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.accepted = 0
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self.accepted += 1
            thread = threading.Thread(target=self._serve, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                self.script(Peer(sock))
            except (EOFError, ConnectionError):
                pass
            except BaseException as error:
                self.errors.append(error)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self._threads:
            thread.join(20)
        assert not self.errors


@contextmanager
def serving(script: Callable[[Peer], None], *, timeout: float = 10.0) -> Iterator[tuple[RpcConnection, Server]]:
    server = Server(script)
    rpc = RpcConnection(server.address, timeout=timeout)
    try:
        yield rpc, server
    finally:
        rpc.close()
        server.close()


def echo(peer: Peer) -> None:
    while True:
        seq, _, body = peer.request()
        peer.answer(seq, body)


# -- addresses


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("127.0.0.1:50051", ("127.0.0.1", 50051)),
        ("master.example:1", ("master.example", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fd00::1]:50051", ("fd00::1", 50051)),
    ],
)
def test_an_address_is_host_and_port(address: str, wanted: tuple[str, int]) -> None:
    assert parse_address(address) == wanted


@pytest.mark.parametrize(
    "address",
    ["", ":", "host", "host:", ":1", "host:0", "host:65536", "host:1x", "host:-1", "::1:5", "[::1]", "[::1", "[host]:1",
     "a b:1", "host:1:2", "http//x:1", "host:٣", "[]:1", "host:" + "1" * 5000],
)  # fmt: skip
def test_what_is_not_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match=r"is not host:port"):
        parse_address(address)


@pytest.mark.parametrize("scheme", ["etcd", "redis", "k8s"])
def test_the_address_of_a_high_availability_back_end_is_refused_in_one_sentence(scheme: str) -> None:
    with pytest.raises(UsageError, match=f"through {scheme} is not supported") as caught:
        RpcConnection(f"{scheme}://10.0.0.1:2379;10.0.0.2:2379")
    assert "host:port" in caught.value.hint
    assert "\n" not in str(caught.value)


# -- answers


def test_a_call_is_answered_and_nothing_is_connected_before_it() -> None:
    with serving(echo) as (rpc, server):
        time.sleep(0.05)
        assert (rpc.epoch, server.accepted, rpc.connected()) == (0, 0, False)
        assert rpc.call("Ping", b"hello") == b"hello"
        assert (rpc.epoch, server.accepted, rpc.connected()) == (1, 1, True)


def test_the_function_number_and_an_empty_body_are_sent() -> None:
    seen = []

    def script(peer: Peer) -> None:
        seq, number, body = peer.request()
        seen.append((number, body))
        peer.answer(seq, b"")

    with serving(script) as (rpc, _):
        assert rpc.call("ServiceReady") == b""
    assert seen == [(function_id("ServiceReady"), b"")]


def test_answers_in_any_order_reach_their_own_requests() -> None:
    def script(peer: Peer) -> None:
        requests = [peer.request() for _ in range(200)]
        random.Random(7).shuffle(requests)
        for seq, _, body in requests:
            peer.answer(seq, body)

    with serving(script) as (rpc, server):
        replies = [rpc.submit("ExistKey", f"{index}".encode()) for index in range(200)]
        assert [reply.result() for reply in replies] == [f"{index}".encode() for index in range(200)]
        assert server.accepted == 1


def test_many_threads_share_a_connection_and_each_gets_its_own_answers() -> None:
    def script(peer: Peer) -> None:
        source = random.Random(3)
        held: list[Request] = []
        peer.sock.settimeout(0.002)
        while True:
            try:
                held.append(peer.request())
            except TimeoutError:
                pass
            if len(held) > 6 or source.random() < 0.5:
                source.shuffle(held)
                for seq, _, body in held:
                    peer.answer(seq, body)
                held.clear()

    wrong: list[object] = []

    def work(name: int) -> None:
        for index in range(60):
            body = f"{name}/{index}".encode() * (1 + index % 50)
            try:
                if rpc.call("ExistKey", body) != body:
                    wrong.append(body)
            except Exception as error:
                wrong.append(error)

    with serving(script) as (rpc, server):
        threads = [threading.Thread(target=work, args=(name,)) for name in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert server.accepted == 1


def test_two_threads_may_wait_for_one_reply() -> None:
    go = threading.Event()

    def script(peer: Peer) -> None:
        seq, _, body = peer.request()
        go.wait(10)
        peer.answer(seq, body)

    with serving(script) as (rpc, _):
        reply = rpc.submit("ExistKey", b"x")
        got: list[bytes] = []
        threads = [threading.Thread(target=lambda: got.append(reply.result())) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        began = time.monotonic()
        go.set()
        for thread in threads:
            thread.join(10)
        assert got == [b"x"] * 3
        assert time.monotonic() - began < 2


def test_an_answer_in_many_pieces_and_many_answers_in_one_piece_are_read() -> None:
    big = os.urandom(3_000_000)

    def script(peer: Peer) -> None:
        seq, _, _ = peer.request()
        frame = struct.pack("<BBBBIII", 21, 0, 0, 0, seq, 5, 3) + b"small" + b"att"
        for byte in frame:
            peer.sock.sendall(bytes((byte,)))
            time.sleep(0.001)
        first, second = peer.request(), peer.request()
        peer.sock.sendall(
            b"".join(
                struct.pack("<BBBBIII", 21, 0, 0, 0, seq, len(body), 0) + body
                for seq, body in ((second[0], big), (first[0], b"one"))
            )
        )
        peer.request()

    with serving(script) as (rpc, _):
        assert rpc.call("Ping", b"") == b"small"
        first, second = rpc.submit("Ping", b""), rpc.submit("Ping", b"")
        assert second.result() == big
        assert first.result() == b"one"


def test_a_large_request_gets_through_to_a_peer_that_first_wants_its_answers_read() -> None:
    big = os.urandom(8_000_000)

    def script(peer: Peer) -> None:
        seq, _, _ = peer.request()
        peer.answer(seq, b"y" * 16_000_000)  # blocks until it is read; only then is the next request read
        seq, _, body = peer.request()
        peer.answer(seq, body[-10:])

    with serving(script) as (rpc, _):
        first = rpc.submit("BatchGetReplicaList", b"")
        time.sleep(0.1)
        second = rpc.submit("BatchPutStart", big)
        assert second.result() == big[-10:]
        assert len(first.result()) == 16_000_000


def test_done_looks_at_the_socket_without_waiting() -> None:
    go = threading.Event()

    def script(peer: Peer) -> None:
        seq, _, body = peer.request()
        go.wait(10)
        peer.answer(seq, body)
        peer.request()

    with serving(script) as (rpc, _):
        reply = rpc.submit("Ping", b"x")
        began = time.monotonic()
        assert not reply.done()
        assert time.monotonic() - began < 1
        go.set()
        deadline = time.monotonic() + 10
        while not reply.done() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert reply.result(0) == b"x"


# -- errors of the call itself


def test_an_error_of_the_call_is_told_with_its_text_and_the_connection_stays() -> None:
    text = build(b"\x80\x0c", "invalid rpc arg")

    def script(peer: Peer) -> None:
        for body, err in ((text, 4), (b"not a message", 11), (b"fine", 0)):
            peer.answer(peer.request()[0], body, err)

    with serving(script) as (rpc, server):
        with pytest.raises(MasterRpcError, match="invalid rpc arg") as caught:
            rpc.call("MountSegment", b"")
        assert (caught.value.number, caught.value.call) == (4, "MountSegment")
        with pytest.raises(MasterRpcError, match="err_code 11"):
            rpc.call("Ping", b"")
        assert rpc.call("Ping", b"") == b"fine"
        assert server.accepted == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        struct.pack("<BBBBIII", 21, 0, 0, 0, 1, 0xFFFFFFFF, 0),
        struct.pack("<BBBBIII", 21, 0, 0, 0, 1, 0, 0xFFFFFFFF),
        b"\0" * 16,
    ],
    ids=["http", "endless-body", "endless-attachment", "zeros"],
)
def test_a_peer_that_is_no_master_is_told_apart_at_once(answer: bytes) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.sock.sendall(answer)
        peer.exactly(1)

    with serving(script) as (rpc, _):
        began = time.monotonic()
        with pytest.raises(MasterLost):
            rpc.call("Ping", b"")
        assert time.monotonic() - began < 5
        assert not rpc.connected()


def test_an_answer_to_nothing_is_dropped() -> None:
    def script(peer: Peer) -> None:
        seq, _, body = peer.request()
        peer.answer(seq + 1000, b"whose?")
        peer.answer(seq, body)

    with serving(script) as (rpc, _):
        assert rpc.call("Ping", b"mine") == b"mine"


# -- time


def test_a_late_answer_is_reported_and_disturbs_no_later_call() -> None:
    go = threading.Event()

    def script(peer: Peer) -> None:
        late = peer.request()
        while True:
            seq, _, body = peer.request()
            peer.answer(seq, body)
            if go.is_set():
                peer.answer(late[0], b"late")

    with serving(script) as (rpc, _):
        began = time.monotonic()
        with pytest.raises(MasterTimeout) as caught:
            rpc.call("MountSegment", b"slow", timeout=0.15)
        assert 0.1 < time.monotonic() - began < 5
        assert caught.value.may_take_effect
        reply = caught.value.reply
        assert reply is not None
        told: list[Reply[bytes]] = []
        heard = threading.Event()
        reply.add_done_callback(lambda r: (told.append(r), heard.set()))
        assert rpc.call("Ping", b"1") == b"1"
        assert not told
        go.set()
        assert rpc.call("Ping", b"2") == b"2"
        assert heard.wait(10)
        assert told == [reply]
        assert reply.result(0) == b"late"
        assert rpc.call("Ping", b"3") == b"3"


def test_a_timed_out_reply_can_be_waited_for_again() -> None:
    go = threading.Event()

    def script(peer: Peer) -> None:
        seq, _, body = peer.request()
        go.wait(10)
        peer.answer(seq, body)
        peer.request()

    with serving(script) as (rpc, _):
        reply = rpc.submit("MountSegment", b"x")
        for _ in range(2):
            with pytest.raises(MasterTimeout):
                reply.result(0.05)
        go.set()
        assert reply.result(10) == b"x"


def test_a_callback_runs_though_nobody_waits_and_at_once_when_it_is_finished() -> None:
    with serving(echo) as (rpc, _):
        heard = threading.Event()
        reply = rpc.submit("Ping", b"x")
        reply.add_done_callback(lambda _: heard.set())
        assert heard.wait(10)
        again: list[bool] = []
        reply.add_done_callback(lambda r: again.append(r.finished))
        assert again == [True]


def test_a_callback_that_fails_is_logged_and_the_reading_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Reply[bytes]) -> None:
        raise RuntimeError("told wrong")

    with serving(echo) as (rpc, _):
        reply = rpc.submit("Ping", b"x")
        reply.add_done_callback(fail)
        assert rpc.call("Ping", b"y") == b"y"
        assert reply.result() == b"x"
    assert "told wrong" in caplog.text


def test_impatient_threads_hand_the_reading_on() -> None:
    def script(peer: Peer) -> None:
        held = []
        peer.sock.settimeout(0.3)
        while True:
            try:
                held.append(peer.request())
            except TimeoutError:
                for seq, _, body in held:
                    if body != b"never":
                        peer.answer(seq, body)
                held.clear()

    outcomes: list[object] = []

    def work(patient: bool) -> None:
        try:
            outcomes.append(rpc.call("Ping", b"yes" if patient else b"never", timeout=20 if patient else 0.05))
        except MasterTimeout:
            outcomes.append("timeout")

    with serving(script) as (rpc, _):
        rpc.call("Ping", b"warm")
        threads = [threading.Thread(target=work, args=(index % 3 == 0,)) for index in range(18)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert time.monotonic() - began < 10
        assert sorted(map(str, outcomes)) == [str(b"yes")] * 6 + ["timeout"] * 12


def test_a_request_that_the_peer_does_not_take_has_no_effect_and_ends_the_connection() -> None:
    stop = threading.Event()

    def script(peer: Peer) -> None:
        stop.wait(20)

    with serving(script) as (rpc, _):
        with pytest.raises(MasterUnreachable) as caught:
            rpc.call("BatchPutStart", b"x" * (32 << 20), timeout=0.3)
        assert not caught.value.may_take_effect
        assert not rpc.connected()
        stop.set()


def test_there_is_a_bound_on_unanswered_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_IN_FLIGHT", 3)

    def script(peer: Peer) -> None:
        while True:
            peer.request()

    with serving(script) as (rpc, _):
        for _ in range(3):
            rpc.submit("Ping", b"")
        with pytest.raises(MasterUnreachable, match="3 requests wait"):
            rpc.submit("Ping", b"")


# -- the connection's end


def test_a_request_whose_connection_breaks_is_lost_and_not_sent_again() -> None:
    requests: list[bytes] = []

    def script(peer: Peer) -> None:
        requests.append(peer.request()[2])

    with serving(script) as (rpc, server):
        began = time.monotonic()
        with pytest.raises(MasterLost) as caught:
            rpc.call("MountSegment", b"once")
        assert time.monotonic() - began < 5
        assert isinstance(caught.value, MasterTimeout)
        assert caught.value.may_take_effect
        time.sleep(0.1)
        assert requests == [b"once"]
        assert server.accepted == 1


def test_all_requests_in_flight_are_lost_together_and_callbacks_told() -> None:
    def script(peer: Peer) -> None:
        for _ in range(5):
            peer.request()

    with serving(script) as (rpc, _):
        told: list[int] = []
        replies = [rpc.submit("Ping", b"") for _ in range(5)]
        for reply in replies:
            reply.add_done_callback(lambda r: told.append(r.seq))
        for reply in replies:
            with pytest.raises(MasterLost):
                reply.result()
        deadline = time.monotonic() + 10  # callbacks run in the thread that saw the end, after the waiters are woken
        while len(told) < 5 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert sorted(told) == sorted(reply.seq for reply in replies)


def test_an_idle_connection_that_the_peer_closed_is_noticed_and_made_anew() -> None:
    def script(peer: Peer) -> None:
        seq, _, body = peer.request()
        peer.answer(seq, body)

    with serving(script) as (rpc, server):
        for number in range(1, 4):
            assert rpc.call("Ping", b"x") == b"x"
            assert rpc.epoch == number
            deadline = time.monotonic() + 10
            while rpc.connected() and time.monotonic() < deadline:
                time.sleep(0.005)
            assert not rpc.connected()
        assert server.accepted == 3


def test_the_peers_end_is_seen_behind_an_answer_nobody_has_read() -> None:
    def script(peer: Peer) -> None:
        seq, _, body = peer.request()
        peer.answer(seq, body)

    with serving(script) as (rpc, _):
        reply = rpc.submit("Ping", b"x")
        deadline = time.monotonic() + 10
        while rpc.connected() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert not rpc.connected()
        assert reply.result() == b"x"


def test_nobody_listening_is_unreachable_and_says_where() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with RpcConnection(address) as rpc, pytest.raises(MasterUnreachable, match="refused") as caught:
        rpc.call("Ping", b"")
    assert caught.value.where == address
    assert caught.value.hint


def test_a_name_that_does_not_resolve_is_unreachable() -> None:
    with RpcConnection("no-such-host.invalid:1") as rpc, pytest.raises(MasterUnreachable, match="cannot resolve"):
        rpc.call("Ping", b"")


def test_connecting_has_a_time_limit() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fill = [socket.socket() for _ in range(4)]
        for sock in fill:
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        try:
            with RpcConnection(f"127.0.0.1:{listener.getsockname()[1]}") as rpc:
                began = time.monotonic()
                with pytest.raises(MasterUnreachable, match="no answer in time"):
                    rpc.call("Ping", b"", timeout=0.3)
                assert time.monotonic() - began < 3
        finally:
            for sock in fill:
                sock.close()


def test_a_connection_to_oneself_is_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    class Narcissus(socket.socket):
        def connect(self, address: object) -> None:
            self.bind(address)  # type: ignore[arg-type]
            super().connect(address)  # type: ignore[arg-type]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setattr(rpc_module.socket, "socket", Narcissus)
    with RpcConnection(address) as rpc, pytest.raises(MasterUnreachable, match="refused"):
        rpc.call("Ping", b"")


def test_close_wakes_everybody_and_nothing_is_sent_afterwards() -> None:
    def script(peer: Peer) -> None:
        while True:
            peer.request()

    with serving(script, timeout=60) as (rpc, server):
        errors: list[BaseException] = []

        def work() -> None:
            try:
                rpc.call("Ping", b"")
            except MasterLost as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(5)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        began = time.monotonic()
        rpc.close()
        for thread in threads:
            thread.join(10)
        assert time.monotonic() - began < 5
        assert len(errors) == 5
        with pytest.raises(MasterUnreachable, match="closed here"):
            rpc.call("Ping", b"")
        assert server.accepted == 1
        rpc.close()


def test_a_closed_connection_leaves_no_descriptor_and_no_thread() -> None:
    def open_descriptors() -> set[str]:
        return {f"{fd}:{os.readlink(f'/proc/self/fd/{fd}')}" for fd in os.listdir("/proc/self/fd") if _is_socket(fd)}

    def _is_socket(fd: str) -> bool:
        try:
            return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except OSError:
            return False

    def script(peer: Peer) -> None:
        while True:
            peer.request()

    before = open_descriptors()
    with serving(script) as (rpc, _):
        with pytest.raises(MasterTimeout):
            rpc.call("Ping", b"", timeout=0.05)
        assert any(t.name.startswith("egmctl-rpc") for t in threading.enumerate())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (
        open_descriptors() - before or any(t.name.startswith("egmctl-rpc") for t in threading.enumerate())
    ):
        time.sleep(0.01)
    assert open_descriptors() - before == set()
    assert not any(t.name.startswith("egmctl-rpc") for t in threading.enumerate())


def test_the_connection_is_not_inherited_by_programs_that_are_started() -> None:
    with serving(echo) as (rpc, _):
        rpc.call("Ping", b"")
        assert rpc._link is not None
        assert not os.get_inheritable(rpc._link.fd)
        assert rpc._link.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_forked_child_has_a_connection_of_its_own_and_the_parent_keeps_its() -> None:
    ended = threading.Event()

    def script(peer: Peer) -> None:
        try:
            while True:
                seq, _, body = peer.request()
                if body != b"never":
                    peer.answer(seq, body)
        except EOFError:
            ended.set()

    with serving(script) as (rpc, server):
        assert rpc.call("Ping", b"parent") == b"parent"
        open_reply = rpc.submit("Ping", b"never")
        ready, stop = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with pytest.raises(MasterLost):
                    open_reply.result(5)
                fine = not rpc.connected() and rpc.call("Ping", b"child") == b"child" and rpc.epoch == 2
                os.write(ready[1], b"y" if fine else b"n")
                os.close(stop[1])
                os.read(stop[0], 1)
                code = 0
            finally:
                os._exit(code)
        try:
            os.close(ready[1])
            os.close(stop[0])
            assert os.read(ready[0], 1) == b"y"
            assert rpc.call("Ping", b"parent again") == b"parent again"
            assert rpc.epoch == 1
            assert server.accepted == 2
            assert not ended.is_set()
            rpc.close()
            assert ended.wait(10)  # the child, which lives, does not hold the parent's connection open
        finally:
            os.close(stop[1])
            os.close(ready[0])
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_request_larger_than_the_bound_is_not_sent() -> None:
    with serving(echo) as (rpc, server):
        with pytest.raises(UsageError, match="is more than"):
            rpc.call("BatchPutStart", bytes((64 << 20) + 1))
        assert server.accepted == 0
