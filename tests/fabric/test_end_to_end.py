"""A pool of GPU-host memory from its making to its end, provider and consumers in processes of their own."""

from __future__ import annotations

import json
import re
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from egmctl.memory.base import MemoryKind
from egmctl.mooncake.admin import AdminClient
from egmctl.mooncake.metadata import MetadataClient, descriptor_key
from tests.consumer.support import payload, until
from tests.fabric.consumer import Consumer, ConsumerError
from tests.fabric.machines import CHUNK, Host, new_host
from tests.support.master import Master
from tests.support.stock import StockClient, StockEngine

KINDS: list[MemoryKind] = ["cuda-fabric", "cuda-posix"]
WORKSPACE = 1 << 20


def metadata_of(master: Master, publication: str) -> str:
    return "P2PHANDSHAKE" if publication == "p2p" else master.metadata_url


def published(endpoint: str, metadata: str) -> dict[str, Any]:
    """The descriptor as it travels, read without any of egmctl's own code."""
    if metadata != "P2PHANDSHAKE":
        found = MetadataClient(metadata).get(descriptor_key(endpoint))
        assert found is not None
        return dict(json.loads(found))
    name, _, port = endpoint.rpartition(":")
    with socket.create_connection((name, int(port)), 5) as sock:
        sock.sendall(struct.pack("<QB", 3, 1) + b"{}")
        data = b""
        while piece := sock.recv(1 << 20):
            data += piece
    (length,) = struct.unpack_from("<Q", data)
    assert data[8] == 1
    assert length == len(data) - 8
    return dict(json.loads(data[9:]))


def in_memory(host: Host, value: bytes) -> bool:
    """Whether the bytes lie in an allocation of the host."""
    files = [path for path in host.config.directory.iterdir() if re.match(r"alloc-.*(?<!\.owner)$", path.name)]
    return any(value in path.read_bytes() for path in files)


def leaks_of(host: Host, *, but: int = 0) -> list[dict[str, Any]]:
    return [report for report in host.leaks() if report["pid"] != but]


