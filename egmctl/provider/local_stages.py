"""The stages of `provision`: control socket, endpoint, memory. Each does, and undoes, what its class says."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from egmctl.errors import CleanupPendingError
from egmctl.ledger import is_running
from egmctl.memory import provider_memory
from egmctl.provider import holders
from egmctl.provider.remembered import recall
from egmctl.steps import step
from egmctl.units import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from egmctl.provider.pool import Pool

__all__ = ["Control", "Endpoint", "Memory"]

UNMAP_PATIENCE = 2.0
"""Seconds that importers get, after they were told, to let go before the memory is released."""


class Control:
    """The control socket. Ledger: resource ``socket`` intended, present, removed. A retry finds it open and goes on."""

    name = "control socket"

    def do(self, pool: Pool) -> None:
        door = pool.parts.control
        if door is None:
            return
        path = str(pool.paths.socket(pool.name))
        with pool.record("control socket begins", path=path) as ledger:
            ledger.set_pool(socket=path)
            ledger.put_resource("socket", path, "intended")
        door.open()
        with pool.record("control socket open", path=path) as ledger:
            ledger.put_resource("socket", path, "present")

    def undo(self, pool: Pool) -> None:
        for resource in pool.resources("socket"):
            if pool.live is not None and pool.live.control is not None:
                pool.live.control.close()
            with step("provider.socket.unlink", path=resource.name):
                Path(resource.name).unlink(missing_ok=True)
            with pool.record("control socket removed", path=resource.name) as ledger:
                ledger.put_resource("socket", resource.name, "removed")


class Endpoint:
    """The name under which consumers ask for the descriptor: the agent's own handshake server, or, with an HTTP
    metadata server, a key that no other incarnation has. Ledger: resource ``handshake``, column ``endpoint``."""

    name = "endpoint"

    def do(self, pool: Pool) -> None:
        if pool.metadata_url is not None:
            self.rename(pool)
        else:
            self.bind(pool, pool.fixed_port or 0)

    @staticmethod
    def rename(pool: Pool) -> None:
        """A key at the metadata server that no other incarnation has had, and this one neither."""
        with pool.record("endpoint chosen") as ledger:
            ledger.set_pool(endpoint=f"egm-{pool.name}-{pool.record_now().nonce[:16]}-{os.urandom(3).hex()}")

    @staticmethod
    def bind(pool: Pool, port: int) -> None:
        """Take a port (0: a free one) and answer there with the descriptor, as soon as there is one."""
        from egmctl.mooncake.handshake import HandshakeServer

        wanted = f"{pool.host}:{port}"
        with pool.record("endpoint begins", wanted=wanted) as ledger:
            ledger.put_resource("handshake", wanted, "intended")
        parts = pool.parts
        parts.endpoint = HandshakeServer(pool.host, port, lambda: parts.published)
        parts.bound_at = time.monotonic()
        with pool.record("endpoint open", endpoint=parts.endpoint.endpoint) as ledger:
            ledger.put_resource("handshake", wanted, "present", endpoint=parts.endpoint.endpoint)
            ledger.set_pool(endpoint=parts.endpoint.endpoint)

    def undo(self, pool: Pool) -> None:
        if pool.live is not None and pool.live.endpoint is not None:
            pool.live.endpoint.close()
            pool.live.endpoint = None
        present = pool.resources("handshake")
        if present:
            with pool.record("endpoint closed") as ledger:
                for resource in present:
                    ledger.put_resource("handshake", resource.name, "removed")


class Memory:
    """All chunks, or none. Ledger: every chunk ``creating`` before the first, ``mapped`` with its address after the
    last; ``releasing`` before, ``released`` after the release. Without the agent its memory is gone with it:
    ``lost``, and what importers still hold is named."""

    name = "memory"

    def do(self, pool: Pool) -> None:
        plan, parts = pool.plan, pool.parts
        specs = [chunk.spec() for chunk in plan.chunks]
        if parts.memory is None:
            known = recall(pool.paths, pool.record_now().endpoint) if pool.remembered else []
            parts.memory = provider_memory(
                plan.memory_kind,
                total_bytes=plan.effective_bytes,
                huge_page_bytes=plan.huge_page_bytes,
                avoid=known,
            )
        memory = parts.memory
        memory.preflight(specs)
        with pool.record("allocation begins", chunks=len(specs), bytes=plan.effective_bytes) as ledger:
            ledger.set_chunks("creating", (spec.index for spec in specs))
        free = holders.node_free(node.numa_node for node in plan.nodes)
        before = 0
        for spec in specs:
            pool.task.checkpoint()

            def told(done: int, base: int = before, text: str = f"chunk {spec.index} on node {spec.numa_node}") -> None:
                pool.task.tell("memory", text, base + done, plan.effective_bytes, "bytes")
                pool.task.checkpoint()

            parts.chunks[spec.index] = memory.create(spec, told)
            before += spec.nbytes
        now = holders.node_free(free)
        parts.accountable = {
            n.numa_node for n in plan.nodes if free.get(n.numa_node, 0) - now.get(n.numa_node, 0) > n.bytes // 2
        }
        if plan.local_buffer_bytes:
            with step("provider.workspace.map", nbytes=plan.local_buffer_bytes):
                parts.workspace = mmap.mmap(-1, plan.local_buffer_bytes)
            parts.registry.register_local("workspace", _address(parts.workspace), plan.local_buffer_bytes)
        files = {str(inode): index for inode, index in holders.file_inodes(parts.chunks.values()).items()}
        with pool.record("allocated", bytes=plan.effective_bytes) as ledger:
            addresses = {index: chunk.address for index, chunk in parts.chunks.items()}
            ledger.set_chunks("mapped", addresses, addresses)
            if files:
                ledger.put_resource("memory", "files", "present", inodes=files)
        pool.warnings.extend(text for text in memory.warnings if text not in pool.warnings)
        parts.sharing = True

    def undo(self, pool: Pool) -> None:
        owned = pool.record_now().live_chunks
        if pool.live is None:
            if owned:
                self._mourn(pool, [row.index for row in owned])
            return
        memory = pool.live.memory
        if memory is None:
            files = pool.resources("memory")
            if owned or files:
                with pool.record("no memory is left") as ledger:
                    ledger.set_chunks("released", (row.index for row in owned))
                    for resource in files:
                        ledger.put_resource(resource.kind, resource.name, "removed")
            return
        self._withdraw(pool)
        self._release(pool)

    def _withdraw(self, pool: Pool) -> None:
        """Tell importers, and give them a moment to unmap."""
        parts = pool.parts
        if not parts.sharing:
            return
        parts.sharing = False
        indices = sorted(parts.chunks)
        told = 0 if parts.control is None else parts.control.withdraw(indices)
        if not told:
            return
        inodes = holders.file_inodes(parts.chunks.values())
        if inodes:
            pool.task.wait(
                UNMAP_PATIENCE,
                stage="importers",
                text="waiting for importers to unmap",
                until=lambda: not holders.mappers(inodes),
                slice_s=0.1,
            )
        else:
            pool.task.wait(UNMAP_PATIENCE, stage="importers", text="waiting for importers to unmap")

    def _release(self, pool: Pool) -> None:
        parts = pool.parts
        memory = parts.memory
        if memory is None:
            return
        chunks = memory.chunks()
        try:
            inodes = holders.file_inodes(chunk for chunk in chunks)
        except Exception:  # half-made or half-released chunks cannot be shared; who maps them is then not known
            inodes = {}
        with pool.record("release begins", chunks=len(chunks)) as ledger:
            ledger.set_chunks("releasing", (row.index for row in pool.record_now().live_chunks))
        released: dict[int, int] = {}
        for chunk in chunks:
            released[chunk.spec.numa_node] = released.get(chunk.spec.numa_node, 0) + chunk.spec.nbytes
        before = holders.node_free(released)
        kept: list[str] = []
        done = 0
        for chunk in chunks:
            try:
                parts.registry.check_release(chunk)
                memory.release(chunk)
                parts.chunks.pop(chunk.spec.index, None)
                done += chunk.spec.nbytes
                pool.task.tell("release", "memory released", done, sum(released.values()), "bytes")
            except Exception as error:  # one chunk's trouble does not keep the others
                kept.append(f"chunk {chunk.spec.index}: {error}")
        if kept:
            still = {spec.index for spec in memory.owned()}
            with pool.record("release incomplete", kept=kept) as ledger:
                ledger.set_chunks("released", (r.index for r in pool.record_now().live_chunks if r.index not in still))
            raise CleanupPendingError(
                f"{len(kept)} chunks could not be released: {'; '.join(kept[:3])}",
                where=f"pool {pool.name}",
                hint="run teardown again",
            )
        workspace = parts.workspace
        if workspace is not None:
            with step("provider.workspace.unmap"):
                parts.registry.unregister_local(_address(workspace))
                workspace.close()
                parts.workspace = None
        memory.close()
        parts.memory = None
        self._account(pool, before, released, inodes)
        with pool.record("released", bytes=done) as ledger:
            ledger.set_chunks("released", (row.index for row in pool.record_now().live_chunks))
            ledger.put_resource("memory", "files", "removed")

    @staticmethod
    def _account(pool: Pool, before: dict[int, int], released: dict[int, int], inodes: dict[int, int]) -> None:
        """Say what did not come back, and who may hold it."""
        by = holders.mappers(inodes)
        for pid, indices in sorted(by.items()):
            chunks = ", ".join(map(str, sorted(indices)))
            pool.warn(
                f"process {pid} ({holders.process_name(pid)}) still maps chunk {chunks}: that memory stays in use "
                "until it lets go"
            )
        if not by:
            expected = {node: nbytes for node, nbytes in released.items() if node in pool.parts.accountable}
            for node, lack in sorted(holders.wait_for_release(before, expected).items()):
                pool.warn(
                    f"node {node}: {format_size(lack)} ({lack} bytes) of the {format_size(released[node])} released "
                    f"did not come back; {_suspects(pool, inodes)}"
                )

    @staticmethod
    def _mourn(pool: Pool, indices: list[int]) -> None:
        """The agent is dead and its memory went with it, except what importers hold: name those."""
        files = {int(i): index for r in pool.resources("memory") for i, index in r.detail.get("inodes", {}).items()}
        for pid, mapped in sorted(holders.mappers(files).items()):
            chunks = ", ".join(map(str, sorted(mapped)))
            pool.warn(
                f"process {pid} ({holders.process_name(pid)}) still maps chunk {chunks} of the agent that is gone: "
                "that memory stays in use until it lets go"
            )
        with pool.record("memory went with the agent", chunks=len(indices)) as ledger:
            ledger.set_chunks("lost", indices)
            ledger.put_resource("memory", "files", "removed")


def _suspects(pool: Pool, inodes: Mapping[int, int]) -> str:
    """Who may hold memory that did not come back. An importer that is seen to have let go of files is none of them."""
    known = [
        f"process {pid} ({holders.process_name(pid)}), which imported chunk {', '.join(map(str, sorted(chunks)))}"
        for (pid, started), chunks in sorted(pool.parts.importers.items())
        if is_running(pid, started) and not (inodes and holders.has_let_go(pid, inodes))
    ]
    if known:
        return f"it may be held by {'; '.join(known)}, until it lets go"
    return "an importer that egmctl does not know may hold it, or others took it meanwhile"


def _address(block: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(block))
