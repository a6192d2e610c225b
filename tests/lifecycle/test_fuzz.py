"""Everything that is read from elsewhere is read, or refused in words: never a traceback, a hang or a large allocation.

Specs are in ``tests/planning``, wire messages in ``tests/mooncake/test_codec.py``, descriptors in
``tests/mooncake/test_descriptor.py``, requests to the control socket in ``tests/provider/test_control.py``; here are
plans, saved topologies, ledgers, answers of agents, handshakes from either side, and HTTP answers.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from egmctl.errors import EgmError, UsageError
from egmctl.ledger import ChunkRow, Ledger, LedgerUnreadable, PoolRecord, SegmentRow, read_events, read_only
from egmctl.mooncake.admin import AdminClient
from egmctl.mooncake.handshake import HandshakeServer, fetch_descriptor
from egmctl.mooncake.master import MasterClient
from egmctl.mooncake.metadata import MetadataClient
from egmctl.planning import Plan, load_document
from egmctl.provider.control_client import ControlClient
from egmctl.provider.progress import ProgressEvent
from egmctl.topology import Topology, load_topology, read_topology
from tests.lifecycle.fake_master import FakeMaster
from tests.provider.pools import small_plan

TIMES = int(os.environ.get("EGMCTL_FUZZ", "1"))
quick = settings(max_examples=150 * TIMES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
few = settings(max_examples=40 * TIMES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=10,
)


class Somewhere:
    """A Master's address in a plan."""

    address = "127.0.0.1:50051"
    admin_address = "127.0.0.1:9003"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a document something stands."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def replaced(document: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = json.loads(json.dumps(document))
    here = copy
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = new
    return copy


def refused(error: EgmError, where: str = "") -> None:
    """That an error says what it has to."""
    assert error.message
    assert isinstance(error.message, str)
    json.dumps(error.document())
    if where:
        assert error.where == where
        assert error.hint


@contextmanager
def bounded(seconds: float = 5.0) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


# Files


PLAN = small_plan(Somewhere(), chunks=3).to_json()  # type: ignore[arg-type]
TOPOLOGY = read_topology().to_json()


@quick
@given(st.sampled_from(list(places(PLAN))), anything)
def test_a_plan_with_anything_anywhere_is_a_plan_or_refused(place: tuple[Any, ...], value: Any) -> None:
    document = replaced(PLAN, place, value)
    try:
        plan = Plan.from_json(document)
    except UsageError as error:
        refused(error)
        return
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@quick
@given(st.sampled_from(list(places(TOPOLOGY))), anything)
def test_a_saved_topology_with_anything_anywhere_is_one_or_refused(place: tuple[Any, ...], value: Any) -> None:
    document = replaced(TOPOLOGY, place, value)
    try:
        topology = Topology.from_json(document)
    except UsageError as error:
        refused(error)
        return
    topology.fingerprint()
    topology.eligible()
    assert Topology.from_json(json.loads(json.dumps(topology.to_json()))) == topology


