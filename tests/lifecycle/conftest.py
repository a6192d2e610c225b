from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from egmctl.paths import Paths
from tests.provider.pools import end_agents, private_paths
from tests.support.master import ALL_VERSIONS, Master, MasterMissing


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[Paths]:
    with private_paths(tmp_path) as paths:
        yield paths


@pytest.fixture
def quick_master() -> Iterator[Master]:
    """A Master with short leases and lives."""
    yield from _quick("0.3.13")


@pytest.fixture(params=ALL_VERSIONS)
def any_quick_master(request: pytest.FixtureRequest) -> Iterator[Master]:
    yield from _quick(request.param)


@pytest.fixture
def new_master() -> Iterator[Master]:
    """One of 0.3.14, for what older ones do not have."""
    yield from _quick("0.3.14")


def _quick(version: str) -> Iterator[Master]:
    try:
        master = Master(version, lease_ttl=1.0, client_ttl=3, suspicion_ttl=1)
    except MasterMissing as missing:
        pytest.skip(str(missing))
    with master:
        yield master


@pytest.fixture
def state() -> Iterator[Path]:
    """A state dir for commands in processes of their own, whose sockets lie where the command line puts them."""
    folder = Path(tempfile.mkdtemp(prefix="egm", dir="/tmp"))
    yield folder
    cli = Paths.resolve(folder)
    end_agents(cli)
    shutil.rmtree(cli.runtime, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
