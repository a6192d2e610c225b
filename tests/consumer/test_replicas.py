"""Sessions and gathers of objects with several replicas: what one provider cannot give, another does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from egmctl.consumer import EgmStore, Timing
from egmctl.consumer.bindings import Binding, ChunkAt
from egmctl.consumer.errors import BadOffset, GetFailed, InvalidRequest, ObjectNotFound, StaleAllocation, StoreError
from egmctl.consumer.host_copy import Completion, Fragment, HostCopier
from egmctl.consumer.master_link import Location
from egmctl.memory.base import Mapping
from egmctl.memory.driver import CudaError
from egmctl.mooncake.master import ReplicateConfig
from tests.consumer.mini_provider import MiniProvider
from tests.consumer.support import Memory, payload
from tests.consumer.test_devices import Gpu, gpu, open_store, provide  # noqa: F401 - a fixture
from tests.support.master import Master

MIB = 1 << 20
SIZE = 10_000
TWO = ReplicateConfig(replica_num=2)


class Broken:
    def wait(self, timeout: float | None = None) -> bool:
        raise CudaError("cuEventQuery", "CUDA_ERROR_ECC_UNCORRECTABLE", 214)

    def done(self) -> bool:
        return True


class Pair:
    """Two providers, and a store of whose reads those from the memory of ``broken`` fail."""

    def __init__(self, store: EgmStore, providers: Sequence[MiniProvider]) -> None:
        self.store = store
        self.endpoints = [provider.endpoint for provider in providers]
        self.providers = dict(zip(self.endpoints, providers, strict=True))
        self.broken: set[str] = set()
        self.late = False
        self.failures = 0
        self.copies = 0
        self.memory = Memory(MIB)

    def fails(self, addresses: Sequence[int]) -> bool:
        self.copies += 1
        mappings = self.store._engine.mappings
        for entry in [*mappings._entries.values(), *mappings._doomed]:
            mapping = entry.future.result()
            starts = (mapping.address, getattr(mapping, "device_address", mapping.address))
            inside = any(start <= each < start + mapping.nbytes for start in starts if start for each in addresses)
            if inside and entry.key[0] in self.broken:  # type: ignore[index]
                self.failures += 1
                return True
        return False

    def put(self, *keys: str, replicas: int = 2) -> None:
        for key in keys:
            self.store.put(key, payload(key, SIZE), config=ReplicateConfig(replica_num=replicas))

    def endpoint(self, key: str) -> str:
        """Of the replica that is read first."""
        (location,) = self.store._engine.master.locate([key])()
        assert isinstance(location, Location)
        return location.places[0].endpoint

    def one_at_each(self) -> list[str]:
        """Keys of objects with two replicas: of each provider's, some that are read there first."""
        keys = [f"k{number}" for number in range(24)]
        self.put(*keys)
        assert {self.endpoint(key) for key in keys} == set(self.endpoints)
        return keys


class Copier:
    """By the CPU, as far as the pair lets it."""

    def __init__(self) -> None:
        self.inner = HostCopier(1)
        self.pair: Pair | None = None

    def copy(
        self, fragments: Sequence[Fragment], *, device: int | None = None, stream: int | None = None
    ) -> Completion:
        if self.pair is not None and self.pair.fails([source for _, source, _ in fragments]):
            if self.pair.late:
                return Broken()
            raise CudaError("cuMemcpyAsync", "CUDA_ERROR_INVALID_VALUE", 1)
        return self.inner.copy(fragments)


@contextmanager
def host_store(master: Master, copier: Copier) -> Iterator[EgmStore]:
    with EgmStore.connect(master.address, copier=copier, timing=Timing(retry=1.0)) as store:
        yield store
    copier.inner.close()


