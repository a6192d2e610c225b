"""The consumer's face: put and get straight between a caller's buffers and the pool's DRAM."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from egmctl.consumer.audit import Audit, AuditedCopier
from egmctl.consumer.connect import assemble, make_fetch
from egmctl.consumer.context import keeps_device
from egmctl.consumer.engine import Timing
from egmctl.consumer.errors import InvalidRequest
from egmctl.consumer.flow import FlowOptions
from egmctl.consumer.gets import Gets
from egmctl.consumer.host_copy import Copier, HostCopier
from egmctl.consumer.master_link import Location
from egmctl.consumer.puts import Puts

if TYPE_CHECKING:
    from egmctl.consumer.copy import CopyOptions

__all__ = ["EgmStore", "make_fetch"]


class EgmStore(Puts, Gets):
    """A connection to a Mooncake Store whose pools are reached directly. Use it from any number of threads.

    Batches return one entry a key, in order: bytes moved, or the error (a `StoreError`) that this key failed with; they
    raise only for what concerns all keys. All other calls raise. Addresses are integers and lie in registered buffers.
    """

    @classmethod
    def connect(
        cls,
        master: str,
        devices: Sequence[int] = (),
        metadata_server: str = "P2PHANDSHAKE",
        tenant_id: str = "default",
        *,
        flow: FlowOptions | None = None,
        timing: Timing | None = None,
        max_mapped_bytes: int = 0,
        max_mappings: int = 1024,
        endpoints: Sequence[str] = (),
        copy_threads: int | None = None,
        copier: Copier | None = None,
        copy_options: CopyOptions | None = None,
    ) -> EgmStore:
        """``master`` is ``host:port``; ``devices`` are the GPUs whose memory is used, ``()`` for host buffers alone.

        ``endpoints`` are pools that a put may be steered to from the start, where the Master also has space that cannot
        be reached; those met on the way are remembered by themselves.
        ``max_mapped_bytes`` and ``max_mappings`` bound what stays imported: beyond them idle chunks are unmapped, the
        one used longest ago first (0: no bound). What is in use may exceed them, while it is.
        ``copy_options`` go to the device copier. ``copier`` takes the place of the CPU's, for tests.
        Raises `MasterUnreachable`, `CudaError`, `UsageError`.
        """
        host_copier = HostCopier(copy_threads)
        try:
            engine, buffers = assemble(
                master,
                devices,
                metadata_server,
                tenant_id,
                flow=flow or FlowOptions(),
                timing=timing or Timing(),
                max_mapped_bytes=max_mapped_bytes,
                max_mappings=max_mappings,
                endpoints=endpoints,
                host_copier=host_copier,
                copier=copier,
                copy_options=copy_options,
            )
        except BaseException:
            host_copier.close()
            raise
        return cls(engine, buffers, host_copier)

    def __enter__(self) -> EgmStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- buffers

    @keeps_device
    def register_buffer(self, address: int, nbytes: int) -> None:
        """Make a buffer known for transfers. Local-only: nothing of it is published. Raises `InvalidBuffer`."""
        self._open()
        self._buffers.register(address, nbytes)

    def unregister_buffer(self, address: int) -> None:
        """Forget a buffer, by its start. Transfers under way on it must be over. Raises `InvalidBuffer`."""
        self._buffers.unregister(address)

    # -- objects

    def exists(self, key: str) -> bool:
        """Whether the object can be read. The Master grants it a lease by that."""
        return self.batch_exists([key])[0]

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        """The same for several."""
        self._open()
        return self._engine.master.exists(keys)

    def size_of(self, key: str) -> int:
        """Bytes of the object. Raises `ObjectNotFound`, `ObjectBusy`."""
        self._open()
        located = self._engine.master.locate([key])()[0]
        if not isinstance(located, Location):
            raise located
        if not located.places:
            raise InvalidRequest("has no complete replica in memory", where=f"object {key!r}")
        return located.places[0].nbytes

    def remove(self, key: str, force: bool = False) -> None:
        """Remove an object. Raises `ObjectNotFound`, and `ObjectBusy` while it is being written or leased (a lease,
        but not a writer, gives way to ``force``)."""
        self._open()
        self._engine.master.remove(key, force)

    # -- how copies are made

    @keeps_device
    def calibrate(self) -> bool:
        """Measure on each GPU of which nothing is known yet from which block size the copy engine keeps up with the
        kernel, and keep it in the user's cache folder for later stores. False: nothing was left to measure.

        Takes about a second and 64 MiB of memory of each kind for each GPU. Raises `CudaError`, `KernelError`,
        `PreflightError`.
        """
        self._open()
        measure = getattr(self._engine.device_copier, "calibrate_unknown", None)
        return bool(measure()) if measure is not None else False

    def audit(self) -> Audit:
        """Count from now on what each copy is asked to do. It costs time; `verify` asks for it."""
        audit = Audit(self._buffers, self._engine.mappings)
        engine = self._engine
        engine.host_copier = AuditedCopier(engine.host_copier, audit)
        if engine.device_copier is not None:
            engine.device_copier = AuditedCopier(engine.device_copier, audit)
        return audit
