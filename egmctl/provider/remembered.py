"""What stock nvlink consumers may remember of an endpoint with a fixed port: the ranges ever published there.

They keep mappings for good, by endpoint and address. An agent on a port that the kernel chose is a new name to them;
one that comes back on the same port has to stay away from every address that was published there before, or they would
read and write the memory of the agent that is gone. The record outlives pools, and reboots of this host.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from egmctl.errors import PreflightError
from egmctl.paths import Paths
from egmctl.steps import step

__all__ = ["recall", "remember"]


def _path(paths: Paths, endpoint: str) -> Path:
    return paths.state / f"{hashlib.sha256(endpoint.encode()).hexdigest()[:12]}.endpoint.json"


def recall(paths: Paths, endpoint: str) -> list[tuple[int, int]]:
    """(start, end) of all that was published under ``endpoint``, in order. Raises `PreflightError` for a record that
    cannot be read."""
    path = _path(paths, endpoint)
    try:
        document = json.loads(path.read_bytes())
        return [(int(start), int(end)) for start, end in document["ranges"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PreflightError(
            f"the record of what was published under {endpoint} cannot be read: {error}",
            where=str(path),
            hint="give local_hostname another port; or remove the file, once every stock consumer that knew an earlier "
            "pool at this endpoint has been started anew",
        ) from error


def remember(paths: Paths, endpoint: str, ranges: Iterable[tuple[int, int]]) -> None:
    """Add ranges to the record, durably, before they are published. Only the agent that has bound the port writes it.

    Raises `PreflightError` when the record cannot be written.
    """
    merged: list[tuple[int, int]] = []
    for start, end in sorted([*recall(paths, endpoint), *ranges]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    path = _path(paths, endpoint)
    data = json.dumps({"schema": "egmctl/endpoint/1", "endpoint": endpoint, "ranges": merged}).encode()
    fresh = path.with_suffix(".new")
    try:
        with step("provider.remember", endpoint=endpoint):
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, data)
                os.fsync(fd)
            finally:
                os.close(fd)
            fresh.replace(path)
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        raise PreflightError(
            f"cannot write down what is published under {endpoint}: {error.strerror or error}",
            where=str(path),
            hint="make the state folder writable for this user, or give local_hostname without a port",
        ) from error
