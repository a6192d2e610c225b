"""The helper that the other tests stand on."""

from __future__ import annotations

import socket

import pytest

from tests.support.master import Master, _listening


def test_a_master_listens_on_loopback_only_and_comes_back_on_the_same_ports(any_master: Master) -> None:
    with open(f"/proc/{any_master.pid}/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    ours = _listening(any_master.pid)
    assert {any_master.rpc_port, any_master.metrics_port} <= ours
    addresses = {row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) in ours}
    assert addresses == {"0100007F"}
    before = any_master.address, any_master.pid
    any_master.restart()
    assert any_master.address == before[0]
    assert any_master.pid != before[1]
    socket.create_connection((any_master.host, any_master.rpc_port), 5).close()


def test_a_master_that_was_ended_is_gone(master: Master) -> None:
    master.kill()
    assert not master.alive
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((master.host, master.rpc_port), 5)


def test_a_master_with_metadata_server_serves_it() -> None:
    with Master(http_metadata=True) as master:
        socket.create_connection((master.host, master.http_port), 5).close()
        assert master.metadata_url == f"http://127.0.0.1:{master.http_port}/metadata"
    assert not master.alive
