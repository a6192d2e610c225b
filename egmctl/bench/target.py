"""The pool that is measured or verified, and how its objects are reached."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from egmctl.errors import EgmError, FailedError, UsageError
from egmctl.ledger import PoolRecord, read_only
from egmctl.planning import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from egmctl.consumer import EgmStore
    from egmctl.paths import Paths

__all__ = ["Target", "key_prefix"]


def key_prefix(purpose: str) -> str:
    """Of objects that nobody else's keys collide with."""
    return f"egmctl-{purpose}/{os.urandom(6).hex()}"


@dataclass(frozen=True)
class Target:
    """A pool's record and plan."""

    record: PoolRecord
    plan: Plan

    @classmethod
    def find(cls, pool: str, paths: Paths, *, mounted: bool = True) -> Target:
        """Raises `UsageError` for an unknown pool, and when ``mounted`` is wanted for one that is gone (`UsageError`)
        or that is there and is not (`FailedError`)."""
        record = read_only(paths.ledger(pool))
        if record is None:
            raise UsageError("there is no such pool", where=f"pool {pool}", hint="see `egmctl status`")
        if mounted and not record.live_chunks:
            raise UsageError(f"is {record.state}", where=f"pool {pool}", hint="provision and mount it first")
        if mounted and not any(row.state == "mounted" for row in record.live_segments):
            raise FailedError(
                f"is {record.state}: no chunk of it is mounted", where=f"pool {pool}", hint=f"run `egmctl mount {pool}`"
            )
        return cls(record, Plan.from_json(record.plan))

    @property
    def master(self) -> str:
        return self.record.master or self.plan.mooncake.master_server_addr

    @property
    def metadata_server(self) -> str:
        return self.plan.mooncake.metadata_server

    @property
    def local_name(self) -> str:
        """The host name a client on this host gives itself."""
        return self.plan.mooncake.local_hostname.rpartition(":")[0] or self.plan.mooncake.local_hostname

    def connect(self, devices: Sequence[int] = (), **options: Any) -> EgmStore:
        """A direct consumer of it, which knows of its GPUs which way of copying is faster when: measured now, unless it
        was before. Raises as `EgmStore.connect`."""
        from egmctl.consumer import EgmStore

        store = EgmStore.connect(
            self.master,
            devices=devices,
            metadata_server=self.metadata_server,
            tenant_id=self.plan.mooncake.tenant_id,
            **options,
        )
        try:
            with suppress(EgmError):  # without a compiler, say: the threshold is then the one that H200 has
                store.calibrate()
        except BaseException:
            store.close()
            raise
        return store

    def stock_obstacle(self) -> str:
        """Why a stock client on this host cannot reach the pool; "" when it can."""
        if self.plan.mooncake.protocol != "tcp":
            return "a stock client reaches this kind over nvlink, from a wheel that has it"
        if self.plan.mooncake.tenant_id != "default":
            return "the stock client knows the default tenant only"
        from egmctl.mooncake.wheel import wheel_info

        info = wheel_info()
        return "" if info.importable else info.error
