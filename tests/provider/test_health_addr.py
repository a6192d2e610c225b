"""The spec's ``health_addr``: written, checked, and carried through a plan."""

from __future__ import annotations

import json
from typing import Any

import pytest

from egmctl.errors import UsageError
from egmctl.planning import Plan, make_plan, parse_spec
from egmctl.planning.addresses import parse_listen_address
from egmctl.topology import read_topology


def spec(**more: Any) -> dict[str, Any]:
    return {
        "pool": {
            "name": "dev",
            "memory": "shm",
            "enable_egm_store_pool": True,
            "global_segment_size": "16MiB",
            "egm_numa_nodes": "0",
            **more,
        },
        "mooncake": {"local_hostname": "127.0.0.1", "master_server_addr": "127.0.0.1:1"},
    }


def plan(**more: Any) -> Plan:
    return make_plan(parse_spec(spec(**more)), read_topology(), granularity=lambda _: 4096)


def test_health_is_off_unless_a_spec_says_otherwise() -> None:
    assert plan().health_addr is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("127.0.0.1:9105", ("127.0.0.1", 9105)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        (":9105", ("127.0.0.1", 9105)),
        ("[::1]:9105", ("::1", 9105)),
        ("0.0.0.0:9105", ("0.0.0.0", 9105)),
        ("[::]:9105", ("::", 9105)),
        ("host.example:65535", ("host.example", 65535)),
    ],
)
def test_an_address_is_a_host_and_a_port_and_without_a_host_it_is_loopback(text: str, found: tuple[str, int]) -> None:
    assert parse_listen_address(text, name="health_addr") == found
    assert plan(health_addr=text).health_addr == text


@pytest.mark.parametrize(
    "text", ["127.0.0.1", "9105", "127.0.0.1:65536", "127.0.0.1:x", "::1:80", "a b:1", "", "224.0.0.1:1"]
)
def test_a_bad_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="health_addr") as caught:
        parse_spec(spec(health_addr=text))
    assert caught.value.where == "[pool]"


def test_a_mistyped_key_is_told_the_right_one() -> None:
    with pytest.raises(UsageError, match="'health_adr'") as caught:
        parse_spec(spec(health_adr="127.0.0.1:1"))
    assert "health_addr" in caught.value.hint


def test_a_plan_carries_it_and_an_older_plan_has_none() -> None:
    made = plan(health_addr="127.0.0.1:9105")
    document = json.loads(json.dumps(made.to_json()))
    assert Plan.from_json(document) == made
    del document["health_addr"]
    assert Plan.from_json(document).health_addr is None
    document["health_addr"] = "nowhere"
    with pytest.raises(UsageError, match="health_addr"):
        Plan.from_json(document)


def test_an_address_that_other_hosts_reach_is_warned_of() -> None:
    assert any("open to other hosts" in line for line in plan(health_addr="0.0.0.0:9105").warnings)
    assert not any("open to other hosts" in line for line in plan(health_addr="[::1]:9105").warnings)
