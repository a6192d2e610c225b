"""What each step fails with when it fails: the error that the act itself, or the code around it, would raise there."""

from __future__ import annotations

import errno
import socket
import sqlite3
from collections.abc import Callable

from egmctl.errors import PreflightError
from egmctl.memory.driver import CudaError
from egmctl.mooncake.admin import AdminUnreachable
from egmctl.mooncake.errors import MasterTimeout, MasterUnreachable
from egmctl.mooncake.metadata import MetadataUnreachable
from egmctl.mooncake.te_process import TransferEngineError, TransferEngineStuckError

__all__ = ["failure"]

TEXT = "injected"


def _os(number: int) -> Callable[[], Exception]:
    return lambda: OSError(number, f"{TEXT}: {errno.errorcode[number]}")


def _cuda(name: str, number: int) -> Callable[[], Exception]:
    return lambda: CudaError(TEXT, name, number)


# The longest prefix decides.
_TABLE: dict[str, Callable[[], Exception]] = {
    "ledger.": _os(errno.ENOSPC),
    "ledger.commit": lambda: sqlite3.OperationalError(f"{TEXT}: database or disk is full"),
    "ledger.open": lambda: sqlite3.OperationalError(f"{TEXT}: unable to open database file"),
    "memory.shm.": _os(errno.ENOMEM),
    "memory.shm.close": _os(errno.EIO),
    "memory.cuda.": _cuda("CUDA_ERROR_UNKNOWN", 999),
    "memory.cuda.create": _cuda("CUDA_ERROR_OUT_OF_MEMORY", 2),
    "memory.cuda.close": _os(errno.EIO),
    "memory.probe.": _os(errno.EAGAIN),
    "mooncake.master.": lambda: MasterTimeout(f"{TEXT}: no answer in time; the request may still take effect"),
    "mooncake.rpc.": lambda: MasterUnreachable(f"{TEXT}: cannot connect to the Master"),
    "mooncake.admin.": lambda: AdminUnreachable(f"{TEXT}: no answer"),
    "metadata.": lambda: MetadataUnreachable(f"{TEXT}: no answer"),
    "handshake.resolve": lambda: socket.gaierror(socket.EAI_AGAIN, f"{TEXT}: try again"),
    "handshake.": _os(errno.EADDRINUSE),
    "handshake.close": _os(errno.EIO),
    "te.": lambda: TransferEngineError(f"{TEXT}: the child did not answer in time"),
    "te.spawn": _os(errno.EAGAIN),
    "te.stop": lambda: TransferEngineStuckError(f"{TEXT}: the child does not end"),
    "te.kill": _os(errno.EPERM),
    "wheel.": _os(errno.EAGAIN),
    "provider.": _os(errno.EIO),
    "provider.folders": lambda: PreflightError(f"cannot make the folder: {TEXT}"),
    "provider.launch.spawn": _os(errno.EAGAIN),
    "provider.control.": _os(errno.EADDRINUSE),
    "provider.control.connect": lambda: ConnectionRefusedError(errno.ECONNREFUSED, TEXT),
    "provider.control.ask": lambda: BrokenPipeError(errno.EPIPE, TEXT),
    "provider.health.listen": lambda: PreflightError(f"port is taken: {TEXT}"),
    "provider.engine.kill_orphan": _os(errno.EPERM),
    "provider.workspace.": _os(errno.ENOMEM),
    "provider.publish": lambda: MemoryError(TEXT),
    "provider.unpublish": lambda: MemoryError(TEXT),
    "provider.probe.": lambda: MasterTimeout(f"{TEXT}: no answer in time; the request may still take effect"),
    "provider.probe.write": lambda: MemoryError(TEXT),
    "provider.probe.read": lambda: MemoryError(TEXT),
    "provider.listing.": lambda: MasterTimeout(f"{TEXT}: no answer in time"),
    "provider.master.knock": lambda: TimeoutError(TEXT),
}


def failure(site: str) -> Exception:
    """An instance of what ``site`` fails with."""
    prefix = max((one for one in _TABLE if site.startswith(one)), key=len, default="")
    return _TABLE[prefix]() if prefix else OSError(errno.EIO, TEXT)
