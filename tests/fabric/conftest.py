from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fabric.machines import Host, new_host
from tests.support.master import ALL_VERSIONS, Master, MasterMissing


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with new_host(tmp_path) as host:
        yield host


@pytest.fixture(params=ALL_VERSIONS)
def any_quick_master(request: pytest.FixtureRequest) -> Iterator[Master]:
    """A Master of each version, with short leases and lives and a metadata server."""
    yield from _quick(request.param)


@pytest.fixture
def quick_master() -> Iterator[Master]:
    yield from _quick("0.3.13")


def _quick(version: str) -> Iterator[Master]:
    try:
        master = Master(version, lease_ttl=1.0, client_ttl=3, suspicion_ttl=1, http_metadata=True)
    except MasterMissing as missing:
        pytest.skip(str(missing))
    with master:
        yield master


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many driver calls of a pool's life were made to fail."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "call":
                for name, value in report.user_properties:
                    if name == "pool fault sites":
                        terminalreporter.write_line(f"driver calls of a whole pool made to fail, one run each: {value}")