@quick
@given(
    st.binary(max_size=200) | st.binary(max_size=100).map(lambda b: b"{" + b) | anything.map(json.dumps).map(str.encode)
)
def test_a_file_of_anything_is_neither_a_plan_nor_a_topology_and_that_is_said(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "anything"
    path.write_bytes(content)
    for load in (load_document, load_topology):
        with pytest.raises(UsageError):
            load(path)


@pytest.mark.parametrize("content", [b'{"a":' * 100_000, b"[" * 1_000_000, b'{"schema":"' + b"x" * (40 << 20)])
def test_deep_and_huge_files_are_refused_quickly(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "huge"
    path.write_bytes(content)
    with bounded():
        for load in (load_document, load_topology):
            with pytest.raises(UsageError):
                load(path)


# A ledger


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("ledger") / "dev.db"
    ledger = Ledger.create(
        path,
        who="test",
        name="dev",
        plan=PLAN,
        chunks=[ChunkRow(i, 0, 16 << 20, None, "planned") for i in range(3)],
        nonce="n" * 32,
        client=(1, 2),
    )
    rows = [SegmentRow((i, i), i, "m:1", (1, 2), f"e/{i}", "e:1", 1 << 40, 16 << 20, "tcp") for i in range(3)]
    with ledger.record("mounting") as writing:
        writing.add_segments(rows)
        writing.put_resource("engine", "transfer engine", "present", pid=1, started=2, data_port=3)
    ledger.close()
    return path.read_bytes()


def look(path: Path) -> PoolRecord | None:
    """Everything that reads a ledger, and what is made of it."""
    from egmctl.provider.report import ledger_report

    record = read_only(path)
    read_events(path)
    if record is not None:
        json.dumps(ledger_report(record))
        with suppress(UsageError):
            Plan.from_json(record.plan)
    return record


@quick
@given(st.data())
def test_a_ledger_damaged_anywhere_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "dev.db"  # no journal of another one beside it
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        piece = data.draw(st.binary(min_size=1, max_size=40))
        damaged[place : place + len(piece)] = piece
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged))) :]
    path.write_bytes(damaged)
    try:
        look(path)
    except LedgerUnreadable as error:
        refused(error, str(path))
    # Whoever would write to it meets the same, or can.
    with suppress(EgmError):
        Ledger.open(path, who="test").close()


COLUMNS = {
    "pool": ("name", "state", "goal", "reason", "plan", "nonce", "client", "agent_pid", "agent_started", "boot_id"),
    "segment": ("id", "chunk", "master", "client", "name", "base", "state", "since"),
    "chunk": ("numa_node", "nbytes", "address", "state"),
    "resource": ("kind", "name", "state", "detail"),
    "event": ("at", "who", "what", "detail"),
}


@quick
@given(st.data())
def test_a_ledger_with_other_values_in_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "dev.db"
    path.write_bytes(whole)
    table = data.draw(st.sampled_from(sorted(COLUMNS)))
    column = data.draw(st.sampled_from(COLUMNS[table]))
    value = data.draw(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
        | st.integers(-(1 << 63), (1 << 63) - 1)
        | anything.map(json.dumps)
    )
    with closing(sqlite3.connect(path)) as db, suppress(sqlite3.Error), db:
        db.execute(f"UPDATE {table} SET {column} = ?", (value,))
    try:
        look(path)
    except LedgerUnreadable as error:
        refused(error, str(path))


# Peers


@contextmanager
def peer(answer: bytes, family: int = socket.AF_INET, path: str = "") -> Iterator[str]:
    """Somebody who says ``answer`` to whoever comes, whatever is asked, and hangs up."""
    listener = socket.socket(family)
    try:
        listener.bind(path if family == socket.AF_UNIX else ("127.0.0.1", 0))
        listener.listen(8)
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with sock, suppress(OSError):
                    sock.settimeout(2)
                    sock.recv(1 << 16)
                    sock.sendall(answer)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(1 << 16):
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield path if family == socket.AF_UNIX else f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)
    finally:
        listener.close()


def framed(body: bytes) -> bytes:
    return struct.pack("<QB", 1 + len(body), 1) + body


@few
@given(
    st.binary(max_size=100)
    | anything.map(lambda value: framed(json.dumps(value).encode()))
    | st.tuples(st.integers(0, (1 << 64) - 1), st.integers(0, 255), st.binary(max_size=40)).map(
        lambda parts: struct.pack("<QB", *parts[:2]) + parts[2]
    )
)
def test_whatever_an_endpoint_answers_is_a_descriptor_or_an_error(answer: bytes) -> None:
    with peer(answer) as endpoint, bounded():
        try:
            fetch_descriptor(endpoint, timeout=2.0)
        except EgmError as error:
            refused(error)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[HandshakeServer]:
    with HandshakeServer("127.0.0.1", 0, lambda: b'{"name":"n","protocol":"tcp","buffers":[]}') as server:
        yield server


