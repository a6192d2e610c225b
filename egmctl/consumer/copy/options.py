"""How copies are made, and the fragment size from which the copy engine takes over."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from egmctl.consumer.errors import InvalidRequest
from egmctl.memory.driver import Driver
from egmctl.units import KIB

__all__ = ["CopyOptions", "Direction", "OrderMode", "Strategy", "Thresholds"]

Strategy = Literal["auto", "engine", "kernel"]
OrderMode = Literal["auto", "never", "always"]
Direction = Literal["get", "put"]

DEFAULT_KERNEL_BELOW = 256 * KIB
"""On H200 the kernel does 50 GB/s at 64 KiB where a batch on four streams does 35, and both do 50 at 256 KiB; above
that the engine is ahead, and it leaves the SMs alone."""


@dataclass(frozen=True)
class CopyOptions:
    """``kernel_below``: fragments smaller than this many bytes go by the kernel (None: as measured by ``calibrate`` on
    this machine, else 256 KiB). ``streams``: copy-engine streams that one batch is spread over. ``blocks``: thread
    blocks of a copy kernel, at most one an SM, and so the SMs it takes; ``threads`` in each. ``cache``: the file of
    measured thresholds (None: ``egmctl/copy.json`` in the user's cache folder).
    """

    strategy: Strategy = "auto"
    order: OrderMode = "auto"
    kernel_below: int | None = None
    streams: int = 4
    blocks: int = 32
    threads: int = 512
    cache: Path | None = None

    def __post_init__(self) -> None:
        if self.strategy not in ("auto", "engine", "kernel"):
            raise InvalidRequest(f"strategy {self.strategy!r} is unknown", hint="auto, engine or kernel")
        if self.order not in ("auto", "never", "always"):
            raise InvalidRequest(f"order {self.order!r} is unknown", hint="auto, never or always")
        if not 1 <= self.streams <= 16 or not 1 <= self.blocks <= 1024:
            raise InvalidRequest(
                f"streams={self.streams} blocks={self.blocks}", hint="1 to 16 streams, 1 to 1024 blocks"
            )
        if self.threads not in (64, 128, 256, 512):
            raise InvalidRequest(f"threads={self.threads}", hint="64, 128, 256 or 512 threads a block")
        if self.kernel_below is not None and self.kernel_below < 0:
            raise InvalidRequest(f"kernel_below={self.kernel_below} is negative", hint="0 means: never the kernel")

    @property
    def cache_path(self) -> Path:
        if self.cache is not None:
            return self.cache
        root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return Path(root) / "egmctl" / "copy.json"


class Thresholds:
    """Where the kernel gives way to the engine, for one device: as told, as measured earlier, or the default.

    What was measured is kept by GPU name, driver version and direction; a file that cannot be read counts as none.
    """

    def __init__(self, driver: Driver, device: int, options: CopyOptions) -> None:
        self._options = options
        self._key = f"{driver.device_name(device)}|{driver.version()}"
        self.measured: dict[str, int] = {} if options.kernel_below is not None else self._load()

    @property
    def known(self) -> bool:
        """Whether there is nothing to measure."""
        return self._options.kernel_below is not None or {"get", "put"} <= self.measured.keys()

    def look_again(self) -> bool:
        """Whether another device of this kind, or another process, has measured meanwhile; that is used from now on."""
        self.measured = self._load()
        return self.known

    def kernel_below(self, direction: Direction) -> int:
        """Bytes."""
        if self._options.kernel_below is not None:
            return self._options.kernel_below
        return self.measured.get(direction, DEFAULT_KERNEL_BELOW)

    def save(self, measured: dict[str, int]) -> bool:
        """Use ``measured`` from now on; False when the file could not be written."""
        self.measured = dict(measured)
        path = self._options.cache_path
        document = self._read(path)
        for direction, nbytes in measured.items():
            document[f"{self._key}|{direction}"] = nbytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump({"schema": "egmctl/copy/1", "kernel_below": document}, file, indent=1, sort_keys=True)
                os.replace(name, path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                return False
        except OSError:
            return False
        return True

    def _load(self) -> dict[str, int]:
        document = self._read(self._options.cache_path)
        found = {direction: document.get(f"{self._key}|{direction}") for direction in ("get", "put")}
        return {direction: nbytes for direction, nbytes in found.items() if nbytes is not None}

    @staticmethod
    def _read(path: Path) -> dict[str, int]:
        try:
            document = json.loads(path.read_text())["kernel_below"]
            return {str(k): v for k, v in document.items() if isinstance(v, int) and 0 <= v < 1 << 40}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
