from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egmctl.errors import UsageError
from egmctl.planning import Spec, load_spec, parse_node_list, parse_spec
from egmctl.planning.spec import spec_from_toml
from egmctl.units import GIB, MIB, TIB
from tests.planning.conftest import spec_table

PLANS = Path(__file__).parents[2] / "plans"


def test_what_is_not_written_has_the_contracts_defaults() -> None:
    spec = parse_spec(spec_table())
    assert spec.pool.egm_numa_nodes == "auto"
    assert (spec.pool.max_mr_size, spec.pool.max_chunk_size) == (TIB, 16 * GIB)
    assert (spec.pool.local_buffer_size, spec.pool.huge_pages, spec.pool.group) == (0, False, None)
    assert (spec.pool.lease_ttl, spec.pool.client_expiry) == (10.0, 40.0)
    assert (spec.mooncake.protocol, spec.mooncake.metadata_server) == ("tcp", "P2PHANDSHAKE")
    assert (spec.mooncake.tenant_id, spec.mooncake.master_admin_addr) == ("default", None)


def test_the_feature_is_off_unless_said() -> None:
    table = spec_table()
    del table["pool"]["enable_egm_store_pool"]
    assert parse_spec(table).pool.enable_egm_store_pool is False


def test_the_environments_max_mr_size_is_a_default_only() -> None:
    assert parse_spec(spec_table(), max_mr_size="1073741824").pool.max_mr_size == GIB
    assert parse_spec(spec_table(max_mr_size="64MiB"), max_mr_size="1073741824").pool.max_mr_size == 64 * MIB
    with pytest.raises(UsageError, match="MC_MAX_MR_SIZE = 'lots'"):
        parse_spec(spec_table(), max_mr_size="lots")


def test_a_file_takes_the_variable_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_MAX_MR_SIZE", str(128 * MIB))
    assert load_spec(PLANS / "hgx-h200.toml").pool.max_mr_size == 128 * MIB
    assert load_spec(PLANS / "hgx-h200.toml", environ={}).pool.max_mr_size == TIB
    assert load_spec(PLANS / "dev-shm.toml").pool.max_mr_size == 64 * MIB


def refusal(table: dict[str, Any]) -> UsageError:
    with pytest.raises(UsageError) as caught:
        parse_spec(table)
    assert caught.value.exit_code == 2
    return caught.value


@pytest.mark.parametrize(
    ("key", "near"),
    [("globl_segment_size", "global_segment_size"), ("Memory", "memory"), ("hugepages", "huge_pages")],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key: str, near: str) -> None:
    error = refusal(spec_table(**{key: 1}))
    assert error.message == f"unknown key {key!r}"
    assert error.where == "[pool]"
    assert error.hint == f"did you mean {near!r}?"


def test_an_unknown_key_like_no_other_lists_the_known_ones() -> None:
    assert "egm_numa_nodes" in refusal(spec_table(zzzzzz=1)).hint


def test_an_unknown_table_or_a_key_outside_of_tables_is_refused() -> None:
    assert refusal(spec_table() | {"mooncakes": {}}).hint == "did you mean 'mooncake'?"
    assert refusal(spec_table() | {"name": "x"}).message == "unknown table 'name'"
    assert refusal({"pool": spec_table()["pool"]}).message == "the table [mooncake] is missing"
    assert refusal(spec_table() | {"pool": 3}).message == "pool is not a table"