@pytest.fixture
def pair(master: Master) -> Iterator[Pair]:
    copier = Copier()
    with (
        MiniProvider(master.address, chunks=[32 * MIB]) as one,
        MiniProvider(master.address, chunks=[32 * MIB]) as other,
        host_store(master, copier) as store,
    ):
        pair = copier.pair = Pair(store, [one, other])
        store.register_buffer(pair.memory.address, pair.memory.nbytes)
        yield pair


@pytest.mark.parametrize("late", [False, True], ids=["when it is queued", "when it is waited for"])
def test_a_session_reads_the_next_replica_and_stays_with_it(pair: Pair, master: Master, late: bool) -> None:
    pair.put("k")
    with pair.store.session(["k"]) as session:
        pair.broken, pair.late = {pair.endpoint("k")}, late
        master.pause()  # both providers were bound before: nobody has to be asked
        try:
            for offset in (0, 5000):
                assert session.read_into("k", offset, pair.memory.address, 5000) == 5000
                assert pair.memory.read(5000) == payload("k", SIZE)[offset : offset + 5000]
        finally:
            master.resume()
        assert pair.failures == 1
        assert session.unchanged()
        assert session.renew() == ()
        session.read_into("k", 0, pair.memory.address, SIZE)
        assert pair.failures == 1, "the place that failed is not read any more"


def test_a_session_that_finds_no_replica_to_copy_tells_the_reason_of_each(pair: Pair) -> None:
    pair.put("k")
    with pair.store.session(["k"]) as session:
        pair.broken = set(pair.endpoints)
        with pytest.raises(GetFailed, match="no replica could be copied") as failed:
            session.read_into("k", 0, pair.memory.address, SIZE)
        reasons = failed.value.facts["reasons"]
        assert len(reasons) == pair.failures == 2
        assert all("CUDA_ERROR_INVALID_VALUE" in reason for reason in reasons)
        assert all(any(endpoint in reason for reason in reasons) for endpoint in pair.endpoints)


def test_the_failure_of_the_only_replica_is_told_as_it_is_and_not_held_against_it(pair: Pair) -> None:
    pair.put("k", replicas=1)
    with pair.store.session(["k"]) as session:
        pair.broken = set(pair.endpoints)
        for read in (session.read_into, lambda key, at, to, size: session.gather([at], size, to)):
            with pytest.raises(CudaError, match="INVALID_VALUE"):
                read("k", 0, pair.memory.address, SIZE)
        assert pair.failures == 2
        pair.broken = set()
        session.read_into("k", 0, pair.memory.address, SIZE)
        assert pair.memory.read(SIZE) == payload("k", SIZE)


@pytest.mark.parametrize("which", [0, 1])
def test_objects_read_together_are_all_read_where_it_works(pair: Pair, which: int) -> None:
    keys = pair.one_at_each()
    with pair.store.session(keys) as session:
        pair.broken = {pair.endpoints[which]}
        reads = [(key, 100, pair.memory.address + 500 * at, 500) for at, key in enumerate(keys)]
        for _ in range(2):
            assert session.batch_read_into(reads) == 500 * len(keys)
            assert pair.memory.read(500 * len(keys)) == b"".join(payload(key, SIZE)[100:600] for key in keys)
        assert 1 <= pair.failures <= 2, "no more than once for each provider, and then it is known"


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("several", [False, True], ids=["one object", "several"])
def test_a_gather_goes_to_other_replicas(pair: Pair, which: int, several: bool) -> None:
    keys = pair.one_at_each()
    pair.broken = {pair.endpoints[which]}
    keys = keys if several else [key for key in keys if pair.endpoint(key) in pair.broken][:1]
    objects = [at % len(keys) for at in range(100)]
    offsets = [97 * at for at in range(100)]
    wanted = b"".join(payload(keys[number], SIZE)[at : at + 64] for number, at in zip(objects, offsets, strict=True))
    given: dict[str, Any] = {"objects": objects} if several else {}
    assert pair.store.gather_into(keys, offsets, 64, pair.memory.address, **given) == len(wanted)
    assert pair.memory.read(len(wanted)) == wanted
    assert pair.failures
    pair.failures = 0
    with pair.store.session(keys) as session:
        for _ in range(3):
            pair.memory.write(bytes(len(wanted)))
            session.gather(offsets, 64, pair.memory.address, **given)
            assert pair.memory.read(len(wanted)) == wanted
        assert 1 <= pair.failures <= 2


