"""An agent that comes to nothing between its first record and its first stage: it owns nothing, and that is known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from egmctl.errors import CleanupPendingError, FailedError
from egmctl.ledger import Ledger, read_events, read_only
from egmctl.paths import Paths
from egmctl.planning import Plan
from egmctl.provider import pool_status, provision, teardown_pool
from egmctl.provider.agent import Agent
from egmctl.provider.operator import Operator
from tests.provider.pools import agent_here, agents, nothing_left, run, small_plan, teardown_now
from tests.support.master import Master

PROGRAM = """
import json, sys
from pathlib import Path
from egmctl import seams
from egmctl.paths import Paths
from egmctl.planning import Plan
from egmctl.provider import provision
seams.load()
provision(Plan.from_json(json.loads(sys.argv[1])), Paths(Path(sys.argv[2]), Path(sys.argv[3])), foreground=True)
"""


def killed_agent(plan: Plan, paths: Paths, place: str) -> None:
    """An agent in the foreground, whom nobody cleans up after, killed at a step."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(plan.to_json()), str(paths.state), str(paths.runtime)]
    environment = {
        **os.environ,
        "EGMCTL_SEAMS": "tests.provider.killer:install",
        "EGMCTL_TEST_KILL": place,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    assert subprocess.run(command, env=environment, timeout=60).returncode == -signal.SIGKILL


def state(paths: Paths) -> str:
    record = read_only(paths.ledger("dev"))
    assert record is not None
    return record.state


def test_an_agent_without_a_worker_says_that_nothing_began_and_lets_go_of_everything(
    quick_master: Master, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Operator) -> None:
        raise RuntimeError("can't start new thread")

    plan = small_plan(quick_master, health_addr="127.0.0.1:0")
    with monkeypatch.context() as patch:
        patch.setattr(Operator, "start", refuse)
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises(FailedError, match="no thread for the agent") as caught, Agent(plan, paths, who="test"):
            pass
        assert "ulimit" in caught.value.hint
        assert set(os.listdir("/proc/self/fd")) == before
    assert state(paths) == "gone"
    assert read_events(paths.ledger("dev"))[-1].what == "provision did not begin"
    assert nothing_left(paths) == []
    assert pool_status(paths) == []
    with agent_here(plan, paths) as agent:
        run(agent, "provision", agent.pool.provision)
        teardown_now(agent)


def test_an_agent_that_ends_before_it_was_asked_for_anything_says_so(quick_master: Master, paths: Paths) -> None:
    with Agent(small_plan(quick_master), paths, who="test"):
        assert state(paths) == "provisioning"
    assert state(paths) == "gone"
    assert nothing_left(paths) == []


KILLS = [
    "ledger.commit:1:after",  # the pool is recorded
    "ledger.commit:2:before",  # its first stage is not
]


@pytest.mark.parametrize("place", KILLS)
def test_a_provision_takes_over_from_an_agent_that_was_killed_before_its_first_stage(
    quick_master: Master, paths: Paths, place: str
) -> None:
    plan = small_plan(quick_master)
    killed_agent(plan, paths, place)
    assert state(paths) == "provisioning"
    assert provision(plan, paths)["state"] == "provisioned"
    teardown_pool("dev", paths, now=True)
    assert nothing_left(paths) == []


def test_a_teardown_takes_over_too(quick_master: Master, paths: Paths) -> None:
    killed_agent(small_plan(quick_master), paths, "ledger.commit:1:after")
    done = teardown_pool("dev", paths)
    assert (done["state"], done["left"], done["warnings"]) == ("gone", [], [])
    assert nothing_left(paths) == []


def test_what_an_agent_has_begun_is_for_teardown_alone(quick_master: Master, paths: Paths) -> None:
    plan = small_plan(quick_master)
    killed_agent(plan, paths, "ledger.commit:2:after")
    with pytest.raises(CleanupPendingError, match="left it provisioning"):
        provision(plan, paths)
    with pytest.raises(CleanupPendingError, match="left it provisioning"), Agent(plan, paths, who="test"):
        pass
    assert teardown_pool("dev", paths)["state"] == "gone"
    assert agents(paths) == []


@pytest.mark.parametrize("kind", ["socket", "chunk"])
def test_nothing_has_begun_only_while_nothing_is_listed(quick_master: Master, paths: Paths, kind: str) -> None:
    with Agent(small_plan(quick_master), paths, who="test") as agent:
        ledger: Ledger = agent.ledger
        assert ledger.pool().nothing_begun
        with ledger.record("about to"):
            if kind == "socket":
                ledger.put_resource("socket", "/x", "intended")
            else:
                ledger.set_chunks("creating", [0])
        assert not ledger.pool().nothing_begun
        with ledger.record("undone"):
            if kind == "socket":
                ledger.put_resource("socket", "/x", "removed")
            else:
                ledger.set_chunks("released", [0])
        assert ledger.pool().nothing_begun
