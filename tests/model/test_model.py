"""The model of the driver itself: that it is strict, asynchronous, and tells what is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from egmctl.memory.driver import AllocationProp, CudaError, HandleType, Location
from tests.model.config import Config, Device, Fault
from tests.model.driver import ModelDriver

UNIT = 2 << 20
ROOT = Path(__file__).resolve().parents[2]
POSIX = AllocationProp(Location("host_numa", 0), HandleType.POSIX_FD)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(directory=tmp_path / "machine")


def in_child(config: Config, body: str) -> subprocess.CompletedProcess[str]:
    start = "from egmctl import seams\nseams.load()\nfrom egmctl.memory.driver import *\ndriver = get_driver()\n"
    start += "prop = AllocationProp(Location('host_numa', 0), HandleType.POSIX_FD)\n"
    env = {**os.environ, **config.to_env(), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", start + body]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def mapped(driver: ModelDriver) -> int:
    address = driver.address_reserve(UNIT)
    driver.mem_map(address, UNIT, 0, driver.mem_create(UNIT, POSIX))
    driver.set_access(address, UNIT, [Location("device", 0), Location("host_numa", 0)])
    return address


def test_a_configuration_survives_the_environment(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config.nodes, config.devices = (0, 2), (Device("0008:01:00.0", 2, total_bytes=UNIT),)
    config.attributes, config.refuse_nodes = {143: None}, {2: ("CUDA_ERROR_UNKNOWN", 999)}
    config.faults, config.log = [Fault("mem_map", 2)], config.directory / "log"
    for name, value in config.to_env().items():
        monkeypatch.setenv(name, value)
    assert Config.from_env() == config


def test_a_misspelt_configuration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EGMCTL_MODEL", '{"fabrik": "ok"}')
    with pytest.raises(ValueError, match="fabrik"):
        Config.from_env()


def test_what_a_process_leaves_is_reported_at_its_exit(config: Config, tmp_path: Path) -> None:
    config.leaks = tmp_path / "leaks"
    clean = in_child(config, "driver.mem_release(driver.mem_create(2 << 20, prop))")
    leaky = in_child(config, "driver.export_fd(driver.mem_create(2 << 20, prop)); driver.address_reserve(2 << 20)")
    assert clean.returncode == leaky.returncode == 0, leaky.stderr
    first, second = (json.loads(line) for line in config.leaks.read_text().splitlines())
    assert first["total"] == 0
    assert second["leaks"] == {"handles": 1, "reservations": 1, "descriptors": 1}


def test_calls_are_written_down_with_their_outcome(config: Config, tmp_path: Path) -> None:
    config.log = tmp_path / "log"
    done = in_child(config, "driver.version()\ntry: driver.mem_create(1, prop)\nexcept CudaError: pass")
    assert done.returncode == 0, done.stderr
    calls = [json.loads(line) for line in config.log.read_text().splitlines()]
    assert [(call["call"], call["outcome"]) for call in calls] == [
        ("version", "ok"),
        ("mem_create", "CUDA_ERROR_INVALID_VALUE"),
    ]


def test_a_call_fails_as_often_as_it_is_told_to(config: Config) -> None:
    config.faults = [Fault("version", nth=2, times=2), Fault("device_count", nth=0)]
    driver = ModelDriver(config)

    def works(act: object) -> bool:
        try:
            act()  # type: ignore[operator]
        except CudaError:
            return False
        return True

    assert [works(driver.version) for _ in range(4)] == [True, False, False, True]
    assert not any(works(driver.device_count) for _ in range(3))


def test_a_copy_is_not_done_when_the_call_returns(config: Config) -> None:
    config.copy_delay = 0.2
    driver = ModelDriver(config)
    driver.use_device(0)
    address, hbm = mapped(driver), driver.mem_alloc(UNIT)
    stream, event = driver.stream_create(), driver.event_create()
    driver.memcpy_async(hbm, address, UNIT, stream)
    driver.event_record(event, stream)
    assert not driver.event_query(event)
    driver.event_synchronize(event)
    assert driver.event_query(event)


def test_memory_unmapped_under_a_queued_copy_breaks_the_context_for_good(config: Config) -> None:
    config.copy_delay = 0.2
    driver = ModelDriver(config)
    driver.use_device(0)
    address, hbm, stream = mapped(driver), driver.mem_alloc(UNIT), driver.stream_create()
    driver.memcpy_async(hbm, address, UNIT, stream)
    driver.mem_unmap(address, UNIT)
    for _ in range(2):
        with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
            driver.stream_synchronize(stream)


def test_a_copy_to_freed_or_foreign_addresses_is_refused(config: Config) -> None:
    driver = ModelDriver(config)
    driver.use_device(0)
    hbm, stream = driver.mem_alloc(UNIT), driver.stream_create()
    freed = driver.mem_alloc(UNIT)
    driver.mem_free(freed)
    for address in (freed, 1 << 45, 0):
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            driver.memcpy_async(hbm, address, 4096, stream)


def test_destroyed_streams_and_events_are_refused(config: Config) -> None:
    driver = ModelDriver(config)
    driver.use_device(0)
    stream, event = driver.stream_create(), driver.event_create()
    driver.stream_destroy(stream)
    driver.event_destroy(event)
    for act in (lambda: driver.stream_synchronize(stream), lambda: driver.event_query(event)):
        with pytest.raises(CudaError, match="INVALID_HANDLE"):
            act()


def test_memory_comes_back_only_with_its_last_mapping(config: Config) -> None:
    driver = ModelDriver(config)
    handle, address = driver.mem_create(UNIT, POSIX), driver.address_reserve(UNIT)
    driver.mem_map(address, UNIT, 0, handle)
    driver.mem_release(handle)
    assert any(config.directory.iterdir())
    driver.mem_unmap(address, UNIT)
    assert not any(config.directory.iterdir())
    driver.address_free(address, UNIT)
    assert driver.leaks() == {}
