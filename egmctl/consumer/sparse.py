"""Gathers and scatters of whole objects, as one get and one put."""

from __future__ import annotations

from collections.abc import Sequence

from egmctl.consumer.buffers import Buffers
from egmctl.consumer.engine import Backoff, Engine
from egmctl.consumer.errors import GetFailed, LeaseExpired, ProviderGone
from egmctl.consumer.gather import Entries, scatter, zero
from egmctl.consumer.host_copy import Completion, Group
from egmctl.consumer.master_link import is_transient
from egmctl.consumer.pins import Target
from egmctl.consumer.requests import WriteRequest
from egmctl.consumer.session import Session
from egmctl.errors import EgmError

__all__ = ["gather_objects", "scatter_request"]


def gather_objects(
    engine: Engine, buffers: Buffers, keys: Sequence[str], entries: Entries, destination: int, stream: int | None
) -> int:
    """Locate, gather, and ask again whether the objects are still the ones located; all of it anew when not."""
    backoff = Backoff(engine.timing.retry)
    while True:
        try:
            with Session(engine, buffers, keys) as session:
                nbytes = session.gather_entries(keys, entries, destination, stream)
                if session.unchanged():
                    return nbytes
            error: EgmError = GetFailed(
                "changed while it was read", where=f"one of the objects {list(keys[:4])}", hint="read it again"
            )
        except (ProviderGone, LeaseExpired) as failed:
            error = failed
        except EgmError as failed:
            if not is_transient(failed):
                raise
            error = failed
        if not backoff.sleep():
            raise error


def scatter_request(
    engine: Engine, buffers: Buffers, key: str, nbytes: int, entries: Entries, source: int, covers: bool
) -> WriteRequest:
    """A put whose copy is a scatter. What the CPU can check of the offsets is checked before anything is reserved."""
    buffer = buffers.find(source, entries.nbytes)
    if buffer.device is None:
        entries.checked([nbytes])

    def custom(targets: Sequence[Target], stream: int | None) -> Completion:
        started = []
        for target in targets:
            if not covers:
                zero(engine, target, nbytes, buffer.device)
            started.append(scatter(engine, buffers, (target, nbytes), entries, source, stream))
        return started[0] if len(started) == 1 else Group(started)

    return WriteRequest(key, nbytes, custom=custom)