@pytest.mark.parametrize("key", ["name", "memory", "global_segment_size"])
def test_a_missing_key_is_named(key: str) -> None:
    table = spec_table()
    del table["pool"][key]
    assert refusal(table).message == f"{key} is missing"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "Dev"}, "not a pool name"),
        ({"name": ""}, "not a pool name"),
        ({"name": "../x"}, "not a pool name"),
        ({"name": ".x"}, "not a pool name"),
        ({"name": "a" * 64}, "not a pool name"),
        ({"name": 5}, "name = 5 is not a string"),
        ({"memory": "shmem"}, "no memory kind"),
        ({"enable_egm_store_pool": "true"}, "is not true or false"),
        ({"enable_egm_store_pool": 1}, "is not true or false"),
        ({"global_segment_size": "1 PiB"}, "is not a size"),
        ({"global_segment_size": -1}, "is negative"),
        ({"global_segment_size": True}, "is not a size"),
        ({"global_segment_size": 1.5}, "is not a size"),
        ({"global_segment_size": 1 << 63}, "more than any machine addresses"),
        ({"global_segment_size": 10**400}, "more than any machine addresses"),
        ({"egm_numa_nodes": 0}, "is not a string"),
        ({"huge_pages": "3MiB"}, "is not a page size"),
        ({"huge_pages": 1.5}, "neither true, false nor a page size"),
        ({"memory": "cuda-posix", "huge_pages": True}, "the CUDA driver chooses the pages"),
        ({"group": "a b"}, "not a group name"),
        ({"lease_ttl": 0}, "not between 0 and 86400"),
        ({"lease_ttl": True}, "is not a number of seconds"),
        ({"lease_ttl": "10s"}, "is not a number of seconds"),
        ({"client_expiry": float("nan")}, "not between"),
    ],
)
def test_a_value_that_cannot_be_is_refused(change: dict[str, Any], said: str) -> None:
    error = refusal(spec_table(**change))
    assert said in error.message
    assert error.where


@pytest.mark.parametrize("name", ["a", "0", "dev", "rack-1.tray_2", "a" * 63])
def test_pool_names_of_the_contract_are_taken(name: str) -> None:
    assert parse_spec(spec_table(name=name)).pool.name == name


@pytest.mark.parametrize(
    "text", ["1,,3", "-1", "+1", "1x", "", ",", "0,", ",0", "0;1", "0 1", "auto,1", "all", "1.0", "²", "1e1"]
)
def test_a_bad_node_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="which is no node number") as caught:
        parse_node_list(text)
    assert '"0,1"' in caught.value.hint


@pytest.mark.parametrize(
    ("text", "nodes"), [("auto", "auto"), ("0", (0,)), ("1,0", (0, 1)), (" 0 , 1 ", (0, 1)), ("1,1", (1,))]
)
def test_node_lists_are_ascending_and_without_repetition(text: str, nodes: object) -> None:
    assert parse_node_list(text) == nodes
    assert parse_spec(spec_table(egm_numa_nodes=text)).pool.egm_numa_nodes == nodes


@pytest.mark.parametrize(
    ("memory", "protocol", "fits"),
    [
        ("cuda-fabric", "nvlink", True),
        ("cuda-fabric", "tcp", False),
        ("cuda-posix", "tcp", True),
        ("cuda-posix", "nvlink", False),
        ("shm", "tcp", True),
        ("shm", "nvlink", False),
        ("shm", "rdma", False),
    ],
)
def test_memory_kind_and_protocol_go_together(memory: str, protocol: str, fits: bool) -> None:
    table = spec_table(memory=memory)
    table["mooncake"]["protocol"] = protocol
    if fits:
        assert parse_spec(table).mooncake.protocol == protocol
    else:
        assert f"protocol = {protocol!r} does not go with memory = {memory!r}" in refusal(table).message


def mooncake(**change: Any) -> dict[str, Any]:
    table = spec_table()
    table["mooncake"].update(change)
    return table


@pytest.mark.parametrize("scheme", ["etcd", "redis", "k8s"])
def test_a_group_of_masters_is_refused_in_one_sentence(scheme: str) -> None:
    message = refusal(mooncake(master_server_addr=f"{scheme}://10.0.0.1:2379")).message
    assert message.endswith(f"egmctl speaks to one Master by host:port, not to a group found through {scheme}://")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1.2.3:5000", "localhost", "LOCALHOST:1", "localhost.", "[::1]:7000", "[::1]"]
)
def test_a_loopback_name_with_a_master_elsewhere_is_refused(host: str) -> None:
    error = refusal(mooncake(local_hostname=host, master_server_addr="10.0.0.1:50051"))
    assert "consumers on other hosts would connect to themselves" in error.message
    assert parse_spec(mooncake(local_hostname=host, master_server_addr="localhost:50051"))


