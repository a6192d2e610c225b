"""The Master's admin HTTP server (``--metrics_port``): what it lists, as data.

Only reading calls; they take no locks worth mentioning, except that asking for a key grants it a lease.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from egmctl.errors import FailedError, UsageError
from egmctl.mooncake.calls import Uuid
from egmctl.mooncake.rpc import parse_address
from egmctl.steps import step

__all__ = ["AdminClient", "AdminUnreachable", "SegmentRow"]

MAX_ANSWER: Final = 64 << 20  # 150,000 segments
_U64: Final = 1 << 64


class AdminUnreachable(FailedError):
    """The Master's admin server does not answer, not in time, or not as a Mooncake Master does."""

    code = "admin-unreachable"


@dataclass(frozen=True)
class SegmentRow:
    """One segment the Master lists. ``base`` and sizes are bytes; ``allocator_used_bytes`` is 0 during a grace period.

    ``status``: "OK", "GRACEFULLY_UNMOUNTING" and others of Mooncake's. Masters of 0.3.13 show one ``client_id`` for
    all segments of one name, whoever owns them.
    """

    name: str
    segment_id: Uuid
    client_id: Uuid
    base: int
    size: int
    te_endpoint: str
    protocol: str
    status: str
    allocator_used_bytes: int


class AdminClient:
    """The admin server at ``address`` (``host:port``). Each request has ``timeout`` seconds in all.

    Raises `UsageError` for an address or key that cannot be one, `AdminUnreachable` for everything else.
    """

    def __init__(self, address: str, *, timeout: float = 5.0) -> None:
        self.host, self.port = parse_address(address, name="master_admin_addr")
        self.address = address
        self.timeout = timeout

    def segments_detail(self) -> list[SegmentRow]:
        """Every segment the Master knows, of all clients."""
        with step("mooncake.admin.segments_detail", master=self.address):
            document = self._json("/get_segments_detail")
        rows: list[SegmentRow] = self._checked(
            "/get_segments_detail", lambda: [_row(item) for item in document["segments"]]
        )
        return rows

    def health(self) -> dict[str, Any]:
        """Among others ``status``, ``role`` and ``service_ready``."""
        with step("mooncake.admin.health", master=self.address):
            document = self._json("/health")
        if not isinstance(document, dict):
            raise self._strange("/health", "not an object")
        return document

    def query_key(self, key: str) -> dict[str, Any] | None:
        """What the Master says of an object, or None. Grants the object a lease.

        The server does not decode its query, so only keys of plain ASCII without ``&`` and ``#`` can be asked for.
        """
        if not key or not all("!" <= c <= "~" for c in key) or set(key) & set("&#"):
            raise UsageError(f"the admin server cannot be asked for the key {key[:80]!r}", hint="ask the Master by RPC")
        status, body = self._get(f"/query_key?key={key}")
        if status == 404:
            return None
        document = self._parse(f"/query_key?key={key}", status, body)
        if not isinstance(document, dict):
            raise self._strange("/query_key", "not an object")
        return document

    def keys(self) -> list[str]:
        """All keys, one a line in the answer: a key with a newline in it appears as two."""
        with step("mooncake.admin.keys", master=self.address):
            status, body = self._get("/get_all_keys")
        if status != 200:
            raise self._strange("/get_all_keys", f"HTTP {status}")
        return body.decode("utf-8", "surrogateescape").split("\n")[:-1] if body else []

    def _json(self, path: str) -> Any:
        return self._parse(path, *self._get(path))

    def _parse(self, path: str, status: int, body: bytes) -> Any:
        if status != 200:
            raise self._strange(path, f"HTTP {status}")
        return self._checked(path, lambda: json.loads(body))

    def _checked(self, path: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._strange(path, f"{type(error).__name__}: {str(error)[:100]}") from error

    def _strange(self, path: str, what: str) -> AdminUnreachable:
        return AdminUnreachable(
            f"GET {path}: the answer is not one of a Mooncake Master ({what})",
            where=self.address,
            hint="check that master_admin_addr is the Master's --metrics_port",
        )

    def _get(self, path: str) -> tuple[int, bytes]:
        deadline = time.monotonic() + self.timeout
        connection = _Connection(self.host, self.port, deadline)
        try:
            connection.request("GET", path, headers={"Connection": "close"})
            answer = connection.getresponse()
            body = answer.read(MAX_ANSWER + 1)
        except (OSError, http.client.HTTPException) as error:
            reason = f"no answer within {self.timeout:g} s" if isinstance(error, TimeoutError) else str(error)
            raise AdminUnreachable(
                f"GET {path}: {reason or type(error).__name__}",
                where=self.address,
                hint="check that mooncake_master runs there and that its --metrics_port can be reached from this host",
            ) from error
        finally:
            connection.close()
        if len(body) > MAX_ANSWER:
            raise self._strange(path, f"more than {MAX_ANSWER} bytes")
        return answer.status, body


class _DeadlineSocket(socket.socket):
    """Reads until one point in time: a socket's own limit starts anew with each byte that drips in."""

    deadline = 0.0

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.settimeout(left)
        return super().recv_into(*args, **kwargs)


class _Connection(http.client.HTTPConnection):
    def __init__(self, host: str, port: int, deadline: float) -> None:
        super().__init__(host, port)
        self._deadline = deadline

    def connect(self) -> None:
        plain = socket.create_connection((self.host, self.port), max(0.01, self._deadline - time.monotonic()))
        left = max(0.01, self._deadline - time.monotonic())
        sock = _DeadlineSocket(plain.family, plain.type, plain.proto, fileno=plain.detach())
        sock.deadline = self._deadline
        sock.settimeout(left)
        self.sock = sock


def _row(item: dict[str, Any]) -> SegmentRow:
    return SegmentRow(
        name=_text(item, "segment_name"),
        segment_id=_uuid(item["segment_id"]),
        client_id=_uuid(item["client_id"]),
        base=_count(int(item["base_address"], 16)),
        size=_count(item["size_bytes"]),
        te_endpoint=_text(item, "te_endpoint"),
        protocol=_text(item, "protocol"),
        status=_text(item, "status"),
        allocator_used_bytes=_count(item["allocator_used_bytes"]),
    )


def _text(item: dict[str, Any], name: str) -> str:
    value = item[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is not a string")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _U64:
        raise ValueError("a number is not one of 64 bits")
    return value


def _uuid(text: Any) -> Uuid:
    high, low = str(text).split("-")
    if not (high.isascii() and high.isdigit() and low.isascii() and low.isdigit() and len(high) <= 20 >= len(low)):
        raise ValueError("an id is not two numbers")
    return _count(int(high)), _count(int(low))
