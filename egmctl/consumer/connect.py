"""How a store's parts are put together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from egmctl.consumer.bindings import Bindings, Fetch
from egmctl.consumer.buffers import Buffers
from egmctl.consumer.engine import Engine, Timing
from egmctl.consumer.errors import ProviderGone
from egmctl.consumer.flow import FlowOptions, Throttle
from egmctl.consumer.host_copy import Copier, HostCopier
from egmctl.consumer.mappings import MappingCache
from egmctl.consumer.master_link import MasterLink
from egmctl.errors import EgmError
from egmctl.mooncake.descriptor import SegmentDescriptor
from egmctl.mooncake.master import MasterClient, new_uuid

if TYPE_CHECKING:
    from egmctl.consumer.copy import CopyOptions

__all__ = ["assemble", "make_fetch"]


def assemble(
    master: str,
    devices: Sequence[int],
    metadata_server: str,
    tenant_id: str,
    *,
    flow: FlowOptions,
    timing: Timing,
    max_mapped_bytes: int,
    max_mappings: int,
    endpoints: Sequence[str],
    host_copier: HostCopier,
    copier: Copier | None,
    copy_options: CopyOptions | None,
) -> tuple[Engine, Buffers]:
    """The parts of a store; see `EgmStore.connect`. The Master has answered when this returns."""
    client = MasterClient(master, timeout=timing.request, tenant_id=tenant_id)
    try:
        client.service_ready()
        driver = device_copier = gatherer = None
        if devices:
            from egmctl.consumer.copy import make_copier, make_gatherer
            from egmctl.memory.driver import get_driver

            driver = get_driver()
            device_copier = make_copier(driver, devices, copy_options)
            gatherer = make_gatherer(driver, devices, copy_options)
        mappings = MappingCache(max_bytes=max_mapped_bytes, max_count=max_mappings)
        bindings = Bindings(
            make_fetch(metadata_server, timing.bind),
            devices=devices,
            timeout=timing.bind,
            stock_expiry=timing.stock_expiry,
            endpoints=endpoints,
            on_gone=lambda endpoint, nonce, chunks: mappings.drop(_belongs_to(endpoint, nonce, chunks)),
        )
        engine = Engine(
            MasterLink(client, new_uuid()),
            bindings,
            mappings,
            copier or host_copier,
            device_copier,
            Throttle(flow),
            timing,
            gatherer,
            driver,
        )
        return engine, Buffers(driver, devices)
    except BaseException:
        client.close()
        raise


def _belongs_to(endpoint: str, nonce: str, chunks: frozenset[int] | None) -> Callable[[Hashable], bool]:
    def chosen(key: Hashable) -> bool:
        return isinstance(key, tuple) and key[:2] == (endpoint, nonce) and (chunks is None or key[2] in chunks)

    return chosen


def make_fetch(metadata_server: str, timeout: float) -> Fetch:
    """How descriptors are found: from the endpoint itself, or from an HTTP metadata server.

    With a metadata server an endpoint need not be ``host:port``; where it is, and an egmctl agent answers there, the
    agent is believed, since what lies on the server may be of an agent that died.
    """
    from egmctl.mooncake.handshake import fetch_descriptor

    if metadata_server == "P2PHANDSHAKE":
        return lambda endpoint: fetch_descriptor(endpoint, timeout)
    from egmctl.mooncake.metadata import MetadataClient

    server = MetadataClient(metadata_server, timeout=timeout)

    def fetch(endpoint: str) -> SegmentDescriptor:
        found = server.fetch(endpoint)
        if found is None:
            raise ProviderGone("the metadata server has no descriptor of it", where=endpoint)
        if found.egm is not None:
            with suppress(EgmError):
                answer = fetch_descriptor(endpoint, timeout)
                if answer.egm is not None:
                    return answer
        return found

    return fetch
