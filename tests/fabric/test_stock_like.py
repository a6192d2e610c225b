"""Whoever remembers descriptors and mappings for good, by endpoint and address, never reads wrong bytes of ours."""

from __future__ import annotations

import socket
from typing import Any

import psutil
import pytest

from tests.consumer.support import payload, until
from tests.fabric.consumer import Consumer
from tests.fabric.machines import Host
from tests.fabric.stock_like import StockLike
from tests.support.master import Master


def bring_up(host: Host, master: Master, **mooncake: str) -> dict[str, Any]:
    spec = host.spec(master, "cuda-fabric", chunks=2, **mooncake)
    code, document = host.egmctl("provision", str(spec), "--mount", timeout=180)
    assert code == 0, document
    return dict(document["pool"])


def take_down(host: Host) -> None:
    code, document = host.egmctl("teardown", "tray", "--now")
    assert code == 0, document


def kill(pool: dict[str, Any]) -> None:
    agent = psutil.Process(pool["agent_pid"])
    agent.kill()
    agent.wait(10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("how", ["teardown", "SIGKILL"])
@pytest.mark.parametrize("publication", ["p2p", "fixed port", "http"])
def test_a_provider_that_comes_back_is_never_read_through_what_was_remembered_of_it(
    quick_master: Master, host: Host, publication: str, how: str
) -> None:
    mooncake = {}
    if publication == "http":
        mooncake["metadata_server"] = quick_master.metadata_url
    if publication == "fixed port":
        mooncake["local_hostname"] = f"127.0.0.1:{free_port()}"
    metadata = mooncake.get("metadata_server", "P2PHANDSHAKE")
    current: dict[str, bytes] = {}
    with (
        StockLike(quick_master.address, host.env(), metadata=metadata) as old,
        Consumer(quick_master.address, host.env(), metadata=metadata) as ours,
    ):
        seen = 0
        for life in range(3):
            pool = bring_up(host, quick_master, **mooncake)
            for number in range(4):
                key, value = f"key-{number}", payload(f"{life} {number}", 200_000 + number)
                # What it cannot reach it may refuse; then somebody else puts the object.
                if old.put(key, value):
                    ours.put(key, value, "device1")
                current[key] = value
                assert ours.get(key, "device0") == value, (life, key)
                found = old.get(key)
                assert found in (None, value), (life, key)
                seen += found is not None
            for key, value in current.items():
                assert old.get(key) in (None, value)
            if how == "SIGKILL":
                kill(pool)
                for key, value in current.items():
                    assert old.get(key) in (None, value)  # the memory it holds on to has the object still
            take_down(host)
            for key in current:
                assert old.get(key) is None, "the Master knows none of these any more"
        if publication == "fixed port":
            assert seen == 4, "what it remembers of the endpoint holds nothing of the later lives"
        else:
            assert seen == 12, "a fresh endpoint is nothing that it remembers"
            assert len({endpoint for endpoint, _ in old.memory()}) == 3
    assert host.leaks() == [] or all("stock_like" in " ".join(each["argv"]) for each in host.leaks())


def test_chunks_mounted_anew_at_a_master_that_was_started_anew_are_read_right(quick_master: Master, host: Host) -> None:
    bring_up(host, quick_master)
    with StockLike(quick_master.address, host.env()) as old:
        for life in range(3):
            value = payload(f"life {life}", 500_000)

            def put(value: bytes = value, key: str = f"key {life}") -> bool:
                return old.put(key, value) == ""

            until(put)
            assert old.get(f"key {life}") == value
            assert len(old.memory()) >= 1
            quick_master.restart()
            for before in range(life + 1):
                assert old.get(f"key {before}") is None
        assert len({endpoint for endpoint, _ in old.memory()}) == 1
    take_down(host)
