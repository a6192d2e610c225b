"""Specs and machines to plan for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from egmctl.planning import Spec, parse_spec
from egmctl.topology import Topology, load_topology
from tests.fixtures import machines


@pytest.fixture
def topology() -> Callable[[str], Topology]:
    """``topology("hgx-h200")`` is the saved topology of that machine."""
    return lambda name: load_topology(machines.TOPOLOGIES / f"{name}.json")


def spec_table(**pool: Any) -> dict[str, Any]:
    """A spec that is in order, as parsed TOML, with keys of [pool] changed."""
    base = {"name": "p", "memory": "shm", "enable_egm_store_pool": True, "global_segment_size": "1GiB"}
    return {
        "pool": base | pool,
        "mooncake": {"local_hostname": "127.0.0.1", "master_server_addr": "127.0.0.1:50051"},
    }


@pytest.fixture
def spec() -> Callable[..., Spec]:
    """``spec(memory="shm", ...)``: a spec with keys of [pool] changed."""
    return lambda **pool: parse_spec(spec_table(**pool))
