"""GPU memory and what a Master has beside the pool: other clients' space, limits, more chunks than may be mapped."""

from __future__ import annotations

import pytest

from egmctl.consumer import EgmStore
from egmctl.consumer.errors import Unreachable
from egmctl.consumer.flow import FlowOptions
from egmctl.mooncake.master import ReplicateConfig
from tests.consumer.mini_provider import MiniProvider
from tests.consumer.support import payload
from tests.consumer.test_devices import Gpu, gpu, open_store, provide  # noqa: F401 - a fixture
from tests.support.master import Master

MIB = 1 << 20
CUDA_KINDS = ("cuda-posix", "cuda-fabric")


def put_and_get(store: EgmStore, gpu: Gpu, key: str, nbytes: int, buffer: int) -> None:  # noqa: F811
    data = payload(key, nbytes)
    gpu.write(buffer, data)
    assert store.put_from(key, buffer, nbytes) == nbytes
    gpu.write(buffer, bytes(nbytes))
    assert store.get_into(key, buffer, nbytes) == nbytes
    assert gpu.read(buffer, nbytes) == data


@pytest.mark.parametrize("kind", CUDA_KINDS)
def test_puts_given_space_of_another_client_are_asked_for_again_in_the_pool(
    master: Master,
    gpu: Gpu,  # noqa: F811
    kind: str,
) -> None:
    with (
        provide(master, gpu, kind) as pool,
        MiniProvider(master.address, chunks=[64 * MIB], egm=False),
        open_store(master, gpu, endpoints=[pool.endpoint]) as store,
    ):
        buffer = gpu.hbm(MIB)
        store.register_buffer(buffer, MIB)
        for number in range(30):
            put_and_get(store, gpu, f"k{number}", 5000 + number, buffer)


@pytest.mark.parametrize("kind", CUDA_KINDS)
def test_what_only_another_client_can_hold_is_refused_with_the_reason_of_each_replica(
    master: Master,
    gpu: Gpu,  # noqa: F811
    kind: str,
) -> None:
    with (
        provide(master, gpu, kind, chunks=[16 * MIB]),
        MiniProvider(master.address, chunks=[64 * MIB], egm=False),
        open_store(master, gpu) as store,
    ):
        buffer = gpu.hbm(32 * MIB)
        store.register_buffer(buffer, 32 * MIB)
        with pytest.raises(Unreachable) as refused:
            store.put_from("too large for the pool", buffer, 32 * MIB)
        assert "another client" in str(refused.value.facts["reasons"])
        assert not store.exists("too large for the pool")
        with pytest.raises(Unreachable) as refused:
            store.put_from("both", buffer, MIB, config=ReplicateConfig(replica_num=2))
        assert len(refused.value.facts["reasons"]) == 1, "the pool's own replica is no reason"
        assert not store.exists("both")


@pytest.mark.parametrize("kind", CUDA_KINDS)
def test_limits_cut_device_copies_without_loss(master: Master, gpu: Gpu, kind: str) -> None:  # noqa: F811
    flow = FlowOptions(max_in_flight_bytes=300_000, chunk_bytes=70_001, rate_limit=1 << 30)
    with provide(master, gpu, kind), open_store(master, gpu, flow=flow) as store:
        buffer = gpu.hbm(4 * MIB)
        store.register_buffer(buffer, 4 * MIB)
        put_and_get(store, gpu, "k", 3 * MIB + 17, buffer)


@pytest.mark.parametrize("kind", CUDA_KINDS)
def test_an_object_may_lie_in_gpu_and_pinned_parts(master: Master, gpu: Gpu, kind: str) -> None:  # noqa: F811
    with provide(master, gpu, kind), open_store(master, gpu) as store:
        hbm, pinned = gpu.hbm(MIB), gpu.pinned(MIB)
        for address in (hbm, pinned):
            store.register_buffer(address, MIB)
        data = payload("parts", 300_003)
        gpu.write(hbm, data[:100_001])
        gpu.write(pinned, data[100_001:])
        parts = [(hbm, 100_001), (pinned, 200_002)]
        assert store.batch_put_from_multi_buffers(["k"], [parts]) == [300_003]
        for address in (hbm, pinned):
            gpu.write(address, bytes(300_003))
        spread = [(pinned + 7, 250_000), (hbm + 5, 50_003)]
        assert store.batch_get_into_multi_buffers(["k"], [spread]) == [300_003]
        assert gpu.read(pinned + 7, 250_000) + gpu.read(hbm + 5, 50_003) == data


@pytest.mark.parametrize("kind", CUDA_KINDS)
def test_idle_mappings_beyond_the_bound_give_the_importers_memory_back(
    master: Master,
    gpu: Gpu,  # noqa: F811
    kind: str,
) -> None:
    if gpu.model is None:
        pytest.skip("only the model tells what it holds")
    with provide(master, gpu, kind, chunks=[16 * MIB] * 4), open_store(master, gpu, max_mappings=1) as store:
        buffer = gpu.hbm(MIB)
        store.register_buffer(buffer, MIB)
        for number in range(12):
            put_and_get(store, gpu, f"k{number}", 100_000, buffer)
            left = gpu.model.leaks()
            assert left["handles"] == left["mappings"] == left["reservations"] == 1
        assert store._engine.mappings.imports > 4, "all chunks were used, one at a time"
