"""``egmctl bench``: the same objects over each path in one run, single operations timed one by one."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from egmctl import __version__
from egmctl.bench.buffers import registered
from egmctl.bench.cleanup import remove_objects
from egmctl.bench.pattern import pattern
from egmctl.bench.statistics import latency_us, rate_gbps
from egmctl.bench.stock import StockClient
from egmctl.bench.target import Target, key_prefix
from egmctl.errors import EgmError, FailedError, UsageError
from egmctl.provider.progress import Progress, ProgressEvent, silent
from egmctl.units import KIB, MIB, format_size

if TYPE_CHECKING:
    from egmctl.consumer import EgmStore
    from egmctl.paths import Paths

__all__ = ["DEFAULT_BLOCKS", "OPERATIONS", "ROUTES", "run_bench"]

OPERATIONS = ("put", "get")
ROUTES = ("direct", "stock")
DEFAULT_BLOCKS = (4 * KIB, 64 * KIB, MIB, 8 * MIB)
_BYTES_A_RESULT = 128 * MIB
_WARM_UP = 2


class _Route(Protocol):
    """One way to an object: nanoseconds of each operation (an error counts as none), and how many failed; ``trouble``
    is what the first of those met."""

    trouble: EgmError | None

    def put(self, keys: Sequence[str], nbytes: int) -> tuple[list[int], int]: ...
    def get(self, keys: Sequence[str], nbytes: int) -> tuple[list[int], int]: ...

    def stop(self) -> None:
        """Called when the work is broken off: nothing is put from here on."""


class _Direct:
    def __init__(self, store: EgmStore, device: int | None) -> None:
        self._store = store
        self._device = device
        self.trouble: EgmError | None = None

    def put(self, keys: Sequence[str], nbytes: int) -> tuple[list[int], int]:
        def one(key: str, address: int) -> None:
            self._store.put_from(key, address, nbytes)

        return self._timed(keys, nbytes, one, fill=True)

    def stop(self) -> None:
        pass

    def get(self, keys: Sequence[str], nbytes: int) -> tuple[list[int], int]:
        def one(key: str, address: int) -> None:
            self._store.get_into(key, address, nbytes)

        return self._timed(keys, nbytes, one, fill=False)

    def _timed(
        self, keys: Sequence[str], nbytes: int, one: Callable[[str, int], None], *, fill: bool
    ) -> tuple[list[int], int]:
        taken: list[int] = []
        errors = 0
        with registered(self._store, nbytes, self._device) as buffer:
            for key in keys:
                if fill:
                    buffer.fill(pattern(key, nbytes))
                began = time.perf_counter_ns()
                try:
                    one(key, buffer.address)
                except EgmError as error:
                    self.trouble = self.trouble or error
                    errors += 1
                    continue
                taken.append(time.perf_counter_ns() - began)
        return taken, errors


class _Stock:
    def __init__(self, client: StockClient) -> None:
        self._client = client
        self.trouble: EgmError | None = None

    def put(self, keys: Sequence[str], nbytes: int) -> tuple[list[int], int]:
        taken, codes = self._client.put(keys, nbytes)
        self._note("put", next((code for code in codes if code != 0), None))
        return [ns for ns, code in zip(taken, codes, strict=True) if code == 0], sum(code != 0 for code in codes)

    def stop(self) -> None:
        self._client.close()

    def get(self, keys: Sequence[str], nbytes: int) -> tuple[list[int], int]:
        taken, codes, _ = self._client.get(keys, nbytes)
        self._note("get", next((code for code in codes if code != nbytes), None))
        return [ns for ns, n in zip(taken, codes, strict=True) if n == nbytes], sum(n != nbytes for n in codes)

    def _note(self, operation: str, code: int | None) -> None:
        if code is not None and self.trouble is None:
            self.trouble = FailedError(
                f"the stock client's {operation} answered {code}", hint="see what Mooncake's clients log of it"
            )


def run_bench(
    pool: str,
    paths: Paths,
    *,
    operations: Sequence[str] = OPERATIONS,
    blocks: Sequence[int] = (),
    routes: Sequence[str] = (),
    device: int | None = None,
    count: int | None = None,
    baseline: Path | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """The document ``egmctl/bench/1``; ``device`` takes the direct path's buffers from that GPU's HBM.

    ``count`` objects a result (else as many as 128 MiB hold, 8 to 256); the first two of each are warm-up, reported as
    ``first_use_us`` and left out. Objects are removed as soon as they are measured. Raises `UsageError` for unknown
    operations, routes or an unreadable baseline, `FailedError` for a pool that is not mounted, a block that no chunk
    can hold, or when no operation at all succeeded (with what the first one met).
    """
    earlier = _read_baseline(baseline) if baseline is not None else {}
    target = Target.find(pool, paths)
    for word, known in [*((w, OPERATIONS) for w in operations), *((w, ROUTES) for w in routes)]:
        if word not in known:
            raise UsageError(f"{word!r} is unknown", where="egmctl bench", hint=f"one of {', '.join(known)}")
    blocks = list(blocks) or [size for size in DEFAULT_BLOCKS if size <= target.plan.largest_object_bytes // 4]
    for size in blocks:
        if size > target.plan.largest_object_bytes:
            raise FailedError(
                f"no object of {format_size(size)} fits: the largest chunk holds {target.plan.largest_object_bytes}",
                where=f"pool {pool}",
                hint="give smaller sizes with --block",
            )
    skipped: list[dict[str, str]] = []
    with ExitStack() as stack:
        store = stack.enter_context(target.connect(() if device is None else (device,)))
        ways: dict[str, _Route] = {"direct": _Direct(store, device)}
        obstacle = target.stock_obstacle()
        if not obstacle and "stock" in (routes or ROUTES):
            stock = StockClient(target.master, target.metadata_server, host=target.local_name)
            ways["stock"] = _Stock(stack.enter_context(stock))
        for route in routes or ROUTES:
            if route not in ways:
                skipped.append({"path": route, "reason": obstacle})
        chosen = {route: ways[route] for route in routes or ROUTES if route in ways}
        results = list(_measure(target, store, chosen, operations, blocks, count, progress))
    trouble = next((way.trouble for way in chosen.values() if way.trouble is not None), None)
    if trouble is not None and not any(result["blocks"] for result in results):
        raise FailedError(
            f"no operation succeeded: {trouble.message}",
            where=", ".join(filter(None, (f"pool {pool}", trouble.where))),
            hint=trouble.hint or f"see `egmctl verify {pool}`",
        )
    for result in results:
        before = earlier.get((result["operation"], result["path"], result["block_bytes"]))
        if before:
            result["against_baseline"] = round(result["gbps"]["p50"] / before, 3)
    return {
        "schema": "egmctl/bench/1",
        "environment": _environment(target, device),
        "results": results,
        "ratios": _ratios(results),
        "skipped": skipped,
    }


def _measure(
    target: Target,
    store: EgmStore,
    ways: Mapping[str, _Route],
    operations: Sequence[str],
    blocks: Sequence[int],
    count: int | None,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    prefix = key_prefix("bench")
    room = target.plan.effective_bytes // 4
    for size in blocks:
        number = count or max(8, min(256, min(_BYTES_A_RESULT, room) // size))
        number = max(1, min(number, max(1, room // size)))
        for route, way in ways.items():
            progress(ProgressEvent("bench", f"{format_size(size)} x {number}, {route}"))
            keys = [f"{prefix}/{route}/{size}/{i}" for i in range(number + _WARM_UP)]
            try:
                yield from _one(way, route, operations, keys, size)
            except BaseException:
                way.stop()
                raise
            finally:
                remove_objects(store, keys)


def _one(
    way: _Route, route: str, operations: Sequence[str], keys: Sequence[str], size: int
) -> Iterator[dict[str, Any]]:
    first_put, _ = way.put(keys[:1], size)
    way.put(keys[1:_WARM_UP], size)
    put, put_errors = way.put(keys[_WARM_UP:], size)
    if "put" in operations:
        yield _result("put", route, size, put, put_errors, first_put)
    if "get" in operations:
        first_get, _ = way.get(keys[:1], size)
        way.get(keys[1:_WARM_UP], size)
        got, get_errors = way.get(keys[_WARM_UP:], size)
        yield _result("get", route, size, got, get_errors, first_get)


def _result(
    operation: str, route: str, size: int, taken: Sequence[int], errors: int, first: Sequence[int]
) -> dict[str, Any]:
    measured = taken or [0]
    return {
        "operation": operation,
        "path": route,
        "block_bytes": size,
        "blocks": len(taken),
        "gbps": rate_gbps(taken, size) if taken else {"p50": 0.0, "p10": 0.0, "mean": 0.0},
        "latency_us": latency_us(measured),
        "first_use_us": round(first[0] / 1e3, 1) if first else None,
        "bytes": len(taken) * size,
        "errors": errors,
    }


def _ratios(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Direct against stock, by the median latency of the same operation on objects of the same size."""
    by_route = {(r["operation"], r["block_bytes"], r["path"]): r for r in results if r["blocks"]}
    ratios = []
    for (operation, size, route), result in by_route.items():
        other = by_route.get((operation, size, "stock"))
        if route == "direct" and other is not None:
            ratio = other["latency_us"]["p50"] / result["latency_us"]["p50"]
            ratios.append({"operation": operation, "block_bytes": size, "direct_over_stock": round(ratio, 2)})
    return ratios