def test_what_would_fail_anywhere_is_not_tried_elsewhere(pair: Pair) -> None:
    pair.put("k")
    with pair.store.session(["k"]) as session:
        pair.copies = 0
        for wrong in ([SIZE - 9], [-1]):
            with pytest.raises(BadOffset):
                session.gather(wrong, 10, pair.memory.address)
        with pytest.raises(InvalidRequest):
            session.read_into("k", SIZE, pair.memory.address, 1)
        assert pair.copies == 0


def test_a_replica_whose_memory_cannot_be_imported_is_passed_over(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.put("k")
    bindings, mappings = pair.store._engine.bindings, pair.store._engine.mappings
    refused, original = {pair.endpoint("k")}, bindings.map_chunk

    def map_chunk(binding: Binding, chunk: ChunkAt) -> Mapping:
        if binding.endpoint in refused:
            raise CudaError("cuMemImportFromShareableHandle", "CUDA_ERROR_OUT_OF_MEMORY", 2)
        return original(binding, chunk)

    monkeypatch.setattr(bindings, "map_chunk", map_chunk)
    mappings.drop(lambda key: True)
    with pair.store.session(["k"]) as session:
        session.read_into("k", 0, pair.memory.address, SIZE)
        assert pair.memory.read(SIZE) == payload("k", SIZE)
        # One cannot be copied, and the other one not be imported.
        pair.broken = set(pair.endpoints) - refused
        with pytest.raises(GetFailed) as failed:
            session.read_into("k", 0, pair.memory.address, SIZE)
        reasons = " ".join(failed.value.facts["reasons"])
        assert "OUT_OF_MEMORY" in reasons
        assert "INVALID_VALUE" in reasons
    refused.clear()
    mappings.drop(lambda key: True)
    with pair.store.session(["k"]) as session:  # imported only once it is needed
        assert mappings.count == 1
        pair.broken = {pair.endpoint("k")}
        session.gather([0], SIZE, pair.memory.address)
        assert pair.memory.read(SIZE) == payload("k", SIZE)
        assert mappings.count == 2


@pytest.mark.parametrize(
    ("meanwhile", "error"), [("nothing", None), ("replaced", StaleAllocation), ("removed", ObjectNotFound)]
)
def test_a_provider_that_was_not_bound_when_the_object_was_located_is_read_if_it_still_is_that_object(
    pair: Pair, master: Master, meanwhile: str, error: type[StoreError] | None
) -> None:
    pair.put("k")
    copier = Copier()
    with host_store(master, copier) as store:
        late = copier.pair = Pair(store, list(pair.providers.values()))
        store.register_buffer(late.memory.address, late.memory.nbytes)
        late.broken = {pair.endpoint("k")}
        store._engine.bindings.get(pair.endpoint("k"))  # as after a read of what lies there alone
        with store.session(["k"]) as session:
            assert {binding.endpoint for binding in store._engine.bindings.known()} == late.broken
            if meanwhile != "nothing":
                pair.store.remove("k", force=True)
            if meanwhile == "replaced":
                pair.store.put("k", payload("other", SIZE), config=TWO)
            if error is None:
                session.read_into("k", 0, late.memory.address, SIZE)
                assert late.memory.read(SIZE) == payload("k", SIZE)
                assert session.unchanged()
                return
            with pytest.raises(error):
                session.read_into("k", 0, late.memory.address, SIZE)
            assert late.memory.read(SIZE) == bytes(SIZE), "bytes of another object, or of free space"


def test_a_copy_that_fails_as_its_provider_ends_is_made_from_the_other(pair: Pair) -> None:
    pair.put("k")
    with pair.store.session(["k"]) as session:
        first = pair.endpoint("k")
        pair.broken = {first}
        pair.providers[first].kill()
        session.read_into("k", 0, pair.memory.address, SIZE)
        assert pair.memory.read(SIZE) == payload("k", SIZE)
        assert not session.unchanged(), "what was read from the first before may have been wrong"
    assert pair.store.gather_into("k", [0], SIZE, pair.memory.address) == SIZE


class Gatherer:
    """The store's own, as far as the pair lets it."""

    def __init__(self, inner: Any, pair: Pair) -> None:
        self._inner = inner
        self._pair = pair

    def gather(self, object_ranges: Any, *arguments: Any, **more: Any) -> Completion:
        if self._pair.fails([start for start, _ in object_ranges]):
            if self._pair.late:
                return Broken()
            raise CudaError("cuLaunchKernelEx", "CUDA_ERROR_INVALID_VALUE", 1)
        done: Completion = self._inner.gather(object_ranges, *arguments, **more)
        return done

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("late", [False, True], ids=["when it is queued", "when it is waited for"])
@pytest.mark.parametrize("kind", ["shm", "cuda-posix", "cuda-fabric"])
def test_a_gather_by_a_gpu_goes_to_other_replicas(master: Master, gpu: Gpu, kind: str, late: bool) -> None:  # noqa: F811
    with (
        provide(master, gpu, kind, chunks=[32 * MIB]) as one,
        provide(master, gpu, kind, chunks=[32 * MIB]) as other,
        open_store(master, gpu) as store,
    ):
        pair = Pair(store, [one, other])
        pair.late = late
        source, destination = gpu.hbm(MIB), gpu.hbm(MIB)
        for buffer in (source, destination):
            store.register_buffer(buffer, MIB)
        keys = [f"k{number}" for number in range(16)]
        for key in keys:
            store.put_from(key, gpu.write(source, payload(key, SIZE)), SIZE, config=TWO)
        store._engine.gatherer = Gatherer(store._engine.gatherer, pair)
        pair.broken = {pair.endpoint("k0")}
        objects, offsets = list(range(16)), [100 * at for at in range(16)]
        wanted = b"".join(payload(f"k{at}", SIZE)[100 * at : 100 * at + 64] for at in range(16))
        assert store.gather_into(keys, offsets, 64, destination, objects=objects) == len(wanted)
        assert gpu.read(destination, len(wanted)) == wanted
        pair.failures = 0
        with store.session(keys) as session:
            for _ in range(2):
                gpu.write(destination, bytes(len(wanted)))
                session.gather(offsets, 64, destination, objects=objects)
                assert gpu.read(destination, len(wanted)) == wanted
            assert 1 <= pair.failures <= 2
            pair.copies = 0
            with pytest.raises(BadOffset):
                session.gather([SIZE], 64, destination, keys=["k0"])
            assert pair.copies == 1


@pytest.mark.parametrize("late", [False, True], ids=["when it is queued", "when it is waited for"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_batch_gets_all_that_another_provider_has(pair: Pair, which: int, late: bool) -> None:
    keys = pair.one_at_each()
    single = [f"s{number}" for number in range(12)]
    pair.put(*single, replicas=1)
    broken = pair.endpoints[which]
    lost = {key for key in single if pair.endpoint(key) == broken}
    assert 0 < len(lost) < len(single)
    pair.broken, pair.late = {broken}, late
    every = [*keys, *single]
    results = pair.store.batch_get_into(
        every, [pair.memory.address + SIZE * at for at in range(len(every))], [SIZE] * len(every)
    )
    for at, (key, result) in enumerate(zip(every, results, strict=True)):
        if key in lost:
            assert isinstance(result, CudaError), key
        else:
            assert result == SIZE, key
            assert pair.memory.read(SIZE * (at + 1))[SIZE * at :] == payload(key, SIZE), key
