"""The HTTP metadata server: real ones of the Master, and ones that misbehave."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import pytest

from egmctl.errors import FailedError, UsageError
from egmctl.mooncake.descriptor import EgmChunk, EgmFields, SegmentDescriptor, nvlink_descriptor, parse_descriptor
from egmctl.mooncake.metadata import ForeignDescriptorError, MetadataClient, MetadataUnreachable, descriptor_key
from tests.support.master import ALL_VERSIONS, Master, MasterMissing
from tests.support.stock import StockEngine

BASE = 0x1000_0000_0000
MIB = 1 << 20


@pytest.fixture(scope="module", params=ALL_VERSIONS)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A real metadata server; tests use keys of their own."""
    try:
        master = Master(request.param, http_metadata=True)
    except MasterMissing as missing:
        pytest.skip(str(missing))
    with master:
        yield master.metadata_url


def descriptor(endpoint: str, *, pool: str = "dev", nonce: str = "aa" * 16, address: int = BASE) -> SegmentDescriptor:
    egm = EgmFields(pool, nonce, "cuda-fabric", "/run/x.sock", "cd" * 16, True, (EgmChunk(0, 0, address, MIB),))
    return nvlink_descriptor(endpoint, [(0, address, MIB, bytes(64))], egm=egm)


def test_what_is_put_is_got_and_deleted_once(url: str) -> None:
    client = MetadataClient(url)
    key = descriptor_key("10.0.0.1:7001")
    assert client.get(key) is None
    client.put(key, b'{"a": 1}')
    assert client.get(key) == b'{"a": 1}'
    client.put(key, b"{}")
    assert client.get(key) == b"{}"
    assert client.delete(key)
    assert not client.delete(key)
    assert client.get(key) is None


def test_the_key_travels_percent_encoded_in_upper_case_its_slashes_too(url: str) -> None:
    client = MetadataClient(url)
    client.put(descriptor_key("10.0.0.2:7002"), b"{}")
    parts = urlsplit(url)

    def status(query: str) -> int:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5)
        connection.request("GET", f"{parts.path}?key={query}")
        code = connection.getresponse().status
        connection.close()
        return code

    assert status("mooncake%2Fram%2F10.0.0.2%3A7002") == 200
    assert status("mooncake%2fram%2f10.0.0.2%3a7002") == 404
    assert status("mooncake/ram/10.0.0.2:7002") == 404


@pytest.mark.parametrize("name", ["pool 7&x=1#?", "pöl", "a/b", "%2F", "~x_y-z.0"])
def test_any_name_is_a_key_of_its_own(url: str, name: str) -> None:
    client = MetadataClient(url)
    client.put(descriptor_key(name), name.encode())
    assert client.get(descriptor_key(name)) == name.encode()
    assert client.delete(descriptor_key(name))


def test_a_descriptor_of_a_mebibyte_is_kept_whole(url: str) -> None:
    buffers = [(0, BASE + (i << 30), 1 << 30, bytes(64)) for i in range(5000)]
    large = nvlink_descriptor("10.0.0.3:7003", buffers).to_bytes()
    client = MetadataClient(url)
    client.put(descriptor_key("10.0.0.3:7003"), large)
    assert client.get(descriptor_key("10.0.0.3:7003")) == large


def test_a_first_publication_is_created_and_a_repeated_one_is_the_same(url: str) -> None:
    client = MetadataClient(url)
    mine = descriptor("10.0.0.4:7004")
    assert client.publish("10.0.0.4:7004", mine) == "created"
    assert client.publish("10.0.0.4:7004", mine) == "same"
    assert client.fetch("10.0.0.4:7004") == mine
    changed = descriptor("10.0.0.4:7004", address=BASE + MIB)
    assert client.publish("10.0.0.4:7004", changed) == "updated"
    assert client.fetch("10.0.0.4:7004") == changed


def test_a_stale_descriptor_of_our_pool_is_replaced(url: str) -> None:
    client = MetadataClient(url)
    client.publish("10.0.0.5:7005", descriptor("10.0.0.5:7005", nonce="01" * 16))
    fresh = descriptor("10.0.0.5:7005", nonce="02" * 16)
    assert client.publish("10.0.0.5:7005", fresh) == "replaced-stale"
    assert client.fetch("10.0.0.5:7005") == fresh


@pytest.mark.parametrize("theirs", ["another pool", "a stock engine", "nonsense"])
def test_somebody_elses_descriptor_is_not_overwritten(url: str, theirs: str) -> None:
    client = MetadataClient(url)
    endpoint = f"10.0.0.6:70{len(theirs)}"
    data = {
        "another pool": descriptor(endpoint, pool="other").to_bytes(),
        "a stock engine": b'{"name":"x","protocol":"tcp","buffers":[]}',
        "nonsense": b"\x00\x01",
    }[theirs]
    client.put(descriptor_key(endpoint), data)
    with pytest.raises(ForeignDescriptorError) as caught:
        client.publish(endpoint, descriptor(endpoint))
    assert caught.value.exit_code == 3
    assert endpoint in str(caught.value)
    assert "%2F" in caught.value.hint
    assert "00" * 64 not in str(caught.value.document())
    assert client.get(descriptor_key(endpoint)) == data


