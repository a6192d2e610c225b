"""What the agent tells over HTTP where a spec's ``health_addr`` asks for it: is it alive, is it ready, its figures.

``/healthz`` is 200 while the agent's worker and heartbeat go on, whatever the Master does (a restart would not help
there, and would lose the memory). ``/readyz`` is 200 only when the pool is ready. ``/metrics`` is for Prometheus and
needs the extra ``egmctl[metrics]``. All is read; nothing can be changed from here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from egmctl.errors import PreflightError
from egmctl.mooncake.answering import AnsweringServer
from egmctl.mooncake.listening import format_endpoint, listen
from egmctl.planning.addresses import parse_listen_address
from egmctl.steps import step

if TYPE_CHECKING:
    from egmctl.provider.operator import Operator
    from egmctl.provider.pool import Pool

__all__ = ["HEARTBEAT_QUIET", "HealthServer", "trouble", "worker_limit"]

HEARTBEAT_QUIET = 30.0
"""Seconds without a turn after which the heartbeat counts as stuck: a ping is given up long before."""

WORKER_QUIET = 120.0
SLOWEST_ALLOCATION = 512 << 20
"""Bytes a second below which an allocation counts as stuck; it is one uninterruptible call for each chunk, and was
measured at eight times this."""

MAX_REQUEST = 8 << 10
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}


def worker_limit(pool: Pool) -> float:
    """Seconds that the worker may give no sign of life: what the largest chunk may take, and never little."""
    return max(WORKER_QUIET, pool.plan.largest_object_bytes / SLOWEST_ALLOCATION)


def trouble(pool: Pool, operator: Operator) -> str:
    """What is stuck in this agent, "" when all goes on. Waits for nothing."""
    if not operator.is_alive():
        return "the worker has ended"
    quiet = time.monotonic() - max(operator.last_turn, pool.task.last_sign)
    if quiet > worker_limit(pool):
        return f"the worker ({pool.task.name}) has given no sign for {quiet:.0f} s"
    heartbeat = None if pool.live is None else pool.live.heartbeat
    if heartbeat is not None and heartbeat.quiet_for() > HEARTBEAT_QUIET:
        return f"the heartbeat has given no sign for {heartbeat.quiet_for():.0f} s"
    return ""


@dataclass
class _Answer:
    status: int
    body: bytes
    kind: str = "application/json"
    headers: tuple[str, ...] = ()


def _json(status: int, document: dict[str, Any]) -> _Answer:
    return _Answer(status, json.dumps(document).encode() + b"\n")


def _error(status: int, message: str, *headers: str) -> _Answer:
    return _Answer(status, json.dumps({"error": message}).encode() + b"\n", headers=headers)


def _healthz(pool: Pool, operator: Operator) -> _Answer:
    stuck = trouble(pool, operator)
    return _json(503 if stuck else 200, {"pool": pool.name, "ok": not stuck, "reason": stuck})


def _readyz(pool: Pool, operator: Operator) -> _Answer:
    state, reason = pool.state, pool.reason
    ready = state == "ready"
    document = {"pool": pool.name, "ready": ready, "state": state, "reason": "" if ready else reason}
    return _json(200 if ready else 503, document)


class HealthServer(AnsweringServer):
    """Listens at ``address`` (as in a spec's ``health_addr``) from its construction on, and tells of a pool once it is
    given one (`tell_of`); before, it says 503. ``url`` is where.

    Raises `PreflightError` when the port is taken, naming the holder."""

    def __init__(self, address: str, *, client_timeout: float = 5.0, max_clients: int = 64) -> None:
        self._subject: tuple[Pool, Operator] | None = None
        self._metrics: Any = None
        host, port = parse_listen_address(address, name="health_addr")
        try:
            with step("provider.health.listen", address=address):
                listener = listen(host, port)
        except PreflightError as error:
            raise PreflightError(
                f"the health endpoint: {error.message}",
                where=f"health_addr {address}",
                hint="stop it, or give health_addr another port (0: a free one) or address of this machine",
                facts=error.facts,
            ) from error
        self.url = f"http://{format_endpoint(host, listener.getsockname()[1])}"
        super().__init__(
            listener,
            name="health",
            what="health endpoint",
            where=self.url,
            timeout=client_timeout,
            max_peers=max_clients,
            max_buffered=max_clients * 2 * MAX_REQUEST,
        )

    def tell_of(self, pool: Pool, operator: Operator) -> None:
        self._subject = (pool, operator)

    def close(self) -> None:
        """Stop listening and drop all clients. Twice is success."""
        with step("provider.health.close"):
            self.stop(2.0)  # a scrape may hang with the disk: the process ends without it

    # What is answered

    def _route(self, method: str, path: str) -> _Answer:
        routes: dict[str, Callable[[Pool, Operator], _Answer]]
        routes = {"/healthz": _healthz, "/readyz": _readyz, "/metrics": self._metrics_page}
        route = routes.get(path)
        if route is None:
            return _error(404, f"there are {', '.join(routes)}")
        if method not in ("GET", "HEAD"):
            return _error(405, "only GET and HEAD", "Allow: GET, HEAD")
        if self._subject is None:
            return _error(503, "the agent is starting")
        return route(*self._subject)

    def _metrics_page(self, pool: Pool, operator: Operator) -> _Answer:
        try:
            from egmctl.provider.metrics import PoolMetrics
        except ImportError:
            return _error(501, "metrics need the package prometheus_client: pip install 'egmctl[metrics]'")
        if self._metrics is None:
            self._metrics = PoolMetrics(pool)
        return _Answer(200, self._metrics.text(), self._metrics.content_type)

    # How it is answered

    def answer(self, received: bytearray) -> bytes | None:
        ends = [end for end in (received.find(b"\r\n\r\n"), received.find(b"\n\n")) if end >= 0]
        if ends:
            method, answer = self._read(bytes(received[: min(ends)]))
        elif len(received) > MAX_REQUEST:
            method, answer = "GET", _error(431, f"a request is at most {MAX_REQUEST} bytes")
        else:
            return None
        headers = [
            f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}",
            f"Content-Type: {answer.kind}",
            f"Content-Length: {len(answer.body)}",
            "Cache-Control: no-store",
            "Connection: close",
            *answer.headers,
        ]
        head = "\r\n".join(headers).encode() + b"\r\n\r\n"
        return head if method == "HEAD" else head + answer.body

    def _read(self, head: bytes) -> tuple[str, _Answer]:
        words = head.split(b"\n", 1)[0].decode("latin-1").split()
        if len(words) != 3 or not words[2].startswith("HTTP/") or len(head) > MAX_REQUEST:
            return "GET", _error(400, "not an HTTP request")
        method, target, version = words
        if not version.startswith("HTTP/1."):
            return "GET", _error(505, "HTTP/1.0 or HTTP/1.1")
        try:
            return method, self._route(method, target.partition("?")[0])
        except Exception as error:  # the next request is answered, whatever this one met
            return method, _error(500, f"{type(error).__name__}: {error}")
