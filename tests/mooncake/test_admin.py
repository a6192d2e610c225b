"""The Master's admin port: real answers of both versions, and peers that are none."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from egmctl.errors import UsageError
from egmctl.mooncake.admin import AdminClient, AdminUnreachable
from egmctl.mooncake.master import MasterClient, Segment, new_uuid
from tests.support.master import Master


def test_segments_objects_and_health_are_listed(any_master: Master) -> None:
    admin = AdminClient(any_master.admin_address)
    assert admin.segments_detail() == []
    assert admin.keys() == []
    health = admin.health()
    assert (health["status"], health["service_ready"]) == ("ok", True)
    me = new_uuid()
    chunks = [
        Segment(new_uuid(), f"10.0.0.1:7/numa0/{index}", (index + 1) << 40, 64 << 20, "10.0.0.1:7", "tcp")
        for index in range(3)
    ]
    with MasterClient(any_master.address) as client:
        client.remount_segments(chunks, me)
        client.put_start(me, "some/key", 1000)
        client.put_end(me, "some/key")
        rows = {row.segment_id: row for row in admin.segments_detail()}
        assert set(rows) == {chunk.id for chunk in chunks}
        for chunk in chunks:
            row = rows[chunk.id]
            assert (row.client_id, row.name, row.base, row.size) == (me, chunk.name, chunk.base, chunk.size)
            assert (row.te_endpoint, row.protocol, row.status) == (chunk.te_endpoint, "tcp", "OK")
        assert sum(row.allocator_used_bytes for row in rows.values()) >= 1000
        assert admin.keys() == ["some/key"]
        found = admin.query_key("some/key")
        assert found is not None
        assert found["success"] is True
        assert admin.query_key("missing") is None
        client.graceful_unmount_segment(chunks[0].id, me, 5000)
        (draining,) = [row for row in admin.segments_detail() if row.segment_id == chunks[0].id]
        assert (draining.status, draining.allocator_used_bytes) == ("GRACEFULLY_UNMOUNTING", 0)


@pytest.mark.parametrize("key", ["", "a b", "ü", "a&b", "a#b", "a\r\nb"])
def test_a_key_that_the_undecoded_query_cannot_carry_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match="cannot be asked"):
        AdminClient("127.0.0.1:1").query_key(key)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="master_admin_addr"):
        AdminClient("nonsense")


def test_nobody_listening_is_unreachable_and_says_where() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(AdminUnreachable, match="refused") as caught:
        AdminClient(address).health()
    assert caught.value.where == address
    assert "--metrics_port" in caught.value.hint


def test_the_rpc_port_is_no_admin_port(master: Master) -> None:
    with pytest.raises(AdminUnreachable):
        AdminClient(master.address, timeout=2).health()


@contextmanager
def answering(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(20)
                sock.recv(65536)
                serve(sock)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()
        thread.join(20)


def _page(body: bytes, status: str = "200 OK") -> Callable[[socket.socket], None]:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return lambda sock: sock.sendall(head + body)


ROW = (
    '{"segment_name":"n","segment_id":"1-2","client_id":"3-4","base_address":"0x10","size_bytes":5,'
    '"te_endpoint":"e","protocol":"tcp","status":"OK","allocator_used_bytes":0}'
)


def test_a_minimal_row_is_read() -> None:
    with answering(_page(b'{"segments":[' + ROW.encode() + b"]}")) as address:
        (row,) = AdminClient(address).segments_detail()
    assert (row.segment_id, row.client_id, row.base, row.size) == ((1, 2), (3, 4), 16, 5)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"segments":5}',
        '{"segments":[5]}',
        '{"segments":[{}]}',
        "[" * 100_000,
        ROW.join(('{"segments":[', "]}")).replace('"1-2"', '"1"'),
        ROW.join(('{"segments":[', "]}")).replace('"1-2"', '"-1-2"'),
        ROW.join(('{"segments":[', "]}")).replace('"1-2"', '"1-99999999999999999999"'),
        ROW.join(('{"segments":[', "]}")).replace('"0x10"', '"z"'),
        ROW.join(('{"segments":[', "]}")).replace('"0x10"', "16"),
        ROW.join(('{"segments":[', "]}")).replace('"size_bytes":5', '"size_bytes":-5'),
        ROW.join(('{"segments":[', "]}")).replace('"protocol":"tcp"', '"protocol":null'),
    ],
)
def test_an_answer_of_another_form_is_one_clear_error(body: str) -> None:
    with answering(_page(body.encode())) as address, pytest.raises(AdminUnreachable, match="not one of a Mooncake"):
        AdminClient(address).segments_detail()


def test_another_status_is_told() -> None:
    with answering(_page(b"", "503 Busy")) as address, pytest.raises(AdminUnreachable, match="HTTP 503"):
        AdminClient(address).health()


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"], ids=["head", "body"])
def test_a_peer_that_drips_is_given_up_in_time(start: bytes) -> None:
    stop = threading.Event()

    def drip(sock: socket.socket) -> None:
        sock.sendall(start)
        with contextlib.suppress(OSError):
            while not stop.wait(0.05):
                sock.sendall(b"H")

    with answering(drip) as address:
        began = time.monotonic()
        with pytest.raises(AdminUnreachable, match=r"no answer within 0\.5 s"):
            AdminClient(address, timeout=0.5).health()
        assert time.monotonic() - began < 3
        stop.set()


def test_an_endless_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from egmctl.mooncake import admin

    monkeypatch.setattr(admin, "MAX_ANSWER", 1000)
    with answering(_page(b"x" * 100_000)) as address, pytest.raises(AdminUnreachable, match="more than 1000"):
        AdminClient(address).keys()
