"""What the calls of a store have in common: its parts, whether it is open, and the transfers under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

from egmctl.consumer.buffers import Buffers
from egmctl.consumer.context import keeps_device
from egmctl.consumer.engine import Engine
from egmctl.consumer.errors import StoreClosed
from egmctl.consumer.host_copy import HostCopier
from egmctl.consumer.keylocks import Held, KeyLocks
from egmctl.consumer.rounds import Round
from egmctl.consumer.transfer import BatchTransfer
from egmctl.errors import EgmError

__all__ = ["StoreBase"]


class StoreBase:
    """Puts, gets and what else a store does are its subclasses'."""

    def __init__(self, engine: Engine, buffers: Buffers, host_copier: HostCopier) -> None:
        self._engine = engine
        self._driver = engine.driver
        self._buffers = buffers
        self._host_copier = host_copier
        self._locks = KeyLocks()
        self._lock = threading.Lock()
        self._outstanding: set[BatchTransfer] = set()
        self._closed = False

    @keeps_device
    def close(self) -> None:
        """Abandon transfers under way (their copies are waited for), unmap everything. Twice is success.

        All of it is done also when a part fails; what failed is then raised.
        """
        with self._lock:
            self._closed = True
            outstanding = list(self._outstanding)
        engine = self._engine
        with ExitStack() as stack:  # from the last line to the first
            stack.callback(engine.master.close)
            stack.callback(engine.mappings.close)
            stack.callback(engine.bindings.close)
            # Copies are over before anything is unmapped: a GPU that still reads an unmapped range loses its context.
            for part in (engine.device_copier, engine.gatherer):
                closer = getattr(part, "close", None)
                if closer is not None:
                    stack.callback(closer)
            stack.callback(self._host_copier.close)
            for transfer in outstanding:
                stack.callback(transfer.abandon)

    def _open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed")

    def _begin(
        self, round_: Round[Any, Any], finish: Callable[[], list[int | EgmError]], keys: Collection[str] = ()
    ) -> BatchTransfer:
        """Begin a round, known to `close` from before; puts hold their ``keys`` until it is over, also by failing."""
        held = Held()

        def over() -> None:
            with self._lock:
                self._outstanding.discard(transfer)
            self._locks.release(held)

        transfer = BatchTransfer(round_, finish, over)
        try:
            if keys:
                self._locks.acquire(keys, self._engine.timing.put_deadline, held)
            with self._lock:
                self._open()
                self._outstanding.add(transfer)
            transfer.begin()
            self._open()
        except BaseException:
            transfer.abandon(torn=True)
            raise
        return transfer