@pytest.mark.parametrize("host", ["node-1", "node-1.example.net:5000", "10.0.0.7", "10.0.0.7:65535", "[fd00::1]:5000"])
def test_names_and_addresses_of_this_host_are_taken(host: str) -> None:
    table = mooncake(local_hostname=host, master_server_addr="[fd00::9]:50051")
    assert parse_spec(table).mooncake.local_hostname == host


@pytest.mark.parametrize(
    "host",
    ["", ":5000", "a:0", "a:65536", "a:x", "a:", "a b", "a/b", "-a", "fd00::1", "[::1", "[::1]5",
     "0.0.0.0", "[::]:1", "1.2.3.256", "a..b", "x" * 300],
)  # fmt: skip
def test_what_is_no_host_is_refused(host: str) -> None:
    assert "local_hostname" in refusal(mooncake(local_hostname=host)).message


@pytest.mark.parametrize("address", ["10.0.0.1", "10.0.0.1:", "10.0.0.1:99999", ":50051", "a:1:2"])
def test_what_is_no_masters_address_is_refused(address: str) -> None:
    assert "master_server_addr" in refusal(mooncake(master_server_addr=address)).message
    assert "master_admin_addr" in refusal(mooncake(master_admin_addr=address)).message


@pytest.mark.parametrize("url", ["P2PHANDSHAKE", "http://127.0.0.1:8080/metadata", "http://[::1]:8080/metadata"])
def test_both_ways_of_publication_are_taken(url: str) -> None:
    assert parse_spec(mooncake(metadata_server=url)).mooncake.metadata_server == url


@pytest.mark.parametrize(
    "url",
    ["", "p2phandshake", "etcd://a:1", "https://a:1/metadata", "http://a/metadata", "http://a:1", "http://a:1/x", "http://a:x/metadata",
     "http://u@a:1/metadata", "http://a:1/metadata?k=1", "http://a:99999/metadata", "http://[::1/metadata", "http://:1/metadata"],
)  # fmt: skip
def test_other_metadata_servers_are_refused(url: str) -> None:
    error = refusal(mooncake(metadata_server=url))
    assert "metadata_server" in error.message
    assert "P2PHANDSHAKE" in error.hint


def test_a_file_that_is_not_there_or_not_toml_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the spec: No such file") as caught:
        load_spec(tmp_path / "none.toml")
    assert caught.value.where == str(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[pool\nname = 1")
    with pytest.raises(UsageError, match=r"not TOML: .*line 1"):
        load_spec(tmp_path / "bad.toml")
    (tmp_path / "key.toml").write_text("[pool]\nnme = 'x'\n[mooncake]\n")
    with pytest.raises(UsageError) as caught:
        load_spec(tmp_path / "key.toml")
    assert caught.value.where == f"{tmp_path / 'key.toml'}: [pool]"


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_content_of_a_file_gets_past_as_anything_but_a_spec_or_a_refusal(content: bytes) -> None:
    with contextlib.suppress(UsageError):
        assert isinstance(spec_from_toml(content, where="x", environ={}), Spec)


def test_huge_and_deep_files_are_refused_in_words() -> None:
    for content in (b"#" * (2 << 20), b"a = " + b"[" * 50_000, b"a = " + b"9" * 5000):
        with pytest.raises(UsageError):
            spec_from_toml(content, where="x", environ={})


_VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)
)
_POOL_KEYS = st.sampled_from(
    [*spec_table()["pool"], "huge_pages", "group", "lease_ttl", "egm_numa_nodes", "max_mr_size"]
)
_MOONCAKE_KEYS = st.sampled_from(["local_hostname", "master_server_addr", "metadata_server", "tenant_id", "protocol"])


@given(st.dictionaries(_POOL_KEYS, _VALUES, max_size=3), st.dictionaries(_MOONCAKE_KEYS, _VALUES, max_size=2))
def test_no_value_of_any_key_ends_in_a_traceback(pool: dict[str, Any], other: dict[str, Any]) -> None:
    table = spec_table(**pool)
    table["mooncake"].update(other)
    with contextlib.suppress(UsageError):
        assert parse_spec(table).pool.name
