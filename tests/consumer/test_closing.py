"""A store that is closed lets go of everything, whatever fails meanwhile and whoever is still at work."""

from __future__ import annotations

import threading

import pytest

from egmctl.consumer import EgmStore
from egmctl.consumer.errors import StoreClosed
from egmctl.memory.driver import CudaError
from egmctl.mooncake.descriptor import SegmentDescriptor
from tests.consumer.mini_provider import MiniProvider
from tests.consumer.support import Background, mapped_files, open_files
from tests.support.master import Master


def _watchers() -> int:
    return sum(thread.name == "egm-watch" for thread in threading.enumerate())


def test_a_part_that_fails_to_close_keeps_nothing_else_open(master: Master, provider: MiniProvider) -> None:
    class Broken:
        def close(self) -> None:
            raise CudaError("cuStreamDestroy", "CUDA_ERROR_ILLEGAL_ADDRESS", 700)

    before = (open_files(), mapped_files(), _watchers())
    store = EgmStore.connect(master.address)
    store.put("k", b"1" * 1000)
    assert mapped_files() == before[1] + 1
    store._engine.gatherer = Broken()  # type: ignore[assignment]
    with pytest.raises(CudaError, match="700"):
        store.close()
    assert (open_files(), mapped_files(), _watchers()) == before


def test_a_provider_that_is_bound_while_the_store_closes_is_let_go(master: Master, provider: MiniProvider) -> None:
    before = (open_files(), _watchers())
    store = EgmStore.connect(master.address)
    bindings = store._engine.bindings
    original = bindings._fetch
    fetching, go = threading.Event(), threading.Event()

    def slow(endpoint: str) -> SegmentDescriptor:
        fetching.set()
        assert go.wait(10)
        return original(endpoint)

    bindings._fetch = slow
    late = Background(lambda: bindings.get(provider.endpoint))
    assert fetching.wait(10)
    store.close()
    go.set()
    with pytest.raises(StoreClosed):
        late.result()
    assert (open_files(), _watchers()) == before
