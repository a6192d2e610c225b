"""A Master, a provider and a store on it, each for one test alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from egmctl.consumer import EgmStore, Timing
from tests.consumer.mini_provider import MiniProvider
from tests.consumer.support import Memory
from tests.support.master import Master

MIB = 1 << 20


@pytest.fixture
def provider(master: Master) -> Iterator[MiniProvider]:
    with MiniProvider(master.address, chunks=[32 * MIB, 32 * MIB]) as provider:
        yield provider


@pytest.fixture
def store(master: Master, provider: MiniProvider) -> Iterator[EgmStore]:
    with EgmStore.connect(master.address, timing=Timing(retry=2.0)) as store:
        yield store


@pytest.fixture
def memory(store: EgmStore) -> Memory:
    """16 MiB of this process, registered with the store."""
    memory = Memory(16 * MIB)
    store.register_buffer(memory.address, memory.nbytes)
    return memory
