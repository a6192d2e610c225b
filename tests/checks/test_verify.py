"""What verify says of a pool that it cannot put anything into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from egmctl.checks.verify import run_verify
from egmctl.mooncake.master import MasterClient, MasterRefused, ReplicateConfig
from egmctl.paths import Paths
from egmctl.provider import provision, teardown_pool
from tests.provider.pools import private_paths, small_plan
from tests.support.master import Master, MasterMissing

MIB = 1 << 20
CLIENT = (5, 6)


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[Paths]:
    with private_paths(tmp_path) as paths:
        yield paths


@pytest.fixture
def master() -> Iterator[Master]:
    try:
        master = Master("0.3.13", lease_ttl=1.0, client_ttl=60, suspicion_ttl=1)
    except MasterMissing as missing:
        pytest.skip(str(missing))
    with master:
        yield master


@pytest.fixture
def pool(master: Master, paths: Paths) -> Iterator[str]:
    provision(small_plan(master), paths, mount=True)
    yield "dev"
    teardown_pool("dev", paths, now=True)


def fill(master: Master, size: int) -> list[str]:
    """Objects of ``size`` that the Master does not evict, as many as it has room for."""
    keys: list[str] = []
    with MasterClient(master.address) as client:
        while True:
            key = f"filler-{size}-{len(keys)}"
            try:
                client.put_start(CLIENT, key, size, ReplicateConfig(with_hard_pin=True))
            except MasterRefused as refusal:
                if refusal.number != -200:
                    raise
                return keys
            client.put_end(CLIENT, key)
            keys.append(key)


def by_id(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["id"]: check for check in document["checks"]}


@pytest.mark.parametrize("level", ["quick", "full", "soak"])
def test_what_a_full_pool_has_no_room_for_is_skipped_and_nothing_of_it_passes(
    pool: str, master: Master, paths: Paths, level: str
) -> None:
    for size in (4 * MIB, MIB, 64 << 10, 4096, 16):
        fill(master, size)
    document = run_verify(pool, paths, level=level, soak_seconds=0)
    checks = by_id(document)
    written = {name: check for name, check in checks.items() if name.startswith(("bytes/", "stock-client", "soak"))}
    assert {name.partition("/")[0] for name in written} >= {"bytes", "stock-client"}
    assert {name: check["status"] for name, check in written.items()} == dict.fromkeys(written, "skip")
    assert "no room for" in checks["bytes/numa0/0"]["observed"]
    assert "-200" in checks["stock-client"]["observed"]
    assert not document["ok"], "nothing is wrong, and nothing was verified"
    assert document["bytes_checked"] == 0
    assert checks["segments"]["status"] == "pass"


def test_with_room_for_one_object_the_stock_client_cannot_put_its_own(pool: str, master: Master, paths: Paths) -> None:
    first, *_ = fill(master, 2 * MIB)
    for size in (MIB, 64 << 10, 4096, 16):
        fill(master, size)
    with MasterClient(master.address) as client:
        client.remove(first, force=True)
    document = run_verify(pool, paths)
    checks = by_id(document)
    assert checks["stock-client"]["status"] == "skip"
    assert sorted(checks[f"bytes/numa0/{chunk}"]["status"] for chunk in (0, 1)) == ["pass", "skip"]
    assert (document["ok"], document["bytes_checked"]) == (True, MIB)