@pytest.mark.parametrize("publication", ["p2p", "http"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_is_provisioned_published_imported_used_and_torn_down(
    any_quick_master: Master, host: Host, kind: MemoryKind, publication: str
) -> None:
    master, metadata = any_quick_master, metadata_of(any_quick_master, publication)
    code, document = host.egmctl("provision", str(host.spec(master, kind, chunks=3, metadata_server=metadata)))
    assert code == 0, document
    pool = document["pool"]
    agent = pool["agent_pid"]
    assert (pool["state"], pool["memory_kind"], pool["bytes"]) == ("provisioned", kind, 3 * CHUNK)
    assert len([name for name in host.memory() if not name.endswith(".owner")]) == 3
    endpoint = pool["endpoint"]
    if publication == "http":
        assert MetadataClient(metadata).get(descriptor_key(endpoint)) is None, "nothing is published by provision"

    code, document = host.egmctl("mount", "tray")
    assert code == 0, document
    assert document["pool"]["ready"]
    rows = AdminClient(master.admin_address).segments_detail()
    assert sorted(row.name for row in rows) == [f"{endpoint}/numa0/{index}" for index in range(3)]
    protocol = "nvlink" if kind == "cuda-fabric" else "tcp"
    assert {(row.te_endpoint, row.protocol, row.size) for row in rows} == {(endpoint, protocol, CHUNK)}
    assert ("/" in endpoint, ":" in endpoint) == (False, publication == "p2p")

    told = published(endpoint, metadata)
    assert (told["name"], told["protocol"]) == (endpoint, protocol)
    assert [(each["addr"], each["length"]) for each in told["buffers"]] == sorted((row.base, row.size) for row in rows)
    assert WORKSPACE not in [each["length"] for each in told["buffers"]], "the workspace is local-only"
    if kind == "cuda-fabric":
        assert {each["name"] for each in told["buffers"]} == {"cpu:0"}
        assert all(re.fullmatch(r"[0-9A-F]{128}", each["shm_name"]) for each in told["buffers"])
        assert len({each["shm_name"] for each in told["buffers"]}) == 3

    value = payload(f"{kind} {publication}", 300_001)
    with Consumer(master.address, host.env(), metadata=metadata) as consumer:
        for where in ("device0", "device1", "pinned"):
            assert consumer.put(f"from {where}", value, where) == len(value)
            for target in ("device1", "device0", "pinned"):
                assert consumer.get(f"from {where}", target) == value
        assert in_memory(host, value)
        keys, many = [f"k{n}" for n in range(40)], [payload(f"v{n}", 1 + 997 * n) for n in range(40)]
        assert consumer.call("put", keys=keys, values=[one.hex() for one in many], where="device0") == [*map(len, many)]
        assert consumer.call("get", keys=keys, where="pinned") == [one.hex() for one in many]
        with Consumer(master.address, host.env(), metadata=metadata, devices=(1,)) as other:
            assert other.get("from device0", "device1") == value
            assert other.call("mapped") >= 1
        assert consumer.call("exists", key="k1")
        consumer.call("remove", key="k1")
        assert not consumer.call("exists", key="k1")

    code, document = host.egmctl("teardown", "tray", "--now")
    assert code == 0, document
    assert document["pools"][0]["state"] == "gone"
    assert document["pools"][0]["warnings"] == []
    assert AdminClient(master.admin_address).segments_detail() == []
    if publication == "http":
        assert MetadataClient(metadata).get(descriptor_key(endpoint)) is None
    assert host.memory() == []
    assert agent in [report["pid"] for report in host.ended()]
    assert len(host.ended()) >= 4, "the command, the probe, the agent and the consumers have all reported"
    assert host.leaks() == []


@pytest.mark.parametrize("publication", ["p2p", "http"])
def test_a_stock_client_uses_a_cuda_posix_pool_over_tcp_and_consumers_see_the_same_bytes(
    any_quick_master: Master, host: Host, publication: str
) -> None:
    master, metadata = any_quick_master, metadata_of(any_quick_master, publication)
    code, document = host.egmctl("provision", str(host.spec(master, "cuda-posix", metadata_server=metadata)), "--mount")
    assert code == 0, document
    value = payload("stock", 2_000_003)
    with StockClient(master.address, metadata=metadata) as stock:
        assert stock.put("theirs", value) == 0
        assert stock.get("theirs") == value
        assert in_memory(host, value)
        with Consumer(master.address, host.env(), metadata=metadata) as consumer:
            for where in ("device0", "device1", "pinned", "pageable"):
                assert consumer.get("theirs", where) == value
            mine = payload("mine", 1_000_001)
            consumer.put("mine", mine, "device1")
        assert stock.get("mine") == mine
    assert host.egmctl("teardown", "tray", "--now")[0] == 0
    assert host.memory() == []
    assert host.leaks() == []


@pytest.mark.parametrize("publication", ["p2p", "http"])
def test_the_stock_transfer_engine_reads_the_descriptor_of_a_live_fabric_pool(
    any_quick_master: Master, host: Host, publication: str
) -> None:
    master, metadata = any_quick_master, metadata_of(any_quick_master, publication)
    spec = host.spec(master, "cuda-fabric", metadata_server=metadata)
    code, document = host.egmctl("provision", str(spec), "--mount")
    assert code == 0, document
    endpoint = document["pool"]["endpoint"]
    bases = sorted(row.base for row in AdminClient(master.admin_address).segments_detail())
    with StockEngine(metadata=metadata, name="127.0.0.1" if publication == "p2p" else "stock-reader") as engine:
        assert engine.first_buffer_address(endpoint) == bases[0]
    assert host.egmctl("teardown", "tray", "--now")[0] == 0
    assert host.leaks() == []


@pytest.mark.parametrize("kind", KINDS)
def test_no_handle_is_written_down_anywhere(quick_master: Master, host: Host, kind: MemoryKind) -> None:
    spec = host.spec(quick_master, kind, metadata_server=quick_master.metadata_url)
    assert host.egmctl("provision", str(spec), "--mount")[0] == 0
    code, status = host.egmctl("status", "tray")
    assert code == 0
    endpoint = status["pools"][0]["endpoint"]
    told = published(endpoint, quick_master.metadata_url)
    handles = [each["shm_name"] for each in told["buffers"] if "shm_name" in each]
    assert len(handles) == (2 if kind == "cuda-fabric" else 0)
    idents = [path.name.split("-")[1] for path in host.config.directory.iterdir()]
    written = [json.dumps(status)] + [
        path.read_bytes().decode("latin-1") for path in host.paths.state.iterdir() if path.is_file()
    ]
    for text in written:
        assert not any(handle in text or handle.lower() in text for handle in handles)
        assert not any(ident in text for ident in idents)
    assert host.egmctl("teardown", "tray", "--now")[0] == 0


def test_a_stale_descriptor_of_ours_is_replaced_and_another_pools_is_left_alone(
    quick_master: Master, host: Host
) -> None:
    server = MetadataClient(quick_master.metadata_url)
    for name in ("tray", "other"):
        spec = host.spec(quick_master, "cuda-fabric", name, metadata_server=quick_master.metadata_url)
        assert host.egmctl("provision", str(spec))[0] == 0
    endpoint = host.egmctl("status", "tray")[1]["pools"][0]["endpoint"]
    assert host.egmctl("mount", "other")[0] == 0
    other = host.egmctl("status", "other")[1]["pools"][0]["endpoint"]
    theirs = json.loads(server.get(descriptor_key(other)) or b"")

    foreign = json.dumps({**theirs, "name": endpoint}).encode()
    server.put(descriptor_key(endpoint), foreign)
    code, error = host.egmctl("mount", "tray")
    assert (code, error["code"]) == (3, "foreign-descriptor")
    assert server.get(descriptor_key(endpoint)) == foreign
    assert host.egmctl("status", "tray")[1]["pools"][0]["state"] == "provisioned"

    stale = {**theirs, "name": endpoint, "egm": {**theirs["egm"], "pool": "tray", "nonce": "0" * 32}}
    server.put(descriptor_key(endpoint), json.dumps(stale).encode())
    assert host.egmctl("mount", "tray")[0] == 0
    mine = published(endpoint, quick_master.metadata_url)
    assert mine["egm"]["nonce"] != "0" * 32
    assert mine["buffers"] != theirs["buffers"]
    for name in ("tray", "other"):
        assert host.egmctl("teardown", name, "--now")[0] == 0
    assert server.get(descriptor_key(endpoint)) is None
    assert host.leaks() == []


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_agent_was_killed_nothing_of_its_pool_can_be_read_and_teardown_cleans_up(
    quick_master: Master, host: Host, kind: MemoryKind
) -> None:
    import psutil

    spec = host.spec(quick_master, kind, metadata_server=quick_master.metadata_url)
    code, document = host.egmctl("provision", str(spec), "--mount")
    assert code == 0
    pool = document["pool"]
    value = payload("before", 100_000)
    with Consumer(quick_master.address, host.env(), metadata=quick_master.metadata_url) as consumer:
        consumer.put("before", value, "device0")
        assert consumer.get("before", "device1") == value
        agent = psutil.Process(pool["agent_pid"])
        agent.kill()
        agent.wait(10)
        with pytest.raises(ConsumerError) as caught:
            consumer.get("before", "device1")
        assert caught.value.code in ("provider-gone", "object-not-found", "unreachable")
        assert host.egmctl("teardown", "tray", "--now")[0] == 0
        assert AdminClient(quick_master.admin_address).segments_detail() == []
        assert MetadataClient(quick_master.metadata_url).get(descriptor_key(pool["endpoint"])) is None
        # A new incarnation of the same pool: nothing of the old one is taken for it.
        assert host.egmctl("provision", str(spec), "--mount")[0] == 0
        consumer.put("before", value[::-1], "device1")
        assert consumer.get("before", "device0") == value[::-1]
        until(lambda: consumer.call("mapped") <= 2)
        assert host.egmctl("teardown", "tray", "--now")[0] == 0
        # An idle consumer lets go of what was withdrawn.
        until(lambda: consumer.call("mapped") == 0)
    assert host.leaks() == []


def test_fabric_memory_without_a_channel_is_refused_before_anything_is_allocated(
    quick_master: Master, tmp_path: Path
) -> None:
    with new_host(tmp_path, fabric="not-permitted", attributes={143: 0}) as host:
        code, error = host.egmctl("provision", str(host.spec(quick_master, "cuda-fabric")), "--mount")
        assert (code, error["code"], error["exit"]) == (3, "preflight", 3)
        assert "IMEX channel" in error["message"]
        assert "143" in error["message"]
        assert "mknod" in error["hint"]
        facts = {check["id"]: check["status"] for check in error["facts"]["checks"]}
        assert facts["imex-channel"] == "fail"
        assert facts["cuda-attributes/gpu0/143"] == "fail"
        calls = [json.loads(line) for line in host.calls_file.read_text().splitlines()]
        created = {line["outcome"] for line in calls if line["call"] == "mem_create"}
        assert "ok" not in created
        assert not list(host.paths.state.glob("*.db"))
        assert host.leaks() == []
