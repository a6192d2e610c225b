"""Memory goes when nobody can be told of it any more, and what does not come back is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from egmctl.errors import CleanupPendingError
from egmctl.memory import ReleaseError
from egmctl.memory.registry import RegistrationError
from egmctl.mooncake.handshake import fetch_descriptor
from egmctl.provider import holders
from egmctl.provider.local_stages import Memory
from tests.fabric.machines import CHUNK
from tests.fabric.test_driver_faults import agent_of, commands, new_model, restored
from tests.provider.pools import private_paths
from tests.support.master import REPOSITORY, Master

__all__ = ["restored"]  # the fixture that puts the real driver back


@pytest.mark.parametrize("kind", ["cuda-fabric", "cuda-posix"])
def test_no_chunk_is_released_and_none_published_twice_while_it_is_registered(
    kind: str, quick_master: Master, tmp_path: Path
) -> None:
    model = new_model(tmp_path)
    with private_paths(tmp_path) as paths, agent_of(kind, quick_master, model, paths) as agent:  # type: ignore[arg-type]
        acts = commands(agent)
        acts["provision"]()
        parts = agent.pool.parts
        assert parts.registry.remote() == []
        acts["mount"]()
        chunks = [parts.chunks[index] for index in (0, 1)]
        whole = model.leaks()
        assert [chunk for chunk, _ in parts.registry.remote()] == chunks
        with pytest.raises(RegistrationError, match="registered already"):
            parts.registry.register_remote(chunks)
        with pytest.raises(ReleaseError, match="still registered"):
            parts.registry.check_release(chunks[0])
        with pytest.raises(CleanupPendingError, match="2 chunks could not be released"):
            Memory()._release(agent.pool)
        assert model.leaks() == whole
        listed = fetch_descriptor(agent.pool.record_now().endpoint).buffers
        assert [(each.addr, each.length) for each in listed] == [(chunk.address, CHUNK) for chunk in chunks]
        assert parts.workspace is not None, "there is local-only memory, and it is not listed"
        acts["teardown"]()
        assert model.leaks() == {}


def test_memory_that_an_importer_keeps_is_said_with_its_bytes_and_who_has_it(
    quick_master: Master, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model(tmp_path)
    held = 0

    def node_free(nodes: Iterable[int]) -> dict[int, int]:
        files = [path.name for path in model.config.directory.iterdir() if not path.name.endswith(".owner")]
        used = sum(int(name.split("-")[2]) for name in files)
        return dict.fromkeys(nodes, (1 << 40) - max(used, held))

    monkeypatch.setattr(holders, "node_free", node_free)
    monkeypatch.setattr(holders, "TOLERANCE", 0)
    with private_paths(tmp_path) as paths, agent_of("cuda-posix", quick_master, model, paths) as agent:
        acts = commands(agent)
        acts["provision"]()
        acts["mount"]()
        command = [sys.executable, "-m", "tests.gpu.hold", agent.pool.record_now().endpoint, "1"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY, env=dict(os.environ)
        ) as holder:
            try:
                assert holder.stdout is not None
                told = json.loads(holder.stdout.readline())
                held = told["bytes"]
                assert held == CHUNK
                acts["teardown"]()
                (warning,) = agent.pool.warnings
                assert f"({CHUNK} bytes) of the 32 MiB released did not come back" in warning
                assert f"process {told['pid']} (" in warning
                assert "which imported chunk 1" in warning
            finally:
                holder.kill()
        assert model.leaks() == {}
