"""The HTTP metadata server: where descriptors lie when a pool does not use the P2P handshake.

Keys are ``mooncake/ram/<te_endpoint>``, one descriptor for all chunks of an endpoint. The server compares the raw query
string, so the key is percent-encoded in upper-case hex, its slashes included, exactly as stock clients do.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote, urlsplit

from egmctl.errors import FailedError, PreflightError, UsageError
from egmctl.mooncake.descriptor import (
    MAX_DESCRIPTOR_BYTES,
    DescriptorError,
    EgmFields,
    SegmentDescriptor,
    parse_descriptor,
)
from egmctl.steps import step

__all__ = ["ForeignDescriptorError", "MetadataClient", "MetadataUnreachable", "descriptor_key"]


class MetadataUnreachable(FailedError):
    """The metadata server does not answer, not in time, or not as one should."""

    code = "metadata-unreachable"


class ForeignDescriptorError(PreflightError):
    """Somebody else's descriptor lies under the key; it is not overwritten."""

    code = "foreign-descriptor"


def descriptor_key(te_endpoint: str) -> str:
    """``mooncake/ram/<te_endpoint>``, not encoded."""
    return f"mooncake/ram/{te_endpoint}"


@dataclass(frozen=True)
class _Answer:
    status: int
    reason: str
    body: bytes