def test_withdrawing_takes_away_ones_own_and_nobody_elses(url: str) -> None:
    client = MetadataClient(url)
    endpoint = "10.0.0.7:7007"
    assert not client.withdraw(endpoint, "01" * 16)
    client.publish(endpoint, descriptor(endpoint, nonce="02" * 16))
    assert not client.withdraw(endpoint, "01" * 16)
    assert client.fetch(endpoint) is not None
    assert client.withdraw(endpoint, "02" * 16)
    assert client.fetch(endpoint) is None
    client.put(descriptor_key(endpoint), b"nonsense")
    assert not client.withdraw(endpoint, "02" * 16)


def test_a_descriptor_under_another_name_or_without_our_fields_is_not_published(url: str) -> None:
    client = MetadataClient(url)
    with pytest.raises(FailedError, match="cannot be published"):
        client.publish("10.0.0.8:7008", descriptor("10.0.0.8:9999"))
    with pytest.raises(FailedError, match="cannot be published"):
        client.publish("10.0.0.8:7008", nvlink_descriptor("10.0.0.8:7008", []))
    assert client.get(descriptor_key("10.0.0.8:7008")) is None


def test_the_stock_engine_reads_our_nvlink_descriptor_from_the_metadata_server(url: str) -> None:
    client = MetadataClient(url)
    client.publish("egm-pool-9", descriptor("egm-pool-9", address=BASE + 7 * MIB))
    with StockEngine(metadata=url, name=f"127.0.0.1:{len(url)}1") as engine:
        assert engine.first_buffer_address("egm-pool-9") == BASE + 7 * MIB


def test_our_client_reads_what_a_stock_engine_has_put(url: str) -> None:
    with StockEngine(metadata=url, name="127.0.0.1:23457", nbytes=4096) as engine:
        found = MetadataClient(url).fetch("127.0.0.1:23457")
        assert found is not None
        assert found.covering(engine.buffer(), 4096)
        with pytest.raises(ForeignDescriptorError, match="not egmctl's"):
            MetadataClient(url).publish("127.0.0.1:23457", descriptor("127.0.0.1:23457"))


@contextmanager
def answering(*pieces: bytes, pause: float = 0.0) -> Iterator[str]:
    """A server that answers whatever it is asked with these pieces."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock, suppress(OSError):
                    sock.settimeout(10)
                    sock.recv(1 << 16)
                    for piece in pieces:
                        sock.sendall(piece)
                        if over.wait(pause):
                            return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/metadata"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: "


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 500 Oops\r\nContent-Length: 3\r\n\r\nbad",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        HEAD + b"100\r\n\r\nshort",
        HEAD + b"2000000\r\n\r\n" + b"x" * 2_000_000,
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000,
    ],
    ids=["nothing", "nonsense", "500", "redirect", "cut", "too large", "many headers", "long header"],
)
def test_a_server_that_answers_wrongly_is_a_clear_error(answer: bytes) -> None:
    with answering(answer) as url:
        with pytest.raises(MetadataUnreachable) as caught:
            MetadataClient(url, timeout=3).get("k")
        assert caught.value.where == url
        assert caught.value.hint


@pytest.mark.parametrize("head", [b"", HEAD + b"1000\r\n\r\n"], ids=["headers", "body"])
def test_a_server_that_drips_is_given_up_in_time(head: bytes) -> None:
    with answering(head, *[b"H"] * 100, pause=0.05) as url:
        began = time.monotonic()
        with pytest.raises(MetadataUnreachable, match=r"within 0\.5 s"):
            MetadataClient(url, timeout=0.5).put("k", b"x" * 10)
        assert time.monotonic() - began < 1.5
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer) and thread.is_alive()]


def test_a_server_that_is_not_there_is_a_clear_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(MetadataUnreachable, match="refused"):
            MetadataClient(f"http://127.0.0.1:{free.getsockname()[1]}/metadata").delete("k")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "P2PHANDSHAKE",
        "etcd://h:1",
        "http://",
        "http://h:99999/metadata",
        "http://h:x/",
        "http://u:p@h/metadata",
        "http://h/metadata?key=1",
        "http://h/a b",
        "http://h/\r\nX: y",
        "http://h/m\u00e9",
        "http://[::1/metadata",
    ],
)
def test_what_is_no_url_of_a_metadata_server_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError):
        MetadataClient(url)


def test_a_malformed_descriptor_on_the_server_is_named() -> None:
    with answering(HEAD + b"3\r\n\r\n{]}") as url, pytest.raises(FailedError, match="not JSON"):
        MetadataClient(url).fetch("h:1")


def test_what_is_published_parses_as_what_was_meant(url: str) -> None:
    client = MetadataClient(url)
    client.publish("10.0.0.9:7009", descriptor("10.0.0.9:7009"))
    data = client.get(descriptor_key("10.0.0.9:7009"))
    assert data is not None
    assert parse_descriptor(data) == client.fetch("10.0.0.9:7009")