def _environment(target: Target, device: int | None) -> dict[str, Any]:
    from egmctl.mooncake.wheel import wheel_info

    info = wheel_info()
    environment: dict[str, Any] = {
        "egmctl": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "mooncake": f"{info.distribution} {info.version}" if info.distribution else None,
        "pool": target.plan.pool,
        "memory_kind": target.plan.memory_kind,
        "bytes": target.plan.effective_bytes,
        "chunks": len(target.plan.chunks),
        "master": target.master,
        "buffers": "host",
        "warm_up": f"{_WARM_UP} operations of each result, left out",
    }
    if device is not None:
        from egmctl.memory.driver import get_driver

        driver = get_driver()
        environment |= {"buffers": f"HBM of GPU {device} ({driver.device_name(device)})", "cuda": driver.version()}
    return environment


def _read_baseline(path: Path) -> dict[tuple[str, str, int], float]:
    """(operation, path, block) to the median GB/s of a run saved with ``--json``."""
    try:
        document = json.loads(path.read_bytes()[: 16 * MIB])
        if document["schema"] != "egmctl/bench/1":
            raise KeyError("schema")
        return {(r["operation"], r["path"], r["block_bytes"]): float(r["gbps"]["p50"]) for r in document["results"]}
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path), hint="give a saved run") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "is not a saved run of bench", where=str(path), hint="save one with: egmctl bench POOL --json > FILE"
        ) from error