class MetadataClient:
    """PUT, GET and DELETE at ``http://host:port/metadata``. Each request has ``timeout`` seconds in all.

    Raises `UsageError` for a URL that cannot be one, `MetadataUnreachable` for whatever keeps a request from its
    answer. A request that ran out of time may still take effect.
    """

    def __init__(self, url: str, *, timeout: float = 5.0) -> None:
        self.url = url
        self.timeout = timeout
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise _bad_url(url) from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise _bad_url(url)
        if parts.username is not None or not url.isascii() or any(character <= " " for character in url):
            raise _bad_url(url)
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = port or (443 if self._secure else 80)
        self._path = parts.path or "/"

    def get(self, key: str) -> bytes | None:
        """The value, or None where there is none."""
        with step("metadata.get", key=key):
            answer = self._request("GET", key)
        if answer.status == 404:
            return None
        self._expect(answer, "GET", key)
        return answer.body

    def put(self, key: str, value: bytes) -> None:
        """Store, replacing what is there."""
        with step("metadata.put", key=key):
            self._expect(self._request("PUT", key, value), "PUT", key)

    def delete(self, key: str) -> bool:
        """Whether there was one."""
        with step("metadata.delete", key=key):
            answer = self._request("DELETE", key)
        if answer.status == 404:
            return False
        self._expect(answer, "DELETE", key)
        return True

    def fetch(self, te_endpoint: str) -> SegmentDescriptor | None:
        """The descriptor published for an endpoint, or None. Raises `DescriptorError` for one that is malformed."""
        data = self.get(descriptor_key(te_endpoint))
        return None if data is None else parse_descriptor(data, where=f"{self.url} {te_endpoint}")

    def publish(
        self, te_endpoint: str, descriptor: SegmentDescriptor, about_to: Callable[[], None] = lambda: None
    ) -> Literal["created", "same", "updated", "replaced-stale"]:
        """Put a descriptor of this incarnation, which carries ``egm`` fields, and say what it found. ``about_to`` is
        called when nothing but the PUT is left to do: what fails before has changed nothing at the server.

        One of another incarnation of the same pool is stale, since it is this one that has the endpoint now, and is
        replaced. Anybody else's, alive or not, is left alone: `ForeignDescriptorError`.
        """
        mine = descriptor.egm
        if mine is None or descriptor.name != te_endpoint:
            raise FailedError(
                f"a descriptor named {descriptor.name!r} cannot be published under {te_endpoint!r}",
                where=self.url,
                hint="its name must be the endpoint, and it must carry egmctl's own fields",
            )
        data = descriptor.to_bytes()
        key = descriptor_key(te_endpoint)
        found = self.get(key)
        outcome: Literal["created", "same", "updated", "replaced-stale"] = "created"
        if found is not None:
            theirs = _egm_of(found)
            if theirs is None or theirs.pool != mine.pool:
                self._refuse(te_endpoint, theirs)
            elif theirs.nonce != mine.nonce:
                outcome = "replaced-stale"
            elif found.strip() == data.strip():
                return "same"
            else:
                outcome = "updated"
        about_to()
        self.put(key, data)
        return outcome

    def withdraw(self, te_endpoint: str, nonce: str) -> bool:
        """Delete the descriptor of one incarnation; what others have put there since stays. Whether there was one."""
        found = self.get(descriptor_key(te_endpoint))
        if found is None:
            return False
        egm = _egm_of(found)
        if egm is None or egm.nonce != nonce:
            return False
        return self.delete(descriptor_key(te_endpoint))

    def _refuse(self, te_endpoint: str, theirs: EgmFields | None) -> None:
        owner = "a descriptor that is not egmctl's" if theirs is None else f"the descriptor of pool {theirs.pool!r}"
        if theirs is not None:
            owner += f" (host {theirs.host_id}, agent {theirs.nonce})"
        encoded = quote(descriptor_key(te_endpoint), safe="")
        raise ForeignDescriptorError(
            f"{owner} lies under {descriptor_key(te_endpoint)}",
            where=self.url,
            hint="give local_hostname another port, or, when its owner is gone for good: "
            f"curl -X DELETE '{self.url}?key={encoded}'",
        )

    def _expect(self, answer: _Answer, method: str, key: str) -> None:
        if answer.status != 200:
            text = answer.body[:200].decode("utf-8", "replace").strip()
            raise MetadataUnreachable(
                f"{method} of {key}: HTTP {answer.status} {answer.reason}{': ' if text else ''}{text}",
                where=self.url,
                hint="see that metadata_server is the URL of a Mooncake metadata server, its path included",
                facts={"status": answer.status},
            )

    def _request(self, method: str, key: str, body: bytes | None = None) -> _Answer:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self.timeout)
        deadline = time.monotonic() + self.timeout
        watchdog: threading.Timer | None = None
        expired = threading.Event()
        try:
            connection.connect()
            sock: socket.socket = connection.sock

            def expire() -> None:
                expired.set()
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

            # A socket's own limit starts anew with each byte, so a server that drips would never run into it.
            watchdog = threading.Timer(max(0.0, deadline - time.monotonic()), expire)
            watchdog.daemon = True
            watchdog.start()
            headers = {"Content-Type": "application/json", "Connection": "close"}
            connection.request(method, f"{self._path}?key={quote(key, safe='')}", body, headers)
            response = connection.getresponse()
            data = response.read(MAX_DESCRIPTOR_BYTES + 1)
            if expired.is_set():
                raise TimeoutError
            if response.length and len(data) <= MAX_DESCRIPTOR_BYTES:
                raise http.client.IncompleteRead(data, response.length)
        except (OSError, http.client.HTTPException) as error:
            late = expired.is_set() or isinstance(error, TimeoutError)
            reason = f"no answer within {self.timeout:g} s" if late else str(error) or type(error).__name__
            raise MetadataUnreachable(
                f"{method} of {key}: {reason}",
                where=self.url,
                hint="see that the metadata server runs and can be reached from here",
            ) from error
        finally:
            if watchdog is not None:
                watchdog.cancel()
                watchdog.join()
            connection.close()
        if len(data) > MAX_DESCRIPTOR_BYTES:
            raise MetadataUnreachable(
                f"{method} of {key}: the answer is larger than {MAX_DESCRIPTOR_BYTES} bytes",
                where=self.url,
                hint="see what lies there; it is not a segment descriptor",
            )
        return _Answer(response.status, response.reason, data)


def _egm_of(data: bytes) -> EgmFields | None:
    try:
        return parse_descriptor(data).egm
    except DescriptorError:
        return None


def _bad_url(url: str) -> UsageError:
    return UsageError(
        f"metadata_server = {url[:200]!r} is not a URL that can be used",
        hint="write http://host:port/metadata, or P2PHANDSHAKE",
    )
