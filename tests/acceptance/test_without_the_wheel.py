"""In a Python environment of everything but the Mooncake wheel: a real one, made of links to this one."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.hosts import Host, assert_error, listed
from tests.support.master import Master


@pytest.fixture
def python_without_wheel(tmp_path: Path) -> str:
    """Its interpreter."""
    home = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", home], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    for entry in os.scandir(sysconfig.get_path("purelib")):
        if not entry.name.startswith("mooncake"):
            (site / entry.name).symlink_to(entry.path)
    python = str(home / "bin" / "python")
    found = subprocess.run([python, "-c", "import typer, egmctl; import mooncake"], capture_output=True, text=True)
    assert "No module named 'mooncake'" in found.stderr
    return python


def test_without_a_wheel_pools_are_planned_and_provisioned_and_mount_over_tcp_is_refused_with_the_extras_name(
    new_host: Callable[..., Host], quick_master: Master, python_without_wheel: str
) -> None:
    host = new_host(python=python_without_wheel)
    spec = host.spec(quick_master)
    assert host.run("plan", spec).code == 0
    result = host.run("provision", spec, "--json")
    assert result.code == 0, result.stderr
    pool = result.document["pool"]
    assert (pool["state"], pool["bytes"]) == ("provisioned", 32 << 20)
    whole = host.footprint()

    refused = host.run("mount", "dev", "--json")
    assert_error(refused, 3, what="(?i)mooncake", where=".", do=r"pip install 'egmctl\[mooncake\]'")
    assert listed(quick_master) == []
    assert host.status()["state"] == "provisioned"
    assert len(host.processes()) == 1  # the agent alone
    doctor = host.run("doctor", "--for", "shm", "--json")
    assert doctor.code == 0, doctor.stderr
    (check,) = [row for row in doctor.document["checks"] if row["id"] == "transfer-engine"]
    assert check["status"] != "pass"
    assert "egmctl[mooncake]" in check["hint"]

    assert host.run("teardown", "dev").code == 0
    assert whole.remains(quick_master) == []
    assert host.left() == []


def test_without_a_wheel_provision_and_mount_in_one_go_leaves_nothing_half_done(
    new_host: Callable[..., Host], quick_master: Master, python_without_wheel: str
) -> None:
    host = new_host(python=python_without_wheel)
    result = host.run("provision", host.spec(quick_master), "--mount", "--json")
    assert_error(result, 3, what="(?i)mooncake", where=".", do=r"egmctl\[mooncake\]")
    assert listed(quick_master) == []
    # The refusal is mount's: the memory was got, and stays under its agent until it is torn down.
    assert host.status()["state"] in ("provisioned", "gone")
    assert host.run("teardown", "dev").code == 0
    assert host.left() == []


def test_the_demo_without_a_wheel_says_what_to_install(
    new_host: Callable[..., Host], python_without_wheel: str
) -> None:
    host = new_host(python=python_without_wheel)
    result = host.run("demo", "--json")
    assert result.code == 3, result.stderr
    assert "Traceback" not in result.stderr
    assert "egmctl[mooncake]" in result.stderr
    assert host.left() == []
