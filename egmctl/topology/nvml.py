"""The one door to NVML: what a GPU or its driver does not support comes back as None, never as an exception.

`Nvml` is the seam where tests put recorded answers; the real one is `PynvmlDoor`, made only when it is asked for and
the library is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from egmctl.topology.bdf import Bdf

__all__ = [
    "FabricInfo",
    "Nvml",
    "NvmlGpu",
    "PynvmlDoor",
    "decode_health",
    "get_nvml",
    "install_nvml",
    "installed",
    "status_name",
    "why_no_nvml",
]


@dataclass(frozen=True)
class NvmlGpu:
    """One GPU as NVML lists it, visible to CUDA or not. ``memory_node`` is the NUMA node of its own HBM (never used
    for placement); ``mig`` whether MIG mode is on. None: not supported here."""

    index: int
    uuid: str
    name: str
    bdf: str
    memory_node: int | None = None
    mig: bool | None = None


@dataclass(frozen=True)
class FabricInfo:
    """``nvmlGpuFabricInfo``: ``state`` in words, ``status`` the fabric manager's NVML code with its name,
    ``cluster_uuid`` 8-4-4-4-12 hex, ``health`` a summary in words (None when this driver gives none) and
    ``health_bits`` the parts of the mask that are known, by name."""

    state: str
    status: int
    status_name: str
    cluster_uuid: str
    clique_id: int
    health: str | None = None
    health_bits: dict[str, str] = field(default_factory=dict)


class Nvml(Protocol):
    """What egmctl asks NVML."""

    def driver_version(self) -> str | None: ...
    def gpus(self) -> tuple[NvmlGpu, ...]: ...
    def fabric(self, index: int) -> FabricInfo | None:
        """The GPU's place in the NVLink fabric; None when the GPU or driver has no such thing."""


# nvml.h: nvmlReturn_t, the ones a fabric manager reports
_STATUS = {
    0: "success",
    1: "uninitialized",
    2: "invalid argument",
    3: "not supported",
    4: "no permission",
    6: "not found",
    10: "timeout",
    15: "GPU is lost",
    16: "reset required",
    19: "in use",
    20: "memory",
    21: "no data",
    23: "insufficient resources",
    26: "not ready",
    999: "unknown",
}
# nvml.h: NVML_GPU_FABRIC_STATE_*
_STATE = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
# nvml.h: NVML_GPU_FABRIC_HEALTH_SUMMARY_*
_SUMMARY = {1: "healthy", 2: "unhealthy", 3: "limited capacity"}
# nvml.h: NVML_GPU_FABRIC_HEALTH_MASK_*: name, shift, width in bits, value -> word; 0 is "not supported" for each
_YES_NO = {1: "yes", 2: "no"}
_HEALTH: tuple[tuple[str, int, int, dict[int, str]], ...] = (
    ("degraded bandwidth", 0, 2, _YES_NO),
    ("route recovery", 2, 2, _YES_NO),
    ("route unhealthy", 4, 2, _YES_NO),
    ("access timeout recovery", 6, 2, _YES_NO),
    (
        "incorrect configuration",
        8,
        4,
        {
            1: "none",
            2: "incorrect system GUID",
            3: "incorrect chassis serial number",
            4: "no partition",
            5: "insufficient NVLinks",
            6: "incompatible GPU firmware",
            7: "invalid location",
            8: "invalid GPU state",
        },
    ),
)
_BAD = {"route unhealthy": "yes", "access timeout recovery": "yes"}


def decode_health(mask: int, summary: int | None) -> tuple[str | None, dict[str, str]]:
    """(summary in words, known parts by name). Drivers before the summary get one drawn from the parts."""
    bits: dict[str, str] = {}
    for name, shift, width, words in _HEALTH:
        value = mask >> shift & ((1 << width) - 1)
        if value:
            bits[name] = words.get(value, f"value {value}")
    if summary:
        return _SUMMARY.get(summary, f"value {summary}"), bits
    if not bits:
        return None, bits
    unhealthy = any(bits.get(name) == word for name, word in _BAD.items())
    unhealthy = unhealthy or bits.get("incorrect configuration", "none") != "none"
    if unhealthy:
        return "unhealthy", bits
    return ("limited capacity" if bits.get("degraded bandwidth") == "yes" else "healthy"), bits


