"""Names and ports in a spec: host, host:port, the metadata server's URL. Pure: nothing is resolved."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from egmctl.errors import UsageError

__all__ = [
    "check_pairing",
    "is_loopback",
    "parse_endpoint",
    "parse_listen_address",
    "parse_local_hostname",
    "parse_metadata_server",
]

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)", re.ASCII)
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)
_SCHEME = re.compile(r"([A-Za-z0-9+.-]+)://")


def _check_host(host: str, name: str, whole: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        labels = host.removesuffix(".").split(".")
        numeric = labels[-1].isdecimal()  # 127.0.0.256 is a mistyped address, not a name
        if numeric or len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
            raise UsageError(
                f"{name} = {whole[:80]!r}: {host[:80]!r} is neither a host name nor an address",
                hint="write a host name or an IP address that the other hosts can reach",
            ) from None
        return host
    if address.is_unspecified or address.is_multicast:
        raise UsageError(
            f"{name} = {whole[:80]!r}: {host} is no address that another process can ask",
            hint="write the address that the other hosts reach this one by",
        )
    return host


def _split(text: str, name: str) -> tuple[str, str | None]:
    """(host, port text or None); brackets around an IPv6 address are removed."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise UsageError(f"{name} = {text[:80]!r} is not host:port", hint="write an IPv6 address as [::1]:50051")
        return host, rest[1:] if rest else None
    if text.count(":") > 1:
        raise UsageError(f"{name} = {text[:80]!r} is not host:port", hint="write an IPv6 address as [::1]:50051")
    host, colon, port = text.partition(":")
    return host, port if colon else None


def _check_port(port: str, name: str, whole: str) -> int:
    if not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise UsageError(f"{name} = {whole[:80]!r}: {port[:20]!r} is not a port", hint="a port is 1 to 65535")
    return int(port)


def parse_endpoint(text: str, *, name: str) -> tuple[str, int]:
    """``host:port`` of a Mooncake Master. Raises `UsageError`; a list of Masters behind etcd, redis or Kubernetes
    is refused."""
    scheme = _SCHEME.match(text)
    if scheme is not None:
        raise UsageError(
            f"{name} = {text[:80]!r}: egmctl speaks to one Master by host:port, not to a group found through "
            f"{scheme[1]}://",
            hint="name the present leader as host:port",
        )
    host, port = _split(text, name)
    if port is None:
        raise UsageError(f"{name} = {text[:80]!r} has no port", hint="write host:port, such as 10.0.0.1:50051")
    return _check_host(host, name, text), _check_port(port, name, text)


def parse_local_hostname(text: str) -> tuple[str, int | None]:
    """``host`` or ``host:port`` (which fixes the endpoint's port)."""
    host, port = _split(text, "local_hostname")
    _check_host(host, "local_hostname", text)
    return host, None if port is None else _check_port(port, "local_hostname", text)


def parse_listen_address(text: str, *, name: str) -> tuple[str, int]:
    """``host:port`` to listen at: port 0 takes a free one, no host is loopback, and an unspecified one (``0.0.0.0``)
    all of this machine's. Raises `UsageError`."""
    host, port = _split(text, name)
    if port is None or not _PORT.fullmatch(port) or int(port) > 65535:
        raise UsageError(
            f"{name} = {text[:80]!r} is not host:port",
            hint="write an address of this machine and a port, such as 127.0.0.1:9105 (port 0: a free one)",
        )
    try:
        unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        unspecified = False
    if host and not unspecified:
        _check_host(host, name, text)
    return host or "127.0.0.1", int(port)


def parse_metadata_server(text: str) -> str:
    """``P2PHANDSHAKE``, or the URL of an HTTP metadata server. Returned as it is."""
    if text == "P2PHANDSHAKE":
        return text
    hint = 'write "P2PHANDSHAKE", or "http://host:port/metadata"'
    if not text.startswith("http://"):
        raise UsageError(f"metadata_server = {text[:80]!r} is not supported: only a handshake or HTTP is", hint=hint)
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError as error:
        raise UsageError(f"metadata_server = {text[:80]!r}: {error}", hint=hint) from error
    if url.path != "/metadata" or url.query or url.fragment or "@" in url.netloc or not url.hostname or not port:
        raise UsageError(f"metadata_server = {text[:80]!r} is not http://host:port/metadata", hint=hint)
    _check_host(url.hostname, "metadata_server", text)
    return text


def is_loopback(host: str) -> bool:
    """Whether a name means "this host" on every host; not resolved, so an alias is not seen."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        lowered = host.lower().removesuffix(".")
        return lowered == "localhost" or lowered.endswith(".localhost")


def check_pairing(local_hostname: str, master_server_addr: str) -> None:
    """A loopback endpoint registered with a Master elsewhere would send other hosts to themselves: refused."""
    host, _ = parse_local_hostname(local_hostname)
    master, _ = parse_endpoint(master_server_addr, name="master_server_addr")
    if is_loopback(host) and not is_loopback(master):
        raise UsageError(
            f"local_hostname = {local_hostname!r} is this host's loopback, and the Master is at "
            f"{master_server_addr!r}: consumers on other hosts would connect to themselves",
            hint="write the name or address that the other hosts reach this one by",
        )
