"""Which host this is, as the descriptor says it: a consumer tries a control socket only on the host it belongs to."""

from __future__ import annotations

import hashlib
import socket
from functools import lru_cache
from pathlib import Path

__all__ = ["host_id"]


@lru_cache(maxsize=1)
def host_id() -> str:
    """Hex digest of the kernel's boot id and the host name: the same for every process of one host (of one container
    with a name of its own), another after a reboot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return hashlib.sha256(f"{boot}\0{socket.gethostname()}".encode()).hexdigest()[:32]
