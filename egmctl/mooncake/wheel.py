"""Which Mooncake wheel is installed, if any, and what it can do: found out in a child process.

Importing the wheel's engine loads foreign libraries and starts threads, and can fail or crash for reasons of the
machine; so it happens elsewhere, with a time limit, once.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from egmctl.errors import PreflightError
from egmctl.programs import ask_program
from egmctl.steps import step

__all__ = ["WheelInfo", "find_master_binary", "require_nvlink", "require_transfer_engine", "wheel_info"]

INSTALL = "pip install 'egmctl[mooncake]'"
_FLAVOURS = {
    "mooncake-transfer-engine-non-cuda": "non-cuda",
    "mooncake-transfer-engine": "cuda12",
    "mooncake-transfer-engine-cuda13": "cuda13",
}
_PACKAGES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
    "librdmacm.so.1": "librdmacm1",
}
_PROBE = """
import json
answer = {}
try:
    import mooncake.engine as engine
    answer["nvlink"] = getattr(engine, "SUPPORT_MNNVL", None)
    answer["cuda"] = getattr(engine, "SUPPORT_CUDA", None)
except BaseException as error:
    answer["error"] = f"{type(error).__name__}: {error}"
print("egmctl-probe", json.dumps(answer), flush=True)
"""
_LIBRARY = re.compile(r"(lib[\w.+-]+\.so[.\d]*): cannot open shared object file")


@dataclass(frozen=True)
class WheelInfo:
    """``importable``: the Transfer Engine can be used here; otherwise ``error`` says why not.

    ``distribution`` and ``version`` are None without a wheel; ``flavour`` is non-cuda, cuda12 or cuda13. ``has_nvlink``
    is None when unknown. ``missing_libraries`` are sonames.
    """

    importable: bool
    distribution: str | None = None
    version: str | None = None
    flavour: str | None = None
    has_nvlink: bool | None = None
    has_cuda: bool | None = None
    error: str = ""
    missing_libraries: tuple[str, ...] = ()

    @property
    def hint(self) -> str:
        """What mends ``error``."""
        if self.distribution is None:
            return INSTALL
        packages = [_PACKAGES[name] for name in self.missing_libraries if name in _PACKAGES]
        if packages:
            # The import stops at the first one missing; the wheel always needs these three.
            return "apt-get install libibverbs1 libnuma1 libcurl4" + (" librdmacm1" if "librdmacm1" in packages else "")
        if any(name.startswith(("libcuda.", "libcudart.")) for name in self.missing_libraries):
            return f"this wheel needs NVIDIA's driver; without it: pip uninstall {self.distribution} && {INSTALL}"
        if self.missing_libraries:
            return f"install the library {self.missing_libraries[0]}"
        return f"try it by hand: {sys.executable} -c 'import mooncake.engine'"


_known: WheelInfo | None = None


def wheel_info(*, timeout: float = 20.0, refresh: bool = False) -> WheelInfo:
    """What the installed wheel is and can do. The first call starts a child process; later ones cost nothing, unless
    the wheel could not be used: then it is looked at again."""
    global _known
    if _known is None or refresh or not _known.importable:
        _known = _probe(timeout)
    return _known


def _probe(timeout: float) -> WheelInfo:
    distribution, version = _installed()
    if distribution is None and importlib.util.find_spec("mooncake") is None:
        return WheelInfo(importable=False, error="no Mooncake wheel is installed")
    flavour = _FLAVOURS.get(distribution) if distribution else None
    found = WheelInfo(False, distribution or "mooncake", version, flavour)
    try:
        with step("wheel.probe"):
            done = ask_program([sys.executable, "-c", _PROBE], timeout)
    except subprocess.TimeoutExpired:
        return replace(found, error=f"importing the wheel took more than {timeout:g} s")
    except OSError as error:
        return replace(found, error=f"cannot start {sys.executable}: {error.strerror}")
    lines = [line for line in done.stdout.decode("utf-8", "replace").splitlines() if line.startswith("egmctl-probe ")]
    if not lines:
        return replace(found, error=f"importing the wheel ended with {_ending(done.returncode)}")
    answer = json.loads(lines[-1].partition(" ")[2])
    if "error" in answer:
        reason = str(answer["error"])
        return replace(found, error=reason, missing_libraries=tuple(_LIBRARY.findall(reason)))
    return replace(found, importable=True, has_nvlink=answer["nvlink"], has_cuda=answer["cuda"])


def _installed() -> tuple[str | None, str | None]:
    for name in _FLAVOURS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None, None


def _ending(code: int) -> str:
    if code < 0:
        import signal

        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
    return f"exit {code}"


def find_master_binary() -> Path:
    """``mooncake_master``: ``EGMCTL_MOONCAKE_MASTER`` when set, else the wheel's, else one on the path.

    Raises `PreflightError` naming the extra to install.
    """
    chosen = os.environ.get("EGMCTL_MOONCAKE_MASTER")
    if chosen:
        if os.access(chosen, os.X_OK) and os.path.isfile(chosen):
            return Path(chosen)
        raise PreflightError(
            "is not a program that can be run",
            where=f"EGMCTL_MOONCAKE_MASTER={chosen}",
            hint="give the path of mooncake_master, made executable (chmod +x)",
        )
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder, "mooncake_master")
        if path.is_file() and os.access(path, os.X_OK):
            return path
    found = shutil.which("mooncake_master")
    if found:
        return Path(found)
    raise PreflightError("mooncake_master is not installed", where="Mooncake", hint=INSTALL)


def require_transfer_engine(*, timeout: float = 20.0) -> WheelInfo:
    """The wheel, when its Transfer Engine can be used here; else `PreflightError` with what to install."""
    info = wheel_info(timeout=timeout)
    if not info.importable:
        raise PreflightError(
            f"stock clients are served over tcp by the Transfer Engine of a Mooncake wheel: {info.error}",
            where=f"{info.distribution} {info.version}" if info.distribution else "Mooncake",
            hint=info.hint,
            facts={
                "distribution": info.distribution,
                "version": info.version,
                "missing_libraries": list(info.missing_libraries),
            },
        )
    return info


def require_nvlink(*, timeout: float = 20.0) -> WheelInfo:
    """The wheel, when it has the nvlink transport that a stock consumer of ``cuda-fabric`` needs.

    The wheel's ``SUPPORT_MNNVL`` alone tells: an engine without it initialises "nvlink" and uses tcp.
    """
    info = require_transfer_engine(timeout=timeout)
    if not info.has_nvlink:
        raise PreflightError(
            "this Mooncake build has no nvlink transport (SUPPORT_MNNVL is not True)",
            where=f"{info.distribution} {info.version}",
            hint="the arm64 CUDA wheels have it: pip install 'egmctl[mooncake-cuda13]' on the GB200 host, "
            "or build Mooncake with USE_MNNVL",
            facts={"distribution": info.distribution, "version": info.version, "has_nvlink": info.has_nvlink},
        )
    return info
