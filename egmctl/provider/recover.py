"""Cleaning up after an agent that is gone, from its ledger alone: the same stages, undone without living parts."""

from __future__ import annotations

import os
from typing import Any

from egmctl.errors import CleanupPendingError, UsageError
from egmctl.ledger import Ledger, OwnerLock, read_only
from egmctl.paths import Paths
from egmctl.planning import Plan
from egmctl.provider.pool import ENDED, Pool
from egmctl.provider.progress import Progress, silent
from egmctl.provider.task import Task

__all__ = ["teardown_from_ledger"]


def teardown_from_ledger(
    name: str, paths: Paths, *, abandon: bool = False, progress: Progress = silent, patience: float = 0.0
) -> dict[str, Any]:
    """Remove what the ledger lists: segments, metadata keys, an orphaned child, the socket file. The memory is gone
    with the agent, except what importers hold, which is reported.

    Raises `BusyError` while the pool has an owner, `CleanupPendingError` when something could not be removed yet, or
    when Ctrl-C stopped it: the ledger is right at every instant, so that it can be stopped at any.
    """
    lock = OwnerLock.acquire(paths.lock(name), name, "cleaning up after its agent", patience=patience)
    try:
        record = read_only(paths.ledger(name))
        if record is None:
            raise UsageError("there is no such pool", where=f"pool {name}", hint="see `egmctl status`")
        if record.state in ENDED:
            return {"name": name, "state": record.state, "left": [], "warnings": [], "already": True}
        who = f"teardown {os.getpid()}"
        pool = Pool(Ledger.open(paths.ledger(name), who=who), Plan.from_json(record.plan), paths, None)
        try:
            left = pool.teardown(Task("teardown", who, progress), 0.0, abandon=abandon)
            return {"name": name, "state": pool.state, "left": left, "warnings": list(pool.warnings)}
        finally:
            pool.close()
    except KeyboardInterrupt:
        raise CleanupPendingError(
            "the teardown was stopped; what is undone stays undone",
            where=f"pool {name}",
            hint=f"run `egmctl teardown {name}` again, which goes on from there",
        ) from None
    finally:
        lock.release()