def status_name(status: int) -> str:
    """The words for an nvmlReturn_t."""
    return _STATUS.get(status, f"NVML code {status}")


class PynvmlDoor:
    """NVML through the ``pynvml`` module (or, in tests, something that looks like it)."""

    def __init__(self, module: Any) -> None:
        self._nvml = module
        module.nvmlInit()

    def _ask(self, name: str, *arguments: Any) -> Any:
        """The answer, or None for any NVML error and for a function this module or driver lacks."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    @staticmethod
    def _string(value: Any) -> str:
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")

    def driver_version(self) -> str | None:
        return self._string(self._ask("nvmlSystemGetDriverVersion")) or None

    def gpus(self) -> tuple[NvmlGpu, ...]:
        gpus = []
        for index in range(self._ask("nvmlDeviceGetCount") or 0):
            handle = self._ask("nvmlDeviceGetHandleByIndex", index)
            pci = None if handle is None else self._ask("nvmlDeviceGetPciInfo", handle)
            if pci is None:
                continue
            node = self._ask("nvmlDeviceGetNumaNodeId", handle)
            mig = self._ask("nvmlDeviceGetMigMode", handle)
            gpus.append(
                NvmlGpu(
                    index=index,
                    uuid=self._string(self._ask("nvmlDeviceGetUUID", handle)),
                    name=self._string(self._ask("nvmlDeviceGetName", handle)),
                    bdf=str(Bdf.parse(self._string(pci.busId))),
                    memory_node=node if isinstance(node, int) and node >= 0 else None,
                    mig=None if mig is None else bool(mig[0]),
                )
            )
        return tuple(gpus)

    def fabric(self, index: int) -> FabricInfo | None:
        handle = self._ask("nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            return None
        # Newest first: an older driver refuses a structure version that it does not know.
        for structure, function in (
            ("c_nvmlGpuFabricInfo_v3_t", "nvmlDeviceGetGpuFabricInfoV"),
            ("c_nvmlGpuFabricInfo_v2_t", "nvmlDeviceGetGpuFabricInfoV"),
            ("c_nvmlGpuFabricInfo_t", "nvmlDeviceGetGpuFabricInfo"),
        ):
            info = self._fabric(handle, structure, function)
            if info is not None:
                return info
        return None

    def _fabric(self, handle: Any, structure: str, function: str) -> FabricInfo | None:
        make = getattr(self._nvml, structure, None)
        if make is None:
            return None
        from ctypes import byref

        info = make()
        if self._ask(function, handle, byref(info)) is None or info.state == 0:
            return None
        digits = bytes(info.clusterUuid).hex()
        health, bits = decode_health(getattr(info, "healthMask", 0), getattr(info, "healthSummary", None))
        return FabricInfo(
            state=_STATE.get(info.state, f"state {info.state}"),
            status=int(info.status),
            status_name=status_name(int(info.status)),
            cluster_uuid="-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])),
            clique_id=int(info.cliqueId),
            health=health,
            health_bits=bits,
        )


_factory: Callable[[], Nvml | None] | None = None
_door: Nvml | None = None
_why: str | None = None


def install_nvml(factory: Callable[[], Nvml | None] | None) -> None:
    """Put another NVML in the place of the real one, for tests (see `egmctl.seams`); a factory that returns None
    stands for a machine without NVML; None restores the real one."""
    global _factory, _door, _why
    _factory, _door, _why = factory, None, None


def installed() -> bool:
    """Whether a stand-in is in place: then GPUs are asked for even if this machine has none."""
    return _factory is not None


def get_nvml() -> Nvml | None:
    """The NVML of this process, or None when it cannot be had; `why_no_nvml` says why."""
    global _door, _why
    if _door is None and _why is None:
        if _factory is not None:
            _door = _factory()
            _why = None if _door is not None else "NVML is not here"
        else:
            _door, _why = _open()
    return _door


def why_no_nvml() -> str:
    """After `get_nvml` returned None: the reason, for a person."""
    return _why or ""


def _open() -> tuple[Nvml | None, str | None]:
    try:
        import pynvml
    except ImportError:
        return None, "the Python package nvidia-ml-py is not installed (pip install 'egmctl[cuda]')"
    try:
        return PynvmlDoor(pynvml), None
    except pynvml.NVMLError as error:
        return None, f"NVML does not start: {error} ({error.value})"