@few
@given(
    st.binary(max_size=100)
    | anything.map(lambda value: framed(json.dumps(value).encode()))
    | st.tuples(st.integers(0, (1 << 64) - 1), st.integers(0, 255), st.binary(max_size=40)).map(
        lambda parts: struct.pack("<QB", *parts[:2]) + parts[2]
    )
)
def test_whatever_a_peer_says_to_our_endpoint_the_next_one_is_served(endpoint: HandshakeServer, said: bytes) -> None:
    host, _, port = endpoint.endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as sock:
        with suppress(OSError):
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
        sock.settimeout(5)
        with suppress(ConnectionResetError):
            while sock.recv(1 << 16):
                pass
    assert fetch_descriptor(endpoint.endpoint).name == "n"


@example(answer=b'{"ok": false, "error": {"exit": []}}\n')
@example(answer=b'{"ok": false, "error": {"message": ""}}\n')
@few
@given(
    st.lists(
        st.binary(max_size=60)
        | anything.map(json.dumps).map(str.encode)
        | st.fixed_dictionaries(
            {},
            optional={
                "ok": st.booleans() | anything,
                "result": anything,
                "error": anything
                | st.fixed_dictionaries({}, optional={"exit": anything, "message": anything, "facts": anything}),
                "event": st.just("progress") | anything,
                "done": anything,
                "stage": anything,
            },
        )
        .map(json.dumps)
        .map(str.encode),
        max_size=4,
    ).map(lambda lines: b"\n".join(lines) + b"\n")
)
def test_whatever_an_agent_answers_is_a_result_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, answer: bytes
) -> None:
    path = str(tmp_path_factory.getbasetemp() / "s")
    Path(path).unlink(missing_ok=True)
    seen: list[ProgressEvent] = []
    with peer(answer, socket.AF_UNIX, path), bounded():
        try:
            with ControlClient(Path(path), timeout=2.0) as client:
                assert isinstance(client.ask("status", progress=seen.append, timeout=2.0), dict)
        except EgmError as error:
            refused(error)
    for event in seen:
        assert isinstance(event.done, int)
        assert isinstance(event.stage, str)


@few
@given(
    st.sampled_from([b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 404 No\r\n", b"HTTP/9.9 -1\r\n", b""]),
    st.sampled_from([b"\r\n", b"Content-Length: 5\r\n\r\n", b"Content-Length: -1\r\n\r\n", b"X: " + b"y" * 70000]),
    st.binary(max_size=60)
    | anything.map(json.dumps).map(str.encode)
    | anything.map(lambda value: json.dumps({"segments": [value]}).encode()),
)
def test_whatever_an_http_server_answers_is_data_or_an_error(status: bytes, headers: bytes, body: bytes) -> None:
    with peer(status + headers + body) as address, bounded():
        admin = AdminClient(address, timeout=2.0)
        for ask in (admin.segments_detail, admin.health, admin.keys, lambda: admin.query_key("k")):
            with suppress(EgmError):
                ask()
        metadata = MetadataClient(f"http://{address}/metadata")
        for attempt in (lambda: metadata.get("k"), lambda: metadata.fetch("k"), lambda: metadata.withdraw("k", "n")):
            with suppress(EgmError):
                attempt()


@few
@given(st.sampled_from(["Ping", "QuerySegmentStatusById", "FetchTasks", "GetReplicaList"]), st.binary(max_size=80))
def test_whatever_a_master_answers_is_an_answer_or_an_error(call: str, body: bytes) -> None:
    with FakeMaster() as master, MasterClient(master.address, timeout=2.0) as client, bounded():
        master.garbage[call] = body
        questions: dict[str, Callable[[], object]] = {
            "Ping": lambda: client.ping((1, 2)),
            "QuerySegmentStatusById": lambda: client.query_segment_status_by_id((1, 2)),
            "FetchTasks": lambda: client.fetch_tasks((1, 2)),
            "GetReplicaList": lambda: client.get_replica_list("k"),
        }
        with suppress(EgmError):
            questions[call]()
        assert client.service_ready() == "2.0.0"
