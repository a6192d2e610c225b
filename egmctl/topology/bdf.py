"""PCI addresses: parsed to integers, rendered one way."""

from __future__ import annotations

import re
from typing import NamedTuple

from egmctl.errors import UsageError

__all__ = ["Bdf"]

# sysfs writes four digits (more behind a VMD bridge), NVML eight, and either may be upper case.
_BDF = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE | re.ASCII)


class Bdf(NamedTuple):
    """Domain, bus, device, function; ``str()`` renders ``0008:01:00.0``. Sorts as PCI order does."""

    domain: int
    bus: int
    device: int
    function: int

    @classmethod
    def parse(cls, text: str) -> Bdf:
        """From ``0008:01:00.0`` or ``00000008:01:00.0``, either case. Raises `UsageError` for anything else."""
        match = _BDF.fullmatch(text.strip()) if len(text) <= 64 else None
        if match is None or int(match[3], 16) > 0x1F:
            raise UsageError(
                f"{text[:64]!r} is not a PCI address",
                hint="write domain:bus:device.function, such as 0008:01:00.0 (`egmctl topology` lists them)",
            )
        return cls(*(int(part, 16) for part in match.groups()))

    def __str__(self) -> str:
        return f"{self.domain:04x}:{self.bus:02x}:{self.device:02x}.{self.function}"
