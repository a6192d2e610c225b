"""egmctl as people meet it: commands in processes of their own, on state dirs of their own, against real Masters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.acceptance.hosts import Host
from tests.support.master import ALL_VERSIONS, Master, MasterMissing


@pytest.fixture
def new_host() -> Iterator[Callable[..., Host]]:
    """Makes hosts: state dirs that know nothing of each other. Whatever happens, nothing of them outlives the test."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(Host(**settings))


@pytest.fixture
def host(new_host: Callable[..., Host]) -> Host:
    return new_host()


@pytest.fixture
def quick_master() -> Iterator[Master]:
    """Leases of 1 s; silent clients are forgotten after 3 s."""
    yield from _quick("0.3.13")


@pytest.fixture(params=ALL_VERSIONS)
def any_quick_master(request: pytest.FixtureRequest) -> Iterator[Master]:
    yield from _quick(request.param)


@pytest.fixture(params=ALL_VERSIONS)
def any_patient_master(request: pytest.FixtureRequest) -> Iterator[Master]:
    """Short leases too, but it remembers silent clients for longer than a test takes."""
    yield from _quick(request.param, client_ttl=120)


def _quick(version: str, client_ttl: int = 3) -> Iterator[Master]:
    try:
        master = Master(version, lease_ttl=1.0, client_ttl=client_ttl, suspicion_ttl=1)
    except MasterMissing as missing:
        pytest.skip(str(missing))
    with master:
        yield master
