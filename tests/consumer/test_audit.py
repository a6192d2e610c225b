"""What copies are asked to do is counted, so that "nothing is staged" is seen and not said."""

from __future__ import annotations

from egmctl.consumer import EgmStore
from tests.consumer.support import Memory, payload

MIB = 1 << 20


def test_bytes_between_a_buffer_and_a_chunk_are_told_from_all_others(store: EgmStore, memory: Memory) -> None:
    audit = store.audit()
    memory.write(payload("k", 3 * MIB))
    store.put_from("k", memory.address, 3 * MIB)
    assert (audit.direct, audit.other) == (3 * MIB, 0)
    store.get_into("k", memory.address + 5 * MIB, 3 * MIB)
    store.get_range("k", 1000, 500, memory.address)
    assert (audit.direct, audit.other) == (6 * MIB + 500, 0)
    staging = Memory(MIB)  # as an engine would do that stages: into memory of its own, and on from there
    start, _ = store._engine.mappings.ranges()[0]
    store._engine.host_copier.copy([(staging.address, start, 4096), (memory.address, staging.address, 4096)])
    store._engine.host_copier.copy([(start, staging.address, 100)])
    assert (audit.direct, audit.other) == (6 * MIB + 500, 2 * 4096 + 100)
    audit.note([(memory.address, start + 32 * MIB - 10, 11), (memory.address + memory.nbytes - 5, start, 6)])
    assert audit.other == 2 * 4096 + 100 + 11 + 6, "one end reaches beyond"
