"""Fixtures that every part's tests may use."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.master import ALL_VERSIONS, Master, MasterMissing

# A machine that is busy with other tests is slow, and that is no finding about what is tested. The examples are the
# same in each run; EGMCTL_FUZZ=20 looks for others, and for twenty times as many in tests/lifecycle/test_fuzz.py.
settings.register_profile(
    "egmctl",
    deadline=None,
    derandomize="EGMCTL_FUZZ" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("egmctl")

# What a shell starts in the background ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What programs under test measure and keep is not this user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def _running(version: str) -> Iterator[Master]:
    try:
        master = Master(version)
    except MasterMissing as missing:
        pytest.skip(str(missing))
    with master:
        yield master


@pytest.fixture
def master() -> Iterator[Master]:
    """A running Master of this environment's wheel, for this test alone."""
    yield from _running("0.3.13")


@pytest.fixture(params=ALL_VERSIONS)
def any_master(request: pytest.FixtureRequest) -> Iterator[Master]:
    """A running Master of each version in turn, for this test alone."""
    yield from _running(request.param)
