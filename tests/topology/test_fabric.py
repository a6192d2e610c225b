from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from egmctl.topology.fabric import judge_fabric, read_imex_channels
from egmctl.topology.nvml import FabricInfo

GOOD = FabricInfo("completed", 0, "success", "01020304-0506-0708-090a-0b0c0d0e0f10", 3, "healthy", {})


def test_gpus_of_one_healthy_domain_pass_and_the_domain_is_named() -> None:
    verdict = judge_fabric([("0008:01:00.0", GOOD), ("0009:01:00.0", GOOD)])
    assert (verdict.status, verdict.domain, verdict.findings) == ("pass", (GOOD.cluster_uuid, 3), ())


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"state": "in progress"}, "fail", "fabric state in progress"),
        ({"state": "not started"}, "fail", "fabric state not started"),
        ({"status": 23, "status_name": "insufficient resources"}, "fail", "insufficient resources (NVML 23)"),
        ({"health": "unhealthy", "health_bits": {"route unhealthy": "yes"}}, "fail", "(route unhealthy: yes)"),
        ({"health": "limited capacity"}, "warn", "limited capacity"),
        ({"health": None}, "warn", "not reported"),
    ],
)
def test_one_gpu_that_is_not_well_is_found(change: dict[str, object], status: str, said: str) -> None:
    verdict = judge_fabric([("0008:01:00.0", GOOD), ("0009:01:00.0", replace(GOOD, **change))])  # type: ignore[arg-type]
    assert verdict.status == status
    assert [finding.gpu for finding in verdict.findings] == ["0009:01:00.0"]
    assert said in verdict.findings[0].observed


def test_a_zero_cluster_uuid_is_no_domain_though_all_gpus_agree_on_it() -> None:
    zero = replace(GOOD, cluster_uuid="00000000-0000-0000-0000-000000000000", clique_id=0)
    verdict = judge_fabric([("0000:8d:00.0", zero), ("0000:a7:00.0", zero)])
    assert (verdict.status, verdict.domain) == ("fail", None)
    assert all("cuda-posix" in finding.hint for finding in verdict.findings)


@pytest.mark.parametrize("change", [{"clique_id": 4}, {"cluster_uuid": "ff020304-0506-0708-090a-0b0c0d0e0f10"}])
def test_gpus_of_two_cliques_or_clusters_fail(change: dict[str, object]) -> None:
    verdict = judge_fabric([("0008:01:00.0", GOOD), ("0009:01:00.0", replace(GOOD, **change))])  # type: ignore[arg-type]
    assert (verdict.status, verdict.domain) == ("fail", None)
    assert "0009:01:00.0" in verdict.findings[0].observed


def test_no_information_and_no_gpu_are_unknown_and_not_passed() -> None:
    assert judge_fabric([("0008:01:00.0", None)]).status == "unknown"
    assert judge_fabric([]).status == "unknown"


def proc_with(tmp_path: Path, text: str) -> Path:
    (tmp_path / "devices").write_text(text)
    return tmp_path


def test_without_a_channel_file_the_remedy_has_the_major_and_the_lasting_option(tmp_path: Path) -> None:
    proc = proc_with(tmp_path, "Character devices:\n195 nvidia\n234 nvidia-caps-imex-channels\n")
    found = read_imex_channels(tmp_path / "none", proc)
    assert not found.usable
    assert "(major 234)" in found.observed()
    assert f"{tmp_path}/none/channel0 c 234 0" in found.remedy()
    assert "NVreg_CreateImexChannel0=1" in found.remedy()
    assert "as root" not in found.remedy()


def test_a_driver_without_imex_channels_is_said(tmp_path: Path) -> None:
    found = read_imex_channels(tmp_path / "none", proc_with(tmp_path, "195 nvidia\n"))
    assert found.major is None
    assert "not in /proc/devices" in found.remedy()


def test_a_channel_file_of_another_major_is_no_channel(tmp_path: Path) -> None:
    folder = tmp_path / "channels"
    folder.mkdir()
    (folder / "channel0").touch()
    (folder / "readme").touch()
    found = read_imex_channels(folder, proc_with(tmp_path, "234 nvidia-caps-imex-channels\n"))
    assert [channel.number for channel in found.channels] == [0]
    assert "has major 0, not 234" in found.observed()
    assert not found.usable


def test_a_channel_that_can_be_opened_needs_no_remedy(tmp_path: Path) -> None:
    folder = tmp_path / "channels"
    folder.mkdir()
    (folder / "channel3").symlink_to("/dev/null")  # a character device that opens; its major is 1
    found = read_imex_channels(folder, proc_with(tmp_path, "1 nvidia-caps-imex-channels\n"))
    assert found.usable
    assert found.remedy() == ""


def test_a_channel_that_cannot_be_opened_names_the_file_and_the_error(tmp_path: Path) -> None:
    folder = tmp_path / "channels"
    folder.mkdir()
    (folder / "channel0").symlink_to(tmp_path / "gone")
    found = read_imex_channels(folder, proc_with(tmp_path, "234 nvidia-caps-imex-channels\n"))
    assert "cannot be opened: No such file or directory (ENOENT)" in found.observed()
    assert f"--device {folder}/channel0" in found.remedy()
