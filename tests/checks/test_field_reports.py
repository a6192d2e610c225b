"""What went wrong for others with fabric memory: each kind of fault is found, and told with its remedy."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from egmctl.checks.base import CheckResult
from egmctl.checks.fabric import (
    FabricHealth,
    FabricPeer,
    ImexChannelFile,
    ImexService,
    MooncakeEnvironment,
    NvlinkWheel,
)
from egmctl.checks.gpus import CudaAttributes, CudaGranule, GpuNodes
from egmctl.checks.host import StateFolder
from egmctl.checks.machine import Machine
from egmctl.mooncake import wheel
from egmctl.mooncake.wheel import WheelInfo
from tests.checks.conftest import HEALTHY, MAJOR, ZERO, Build, program
from tests.model.config import Fault


def nowhere_says_root(found: dict[str, CheckResult]) -> bool:
    text = json.dumps([result.document() for result in found.values()]).lower()
    return "as root" not in text and "sudo" not in text


def test_a_tray_in_good_order_passes_every_check_and_is_still_told_what_one_machine_cannot_see(build: Build) -> None:
    found = build("gb200-tray").check("cuda-fabric")
    assert {result.id: result.status for result in found.values() if result.status != "pass"} == {
        "imex-service": "skip",
        "stock-nvlink": "warn",  # the wheel of this environment is the non-CUDA one
        "fabric-peer": "skip",
    }
    assert "cluster 01020304-0506-0708-090a-0b0c0d0e0f10, clique 3, 4 GPU(s) agree" in found["nvlink-fabric"].observed


# 1


def test_without_an_imex_channel_the_command_that_makes_one_is_printed_with_the_major(build: Build) -> None:
    host = build("gb200-tray", imex=False, fabric="not-permitted")
    found = host.check("cuda-fabric")
    channel = found["imex-channel"]
    assert channel.status == "fail"
    assert channel.observed == f"no IMEX channel file in {host.channels} (major {MAJOR})"
    assert f"mknod -m 0666 {host.channels}/channel0 c {MAJOR} 0" in channel.hint
    assert "NVreg_CreateImexChannel0=1" in channel.hint
    granule = found["cuda-granule/node0"]
    assert granule.status == "fail"
    assert "CUDA_ERROR_NOT_PERMITTED (800) [not-permitted]" in granule.observed.replace("mem_create: ", "")
    assert granule.hint == channel.hint
    assert nowhere_says_root(found)


def test_a_driver_without_imex_channels_gets_no_mknod_line(build: Build) -> None:
    host = build("hgx-h200", imex=False, fabric="not-permitted")
    (host.roots.proc / "devices").write_text("Character devices:\n195 nvidia\n")
    channel = host.check("cuda-fabric", ImexChannelFile)["imex-channel"]
    assert channel.status == "fail"
    assert "mknod" not in channel.hint
    assert "nvidia-caps-imex-channels is not in /proc/devices" in channel.hint


def test_a_channel_file_of_an_earlier_boot_is_found_out(build: Build) -> None:
    host = build("gb200-tray", fabric="not-permitted")
    (host.roots.proc / "devices").write_text(f"{MAJOR} nvidia-caps-imex-channels\n")
    found = host.check("cuda-fabric")
    assert found["imex-channel"].status == "fail"
    assert f"has major 1, not {MAJOR}" in found["imex-channel"].observed
    assert nowhere_says_root(found)


def test_fabric_memory_that_the_driver_really_gave_outweighs_a_missing_file(build: Build) -> None:
    channel = build("gb200-tray", imex=False).check("cuda-fabric", ImexChannelFile)["imex-channel"]
    assert channel.status == "warn"
    assert "yet the driver made and exported fabric memory" in channel.observed


# 2


@pytest.mark.parametrize(
    ("change", "outcome", "hint"),
    [
        ({"fabric": "not-permitted"}, "not-permitted", "check the domain"),
        ({"fabric": "not-supported"}, "not-supported", "cuda-posix"),
        ({"node_bytes": {0: 0, 1: 0}}, "out-of-memory", "free memory on the node"),
        ({"crash_nodes": (0, 1)}, "crashed", "update it"),
        ({"hang_nodes": (0, 1)}, "timeout", "the driver hangs"),
        ({"refuse_nodes": {0: ("CUDA_ERROR_UNKNOWN", 999), 1: ("CUDA_ERROR_UNKNOWN", 999)}}, "failed", "dmesg"),
    ],
)
def test_an_attribute_says_yes_and_the_granule_says_why_not(
    build: Build, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], outcome: str, hint: str
) -> None:
    monkeypatch.setattr(Machine, "probe_seconds", 2.0 if outcome == "timeout" else 60.0)
    found = build("gb200-tray", **change).check("cuda-fabric")
    assert found["cuda-attributes/gpu0/128"].status == "pass"
    for node in (0, 1):
        granule = found[f"cuda-granule/node{node}"]
        assert granule.status == "fail"
        assert granule.observed.endswith(f"[{outcome}]")
        assert hint in granule.hint
    assert nowhere_says_root(found)


def test_attribute_143_at_0_is_no_and_unknown_is_not_no(build: Build) -> None:
    no = build("gb200-tray", attributes={143: 0}).check("cuda-fabric", CudaAttributes)
    assert no["cuda-attributes/gpu3/143"].status == "fail"
    assert no["cuda-attributes/gpu3/143"].observed == "attribute 143 (HOST_NUMA_MULTINODE_IPC) is 0"
    assert "cuda-posix" in no["cuda-attributes/gpu3/143"].hint


def test_an_attribute_that_the_driver_does_not_know_is_unknown_and_refuses_nothing(build: Build) -> None:
    host = build("gb200-tray", attributes={143: None})
    unknown = host.check("cuda-fabric")["cuda-attributes/gpu0/143"]
    assert unknown.status == "unknown"
    assert "does not know attribute 143" in unknown.observed
    assert host.doctor("cuda-fabric")["ok"]


# 3


def test_a_machine_alone_is_told_that_its_peers_were_not_asked(build: Build) -> None:
    peer = build("gb200-tray").check("cuda-fabric", FabricPeer)["fabric-peer"]
    assert peer.status == "skip"
    assert "local only" in peer.observed
    assert "another node" in peer.hint


# 4, 5


@pytest.mark.parametrize(
    ("said", "status", "observed"),
    [
        (ZERO, "fail", "cluster UUID 00000000-0000-0000-0000-000000000000"),
        (
            replace(HEALTHY, status=23, status_name="insufficient resources"),
            "fail",
            "fabric status insufficient resources (NVML 23)",
        ),
        (replace(HEALTHY, state="in progress"), "fail", "fabric state in progress"),
        (
            replace(HEALTHY, health="unhealthy", health_bits={"route unhealthy": "yes"}),
            "fail",
            "fabric health unhealthy (route unhealthy: yes)",
        ),
        (replace(HEALTHY, health="limited capacity"), "warn", "fabric health limited capacity"),
        (None, "unknown", "NVML gives no fabric information"),
    ],
)
def test_one_gpu_of_four_that_is_not_well_in_the_fabric_is_found(
    build: Build, said: Any, status: str, observed: str
) -> None:
    host = build("gb200-tray", fabrics=[HEALTHY, HEALTHY, said, HEALTHY])
    found = host.check("cuda-fabric", FabricHealth)
    bad = found["nvlink-fabric/0018:01:00.0"]
    assert (bad.status, bad.observed) == (status, observed)
    assert bad.hint
    assert [name for name in found if "/" in name] == [bad.id], "nobody else's trouble"


def test_zeros_that_agree_are_no_domain(build: Build) -> None:
    found = build("hgx-h200", fabrics=[ZERO] * 8).check("cuda-fabric", FabricHealth)
    assert {found[name].status for name in found if name.startswith("nvlink-fabric/")} == {"fail"}
    assert "nvlink-fabric" not in found, "nothing says that they agree"


@pytest.mark.parametrize("change", [{"clique_id": 4}, {"cluster_uuid": "ff020304-0506-0708-090a-0b0c0d0e0f10"}])
def test_gpus_in_two_cliques_or_clusters_are_not_one_domain(build: Build, change: dict[str, Any]) -> None:
    other = replace(HEALTHY, **change)
    found = build("gb200-tray", fabrics=[HEALTHY, HEALTHY, other, other]).check("cuda-fabric", FabricHealth)
    assert found["nvlink-fabric"].status == "fail"
    assert "0018:01:00.0 in " in found["nvlink-fabric"].observed


def test_without_nvml_the_fabrics_state_is_unknown_and_the_granule_decides(build: Build) -> None:
    host = build("gb200-tray", fabrics=None)
    assert host.check("cuda-fabric")["nvlink-fabric"].status == "unknown"
    assert host.doctor("cuda-fabric")["ok"]


# 6


@pytest.mark.parametrize("product", ["NVIDIA GH200 480GB", "NVIDIA H200", "NVIDIA GB200", "Graphics Device"])
def test_a_products_name_decides_nothing(build: Build, product: str) -> None:
    host = build("gb200-tray", product=product)
    assert host.topology.gpus[0].name == product
    assert host.doctor("cuda-fabric")["ok"]


# 7


def test_memory_without_cpus_is_never_probed_unless_asked_for_and_then_costs_only_the_child(build: Build) -> None:
    host = build("gb200-tray", nodes=(0, 1, 2, 10, 18, 26), crash_nodes=(2, 10, 18, 26))
    found = host.check("cuda-fabric")
    assert [name for name in found if name.startswith("cuda-granule/")] == ["cuda-granule/node0", "cuda-granule/node1"]
    assert "2 gpu-memory" in found["numa-nodes"].observed
    found = host.check("cuda-fabric", nodes=[0, 2])
    assert found["numa-nodes"].status == "fail"
    assert found["cuda-granule/node0"].status == "pass"
    assert found["cuda-granule/node2"].observed == "the driver ended the process: SIGSEGV [crashed]"
    assert "only nodes with CPUs" in found["cuda-granule/node2"].hint


# 8


def forget_nodes(description: dict[str, Any]) -> None:
    for gpu in description["pci"]:
        gpu["numa_node"] = -1


def test_where_sysfs_says_minus_one_the_source_that_answered_is_told(build: Build) -> None:
    found = build("vm-h200").check("cuda-posix", GpuNodes)["gpu-numa"]
    assert found.status == "warn"
    assert "0000:8d:00.0 on node 0 (cuda)" in found.observed
    assert "sysfs says -1" in found.observed


def test_several_nodes_and_nobody_who_knows_want_an_explicit_list(build: Build) -> None:
    host = build("hgx-h200", change=forget_nodes, attributes={134: -1})
    found = host.check("cuda-posix", GpuNodes)["gpu-numa"]
    assert found.status == "fail"
    assert found.hint == 'give the nodes yourself: egm_numa_nodes = "0,1"'
    given = host.check("cuda-posix", GpuNodes, nodes=[0, 1])["gpu-numa"]
    assert given.status == "warn", "the list was given: what the GPUs' nodes are does not matter any more"


# 14


def test_a_wheel_without_nvlink_is_named_with_the_builds_that_have_it(build: Build) -> None:
    found = build("gb200-tray").check("cuda-fabric", NvlinkWheel)["stock-nvlink"]
    assert found.status == "warn"
    assert "mooncake-transfer-engine-non-cuda" in found.observed
    assert "SUPPORT_MNNVL" in found.observed
    assert "arm64" in found.hint
    assert "USE_MNNVL" in found.hint


@pytest.mark.parametrize(
    ("info", "status"),
    [
        (WheelInfo(True, "mooncake-transfer-engine-cuda13", "0.3.14", "cuda13", has_nvlink=True), "pass"),
        (WheelInfo(True, "mooncake-transfer-engine-cuda13", "0.3.14", "cuda13", has_nvlink=None), "unknown"),
        (WheelInfo(False, "mooncake-transfer-engine", "0.3.14", "cuda12", error="libcuda.so.1: no"), "unknown"),
        (WheelInfo(False, error="no Mooncake wheel is installed"), "skip"),
    ],
)
def test_what_a_wheel_does_not_say_is_not_taken_for_no(
    build: Build, monkeypatch: pytest.MonkeyPatch, info: WheelInfo, status: str
) -> None:
    monkeypatch.setattr(wheel, "wheel_info", lambda: info)
    assert build("gb200-tray").check("cuda-fabric", NvlinkWheel)["stock-nvlink"].status == status


@pytest.mark.parametrize("value", ["0", "", "1"])
def test_a_variable_that_turns_fabric_memory_off_is_found_whatever_its_value(build: Build, value: str) -> None:
    host = build("gb200-tray")
    found = host.check("cuda-fabric", MooncakeEnvironment, MC_USE_NVLINK_IPC=value)["mooncake-environment"]
    assert found.status == "warn"
    assert f"MC_USE_NVLINK_IPC={value!r}" in found.observed
    assert found.hint == "unset MC_USE_NVLINK_IPC"
    assert host.check("cuda-fabric", MooncakeEnvironment)["mooncake-environment"].status == "pass"


# 18


@pytest.mark.parametrize("call", ["address_reserve", "mem_map", "set_access", "export_fabric"])
def test_a_granule_that_fails_half_way_leaves_nothing_behind(build: Build, tmp_path: Path, call: str) -> None:
    host = build("gb200-tray", faults=[Fault(call)], leaks=tmp_path / "leaks")
    found = host.check("cuda-fabric", CudaGranule)
    for node in (0, 1):
        assert found[f"cuda-granule/node{node}"].status == "fail"
        assert "CUDA_ERROR_UNKNOWN (999)" in found[f"cuda-granule/node{node}"].observed
    lines = [json.loads(line) for line in (tmp_path / "leaks").read_text().splitlines()]
    assert [line["total"] for line in lines] == [0, 0]
    assert not list((tmp_path / "memory").glob("alloc-*"))


# 20


def running(word: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            text = (entry / "cmdline").read_bytes().decode().replace("\0", " ")
        except OSError:
            continue
        if word in text:
            found.append(text)
    return found


def test_a_hanging_imex_daemon_is_the_finding_and_nothing_hangs_with_it(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = build("gb200-tray")
    program(host.roots.dev / "bin", "nvidia-imex-ctl", "/bin/sleep 61.5\necho READY")
    monkeypatch.setattr(ImexService, "seconds", 0.5)
    began = time.monotonic()
    (found,) = ImexService().run(host.machine("cuda-fabric"))
    assert time.monotonic() - began < 5
    assert found.status == "fail"
    assert found.observed == "nvidia-imex-ctl -q gave no answer within 0.5 s"
    assert "systemctl restart nvidia-imex" in found.hint
    until = time.monotonic() + 5
    while running("sleep 61.5") and time.monotonic() < until:
        time.sleep(0.05)  # killed, and not gone yet
    assert not running("sleep 61.5"), "what it had started ended with it"


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        ("echo READY", "pass", "READY"),
        ("echo 'NOT READY'", "fail", "NOT READY"),
        ("echo READY; exit 3", "fail", "READY"),
        ("exit 1", "fail", "says nothing and exits with 1"),
        ('test "$1" = -q && echo ready', "pass", "ready"),
    ],
)
def test_the_imex_daemons_own_word_is_told(build: Build, script: str, status: str, said: str) -> None:
    host = build("gb200-tray")
    program(host.roots.dev / "bin", "nvidia-imex-ctl", script)
    (found,) = ImexService().run(host.machine("cuda-fabric"))
    assert found.status == status
    assert said in found.observed


def test_a_program_that_cannot_be_started_is_unknown(build: Build) -> None:
    host = build("gb200-tray")
    path = program(host.roots.dev / "bin", "nvidia-imex-ctl", "")
    path.write_bytes(b"#!/nonexistent/interpreter\n")
    os.chmod(path, 0o755)
    (found,) = ImexService().run(host.machine("cuda-fabric"))
    assert found.status == "unknown"


# The state folder, and machines without what others have


@pytest.mark.parametrize(
    ("mounts", "status", "said"),
    [
        ("server:/home / nfs4 rw 0 0\n", "warn", "network file system (nfs4)"),
        ("/dev/vda1 / ext4 rw 0 0\nserver:/x {tmp} nfs rw 0 0\n", "warn", "network file system (nfs)"),
        ("/dev/vda1 / ext4 rw 0 0\nserver:/x {tmp} fuse.sshfs rw 0 0\n", "warn", "network file system (fuse.sshfs)"),
        ("server:/x / nfs rw 0 0\n/dev/vda1 {tmp} xfs rw 0 0\n", "pass", "xfs"),
        ("server:/x {tmp} nfs rw 0 0\n/dev/vda1 {tmp} xfs rw 0 0\n", "pass", "xfs"),
        ("/dev/vda1 / ext4 rw 0 0\nserver:/x {tmp}x nfs rw 0 0\n", "pass", "ext4"),
        ("", "pass", "file system unknown"),
        ("garbage\n\n/dev/vda1 / btrfs rw 0 0\n", "pass", "btrfs"),
    ],
)
def test_a_state_folder_on_a_network_file_system_is_warned_of(
    build: Build, tmp_path: Path, mounts: str, status: str, said: str
) -> None:
    host = build("laptop")
    (host.roots.proc / "self/mounts").write_text(mounts.replace("{tmp}", str(tmp_path)))
    found = host.check("shm", StateFolder)["state-folder"]
    assert found.status == status
    assert said in found.observed


def test_a_mount_point_with_a_space_in_its_name_is_understood(build: Build, tmp_path: Path) -> None:
    host = build("laptop")
    folder = tmp_path / "my state"
    folder.mkdir()
    host.paths = replace(host.paths, state=folder / "egmctl")
    table = f"/dev/vda1 / ext4 rw 0 0\nserver:/x {tmp_path}/my\\040state nfs rw 0 0\n"
    (host.roots.proc / "self/mounts").write_text(table)
    assert host.check("shm", StateFolder)["state-folder"].status == "warn"


def test_a_link_into_a_network_file_system_is_followed(build: Build, tmp_path: Path) -> None:
    host = build("laptop")
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far")
    host.paths = replace(host.paths, state=tmp_path / "near")
    (host.roots.proc / "self/mounts").write_text(f"/dev/vda1 / ext4 rw 0 0\nserver:/x {tmp_path}/far nfs rw 0 0\n")
    assert host.check("shm", StateFolder)["state-folder"].status == "warn"


def test_a_nearly_full_disk_is_warned_of_before_a_record_fails(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    host = build("laptop")
    real = os.statvfs(host.paths.state.parent)
    full = os.statvfs_result((*real[:4], 100, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    found = host.check("shm", StateFolder)["state-folder"]
    assert found.status == "warn"
    assert "free" in found.observed


def test_a_laptop_has_no_driver_and_is_told_what_would_bring_one(build: Build) -> None:
    found = build("laptop").check("cuda-posix")
    assert found["cuda-driver"].status == "fail"
    assert "DRIVER_NOT_FOUND (-1)" in found["cuda-driver"].observed
    assert found["cuda-granule"].status == found["cuda-attributes"].status == "skip"
