from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path

import pytest

from egmctl.errors import UsageError
from egmctl.memory.driver import CudaError
from egmctl.topology import Topology, nvml, read_topology
from egmctl.topology.read import Roots
from egmctl.topology.visible import visible_devices
from tests.fixtures import machines
from tests.topology.conftest import CudaDevice, FakeCuda

Install = Callable[..., None]
Read = Callable[..., Topology]
H200 = "NVIDIA H200"


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Read a laid-out machine as if it were this one: its /sys, a small /proc and an empty /dev."""

    def act(name: str, change: Callable[[dict], object] = lambda _: None, **environ: str) -> Topology:  # type: ignore[type-arg]
        description = machines.describe(name)
        change(description)
        root = tmp_path / "machine"
        proc, dev = root / "proc", root / "dev"
        (proc / "self").mkdir(parents=True)
        dev.mkdir()
        if environ.pop("driver_loaded", "yes") == "yes":
            (dev / "nvidiactl").touch()
        (proc / "meminfo").write_text("MemTotal: 4000 kB\nMemAvailable:    3000 kB\n")
        (proc / "self/status").write_text("Name:\tx\nMems_allowed_list:\t0-33\n")
        return read_topology(environ=environ, roots=Roots(machines.lay_out(description, root / "sys"), proc, dev))

    return act


def listed(count: int, name: str = H200, memory_nodes: tuple[int | None, ...] = ()) -> tuple[nvml.NvmlGpu, ...]:
    bdfs = ["0000:8d:00.0", "0000:a7:00.0"] if count == 2 else [f"0000:{index:02x}:00.0" for index in range(count)]
    nodes = memory_nodes or (None,) * count
    return tuple(nvml.NvmlGpu(i, f"GPU-{i}0000000-aaaa", name, bdfs[i], nodes[i]) for i in range(count))


def devices(*nodes: int | None) -> FakeCuda:
    bdfs = ["0000:8d:00.0", "0000:a7:00.0"]
    return FakeCuda([CudaDevice(f"GPU-{i}0000000-aaaa", H200, bdfs[i], node) for i, node in enumerate(nodes)])


def test_a_machine_without_a_gpu_says_nothing_and_asks_nobody(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(nvml, "get_nvml", forbidden)
    topology = read("laptop", CUDA_VISIBLE_DEVICES="MIG-1", driver_loaded="no")
    assert (topology.gpus, topology.warnings, topology.headroom) == ((), (), 3000 * 1024)


def test_where_sysfs_says_minus_one_cuda_answers(read: Read, stand_in: Install) -> None:
    stand_in(listed(2), devices(0, 0))
    topology = read("vm-h200")
    assert [(gpu.bdf, gpu.numa_node, gpu.source, gpu.note, gpu.name) for gpu in topology.gpus] == [
        ("0000:8d:00.0", 0, "cuda", "sysfs says -1", H200),
        ("0000:a7:00.0", 0, "cuda", "sysfs says -1", H200),
    ]
    assert topology.warnings == ()


def test_sysfs_wins_over_cuda_and_the_disagreement_is_shown(read: Read, stand_in: Install) -> None:
    stand_in(None, FakeCuda([CudaDevice("GPU-1", H200, "0000:9b:00.0", 0)]))
    topology = read("hgx-h200")
    assert [(gpu.numa_node, gpu.source) for gpu in topology.gpus] == [(1, "sysfs")]
    assert topology.gpus[0].note == "sysfs says node 1, CUDA says node 0"
    assert "GPU 0000:9b:00.0: sysfs says node 1, CUDA says node 0; sysfs is used" in topology.warnings


def test_a_gpu_that_sysfs_does_not_show_is_placed_by_cuda(read: Read, stand_in: Install) -> None:
    stand_in(None, FakeCuda([CudaDevice("GPU-1", H200, "0000:77:00.0", 1)]))
    topology = read("hgx-h200")
    assert [(gpu.numa_node, gpu.source, gpu.note) for gpu in topology.gpus] == [(1, "cuda", "not in sysfs")]


def test_nvmls_numa_id_is_shown_and_never_used(read: Read, stand_in: Install) -> None:
    bdfs = ["00000008:01:00.0", "00000009:01:00.0", "00000018:01:00.0", "00000019:01:00.0"]
    gpus = tuple(
        nvml.NvmlGpu(i, f"GPU-{i}", "NVIDIA GB200", bdf.removeprefix("0000"), 2 + 8 * i) for i, bdf in enumerate(bdfs)
    )
    stand_in(gpus, None)

    def forget(description: dict) -> None:  # type: ignore[type-arg]
        description["generic_initiators"] = None
        description["pci"][1]["numa_node"] = -1

    topology = read("gb200-tray", forget)
    assert [gpu.numa_node for gpu in topology.gpus] == [0, None, 1, 1]
    assert topology.gpus[1].note == "sysfs says -1; its own memory is node 10"
    assert topology.gpus[3].note == "its own memory is node 26"
    assert {node.id for node in topology.nodes if node.role == "gpu-memory"} == {2, 10, 18, 26}


def test_cudas_own_memory_node_marks_the_node_as_gpu_memory(read: Read, stand_in: Install) -> None:
    stand_in(None, FakeCuda([CudaDevice("GPU-0", "NVIDIA GB200", "0008:01:00.0", 0, 2)]))
    topology = read("gb200-tray", lambda description: description.update(generic_initiators=None))
    assert [node.id for node in topology.nodes if node.role == "gpu-memory"] == [2]
    assert [node.id for node in topology.eligible()] == [0, 1]


def test_cudas_host_node_places_a_gpu_and_its_own_memory_node_does_not(read: Read, stand_in: Install) -> None:
    stand_in(None, FakeCuda([CudaDevice("GPU-0", "NVIDIA GB200", "0018:01:00.0", 1, 18)]))
    topology = read("gb200-tray", lambda description: [device.update(numa_node=-1) for device in description["pci"]])
    assert [(gpu.numa_node, gpu.source) for gpu in topology.gpus] == [(1, "cuda")]
    assert topology.gpus[0].note == "sysfs says -1; its own memory is node 18"


def test_without_cuda_nvml_lists_and_the_variable_is_applied(read: Read, stand_in: Install) -> None:
    stand_in(listed(2), None)
    topology = read("vm-h200", CUDA_VISIBLE_DEVICES="GPU-1")
    assert [(gpu.index, gpu.bdf, gpu.source) for gpu in topology.gpus] == [(0, "0000:a7:00.0", "only-node")]
    assert any("cuInit: DRIVER_NOT_FOUND (-1)" in line for line in topology.warnings)


def test_without_any_library_sysfs_lists_and_says_so(read: Read, stand_in: Install) -> None:
    stand_in(None, None)
    topology = read("hgx-h200", CUDA_VISIBLE_DEVICES="5,0")
    assert [(gpu.bdf, gpu.numa_node) for gpu in topology.gpus] == [("0000:ab:00.0", 1), ("0000:19:00.0", 0)]
    assert any("listed by sysfs alone" in line for line in topology.warnings)


def test_gpus_that_this_process_cannot_use_are_not_listed_and_said(read: Read, stand_in: Install) -> None:
    stand_in(None, None)
    topology = read("hgx-h200", driver_loaded="no")
    assert topology.gpus == ()
    assert len(topology.warnings) == 1
    assert "sysfs lists 8 NVIDIA GPU(s), none of which this process can use" in topology.warnings[0]


def test_sysfs_alone_cannot_tell_uuids_and_says_so(read: Read, stand_in: Install) -> None:
    stand_in(None, None)
    topology = read("hgx-h200", CUDA_VISIBLE_DEVICES="GPU-1")
    assert topology.gpus == ()
    assert any("names GPUs by UUID, which sysfs does not know" in line for line in topology.warnings)


def test_cuda_tells_uuids_where_nvml_is_absent(read: Read, stand_in: Install) -> None:
    stand_in(None, FakeCuda([CudaDevice("GPU-1", H200, "0000:9b:00.0", 1)]))
    assert [gpu.bdf for gpu in read("hgx-h200", CUDA_VISIBLE_DEVICES="GPU-1").gpus] == ["0000:9b:00.0"]


def test_an_empty_variable_hides_all_gpus_without_asking_cuda(read: Read, stand_in: Install) -> None:
    stand_in(listed(2), FakeCuda([], CudaError("cuInit", "CUDA_ERROR_UNKNOWN", 999)))
    topology = read("vm-h200", CUDA_VISIBLE_DEVICES="")
    assert topology.gpus == ()
    assert topology.warnings == ("CUDA_VISIBLE_DEVICES='' hides all GPUs",)


def test_a_driver_that_sees_no_device_where_there_are_some_is_said(read: Read, stand_in: Install) -> None:
    stand_in(listed(2), FakeCuda([], CudaError("cuInit", "CUDA_ERROR_NO_DEVICE", 100)))
    topology = read("vm-h200")
    assert topology.gpus == ()
    assert "CUDA_ERROR_NO_DEVICE (100)" in topology.warnings[0]


def test_a_gpu_that_only_cuda_lists_is_said(read: Read, stand_in: Install) -> None:
    stand_in(listed(2)[:1], devices(0, 0))
    assert read("vm-h200").warnings == ("CUDA lists GPU 0000:a7:00.0, NVML does not",)


def test_mig_is_refused_in_one_sentence(read: Read, stand_in: Install) -> None:
    stand_in(listed(2), devices(0, 0))
    with pytest.raises(UsageError, match=r"names a MIG instance \(MIG-12\): egmctl works on whole GPUs only"):
        read("vm-h200", CUDA_VISIBLE_DEVICES="MIG-12")


def test_mig_mode_without_the_variable_is_said(read: Read, stand_in: Install) -> None:
    gpu = nvml.NvmlGpu(0, "GPU-0", H200, "0000:8d:00.0", None, True)
    stand_in((gpu,), devices(0))
    assert "GPU 0000:8d:00.0 has MIG on" in read("vm-h200").warnings[0]


def test_ordinals_of_unlike_gpus_are_in_doubt_without_cuda(read: Read, stand_in: Install) -> None:
    mixed = (*listed(2)[:1], nvml.NvmlGpu(1, "GPU-1", "NVIDIA L4", "0000:a7:00.0"))
    stand_in(mixed, None)
    assert any("CUDA_DEVICE_ORDER=PCI_BUS_ID" in line for line in read("vm-h200", CUDA_VISIBLE_DEVICES="1").warnings)


def test_with_pci_order_ordinals_of_unlike_gpus_are_certain(read: Read, stand_in: Install) -> None:
    mixed = (*listed(2)[:1], nvml.NvmlGpu(1, "GPU-1", "NVIDIA L4", "0000:a7:00.0"))
    stand_in(mixed, None)
    topology = read("vm-h200", CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert [gpu.name for gpu in topology.gpus] == ["NVIDIA L4"]
    assert not any("CUDA_DEVICE_ORDER" in line for line in topology.warnings)


UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        (" ", []),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("0,1,-1,2", [0, 1]),
        ("-1", []),
        ("0,9,1", [0]),
        ("0,,1", [0]),
        ("none", []),
        ("NoDevFiles", []),
        ("1x,2", [1, 2]),  # as strtol reads it
        ("1,1", []),
        ("GPU-bb33", [2]),
        ("GPU-b,GPU-c", [2, 3]),
        ("GPU-cc44,GPU-aa11", [3, 0]),
        ("GPU-aa", []),  # fits two
        ("GPU-b,GPU-aa,GPU-c", [2]),
        ("GPU-zz,GPU-b", []),
        ("GPU-b,0", [2]),
        ("0,GPU-b", [0]),
        ("GPU-b,GPU-bb33", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_does(value: str | None, shown: list[int]) -> None:
    assert visible_devices({} if value is None else {"CUDA_VISIBLE_DEVICES": value}, UUIDS) == shown


class Module(types.SimpleNamespace):
    """Looks like pynvml: one GPU, and a fabric of the given structure version."""

    class NVMLError(Exception):
        pass

    def __init__(self, fabric_version: int = 3, state: int = 3, uuid: bytes = bytes(16), **more: object) -> None:
        import ctypes

        class Info(ctypes.Structure):
            _fields_ = (
                ("clusterUuid", ctypes.c_uint8 * 16),
                ("status", ctypes.c_uint),
                ("cliqueId", ctypes.c_uint32),
                ("state", ctypes.c_uint8),
                ("healthMask", ctypes.c_uint32),
                ("healthSummary", ctypes.c_uint8),
            )

        class Info3(Info):
            pass

        def refuse(*_: object) -> None:
            raise self.NVMLError("Not Supported")

        def fill(_handle: int, pointer: object) -> int:
            info = pointer._obj  # type: ignore[attr-defined]
            if isinstance(info, Info3) != (fabric_version == 3):
                raise self.NVMLError("Argument Version Mismatch")
            info.state, info.cliqueId, info.status = state, 7, more.get("status", 0)
            info.clusterUuid[:] = uuid
            info.healthMask, info.healthSummary = more.get("mask", 0), more.get("summary", 0)
            return 0

        super().__init__(
            nvmlInit=lambda: None,
            nvmlSystemGetDriverVersion=lambda: "580.65.06",
            nvmlDeviceGetCount=lambda: 1,
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetPciInfo=lambda _: types.SimpleNamespace(busId=b"00000008:01:00.0"),
            nvmlDeviceGetUUID=lambda _: "GPU-1",
            nvmlDeviceGetName=lambda _: b"NVIDIA GB200",
            nvmlDeviceGetNumaNodeId=refuse,
            nvmlDeviceGetGpuFabricInfoV=fill,
            c_nvmlGpuFabricInfo_v3_t=Info3,
            c_nvmlGpuFabricInfo_v2_t=Info,
        )


def test_what_nvml_does_not_support_is_none() -> None:
    door = nvml.PynvmlDoor(Module())  # no nvmlDeviceGetMigMode at all
    assert door.gpus() == (nvml.NvmlGpu(0, "GPU-1", "NVIDIA GB200", "0008:01:00.0", None, None),)
    assert door.driver_version() == "580.65.06"


def test_a_gpu_without_a_fabric_has_no_fabric_information() -> None:
    assert nvml.PynvmlDoor(Module(state=0)).fabric(0) is None


def test_fabric_information_is_put_into_words() -> None:
    info = nvml.PynvmlDoor(Module(uuid=bytes(range(16)), summary=3, mask=1, status=23)).fabric(0)
    assert info == nvml.FabricInfo(
        "completed",
        23,
        "insufficient resources",
        "00010203-0405-0607-0809-0a0b0c0d0e0f",
        7,
        "limited capacity",
        {"degraded bandwidth": "yes"},
    )


def test_the_structures_of_the_real_module_have_the_fields_that_are_read() -> None:
    pynvml = pytest.importorskip("pynvml")
    named = {"clusterUuid", "status", "cliqueId", "state"}
    older = {name for name, _ in pynvml.c_nvmlGpuFabricInfo_t._fields_}
    newer = {name for name, _ in pynvml.c_nvmlGpuFabricInfo_v3_t._fields_}
    assert named <= older
    assert named | {"healthMask", "healthSummary"} <= newer
    assert pynvml.c_nvmlGpuFabricInfo_v3_t().version == pynvml.nvmlGpuFabricInfo_v3


@pytest.mark.parametrize(
    ("mask", "health"),
    [(0, None), (0b10, "healthy"), (0b01, "limited capacity"), (0b01 << 4, "unhealthy"), (5 << 8, "unhealthy")],
)
def test_an_older_driver_without_a_summary_gets_one_from_the_mask(mask: int, health: str | None) -> None:
    info = nvml.PynvmlDoor(Module(fabric_version=2, mask=mask)).fabric(0)
    assert info is not None
    assert info.health == health


def test_the_real_door_on_this_machine_is_open_or_says_why() -> None:
    door = nvml.get_nvml()
    assert (door is not None) != bool(nvml.why_no_nvml())
