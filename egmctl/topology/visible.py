"""Which GPUs ``CUDA_VISIBLE_DEVICES`` leaves, by the rules the CUDA driver follows.

Needed where NVML or sysfs lists GPUs but the CUDA driver (which applies the rules itself) is not asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from egmctl.errors import UsageError

__all__ = ["refuse_mig", "visible_devices"]

_LEADING_NUMBER = re.compile(r"\s*([+-]?[0-9]+)", re.ASCII)


def _value(environ: Mapping[str, str]) -> str | None:
    return environ.get("CUDA_VISIBLE_DEVICES")


def refuse_mig(environ: Mapping[str, str]) -> None:
    """Raises `UsageError` when ``CUDA_VISIBLE_DEVICES`` names a MIG instance."""
    for entry in (_value(environ) or "").split(","):
        if entry.strip().startswith("MIG-"):
            raise UsageError(
                f"CUDA_VISIBLE_DEVICES names a MIG instance ({entry.strip()[:48]}): egmctl works on whole GPUs only",
                where="CUDA_VISIBLE_DEVICES",
                hint="name the GPU by its ordinal or its GPU- UUID, or unset the variable",
            )


def visible_devices(environ: Mapping[str, str], uuids: Sequence[str]) -> list[int]:
    """Indices into ``uuids`` (all GPUs, in the driver's order) that stay visible, in their new order.

    Unset shows all; empty hides all. Ordinals are read as ``strtol`` does and UUIDs may be shortened to a prefix that
    fits one GPU. The first entry that names no GPU ends the list, whatever follows; an entry of the other form does
    too; a GPU named twice hides all. Raises `UsageError` for MIG.
    """
    value = _value(environ)
    if value is None:
        return list(range(len(uuids)))
    refuse_mig(environ)
    entries = [entry.strip() for entry in value.split(",")]
    by_uuid = entries[0].startswith("GPU-")
    chosen: list[int] = []
    for entry in entries:
        found = _by_prefix(entry, uuids) if by_uuid else _by_ordinal(entry, len(uuids))
        if found is None:
            break
        if found in chosen:
            return []
        chosen.append(found)
    return chosen


def _by_ordinal(entry: str, count: int) -> int | None:
    match = _LEADING_NUMBER.match(entry[:32])
    number = int(match[1]) if match else -1
    return number if 0 <= number < count else None


def _by_prefix(entry: str, uuids: Sequence[str]) -> int | None:
    if not entry.startswith("GPU-"):
        return None
    matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
