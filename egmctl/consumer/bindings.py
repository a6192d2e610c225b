"""Who is behind an endpoint: one incarnation of an agent, bound before an object is located and checked after a copy.

The order is the whole point. A binding is made first (descriptor, nonce, exclusive), an object is located at the
Master after that, and the copy is believed only if the same incarnation is alive afterwards. So what was located was
the bound incarnation's own memory, whatever the endpoint was before or becomes later.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress

from egmctl.consumer.agent_link import Watch, export
from egmctl.consumer.binding import Binding, ChunkAt, StockHistory
from egmctl.consumer.errors import ProviderGone, StaleAllocation, StoreClosed, Unreachable
from egmctl.consumer.watcher import Watcher
from egmctl.errors import EgmError
from egmctl.memory import import_share
from egmctl.memory.base import Mapping, Share
from egmctl.mooncake.descriptor import SegmentDescriptor
from egmctl.mooncake.host import host_id

__all__ = ["Binding", "Bindings", "ChunkAt", "Fetch"]

Fetch = Callable[[str], SegmentDescriptor]
"""From an endpoint to its descriptor as it is now."""

_REFUSAL_LIFE = 2.0
"""Seconds for which an endpoint found unreachable is not asked again."""


class Bindings:
    """The bindings of a store, one an endpoint; made by one thread, waited for by others, no lock held meanwhile.

    ``on_gone`` is told of the endpoint and nonce whose incarnation ended, and of (endpoint, nonce, chunk indexes)
    withdrawn, from whatever thread noticed first.
    """

    def __init__(
        self,
        fetch: Fetch,
        *,
        devices: Sequence[int] = (),
        timeout: float = 5.0,
        stock_expiry: float = 40.0,
        endpoints: Sequence[str] = (),
        on_gone: Callable[[str, str, frozenset[int] | None], None] = lambda endpoint, nonce, chunks: None,
    ) -> None:
        self._fetch = fetch
        self._devices = tuple(devices)
        self._timeout = timeout
        self._stock = StockHistory(stock_expiry)
        self._endpoints = tuple(endpoints)
        self._on_gone = on_gone
        self._lock = threading.Lock()
        self._bound: dict[str, Binding] = {}
        self._pending: dict[str, Future[Binding]] = {}
        self._refused: dict[str, tuple[float, EgmError]] = {}
        self._watcher = Watcher(self._noticed)
        self._closed = False

    def get(self, endpoint: str) -> Binding:
        """The binding of the incarnation behind ``endpoint``; an outdated or dead one is made anew.

        Raises `ProviderGone` when nobody answers and `Unreachable` when its memory cannot be reached from here.
        """
        binding = self.at_hand(endpoint)
        if binding is not None:
            return binding
        with self._lock:
            refused = self._refused.get(endpoint)
            if refused is not None and time.monotonic() < refused[0]:
                raise refused[1]
            future = self._pending.get(endpoint)
            mine = future is None
            if future is None:
                future = self._pending[endpoint] = Future()
        if not mine:
            try:
                return future.result(self._timeout * 3)
            except FutureTimeout:
                raise ProviderGone("binding it takes too long", where=endpoint, hint="try again") from None
        try:
            fresh = self._bind(endpoint)
        except BaseException as error:
            with self._lock:
                del self._pending[endpoint]
                if isinstance(error, EgmError):
                    while len(self._refused) > 1024:
                        del self._refused[next(iter(self._refused))]
                    life = _REFUSAL_LIFE if isinstance(error, Unreachable) else 0.05
                    self._refused[endpoint] = (time.monotonic() + life, error)
            self.forget(endpoint)
            future.set_exception(error if isinstance(error, Exception) else ProviderGone("interrupted", where=endpoint))
            raise
        with self._lock:
            closed, old = self._closed, self._bound.get(endpoint)
            if not closed:
                self._bound[endpoint] = fresh
            self._refused.pop(endpoint, None)
            del self._pending[endpoint]
        if closed:  # meanwhile: nobody would end it any more
            self._end(fresh)
            late = StoreClosed("the store was closed", where=endpoint)
            future.set_exception(late)
            raise late
        if old is not None and old.watch is not fresh.watch:
            self._end(old)
        future.set_result(fresh)
        return fresh

    def at_hand(self, endpoint: str) -> Binding | None:
        """As `get`, when nothing has to be asked."""
        binding = self._bound.get(endpoint)
        return binding if binding is not None and not binding.outdated and self._usable(binding) else None

    def known(self) -> list[Binding]:
        """The incarnations bound now."""
        with self._lock:
            return list(self._bound.values())

    def largest_chunk(self) -> int:
        """Bytes of the largest chunk that is bound; 0 when none is."""
        return max((chunk.length for each in self.known() for chunk in each.descriptor.buffers), default=0)

    def segment_names(self) -> tuple[str, ...]:
        """The Master's names of the chunks that are bound, or were named when connecting: hints where to place."""
        for endpoint in self._endpoints:
            with suppress(EgmError):
                self.get(endpoint)
        names: list[str] = []
        for binding in self.known():
            if binding.descriptor.egm is not None and binding.exclusive:
                chunks = binding.descriptor.egm.chunks
                names += [f"{binding.endpoint}/numa{chunk.numa_node}/{chunk.index}" for chunk in chunks]
        return tuple(names[:1024])

    def forget(self, endpoint: str) -> None:
        """Bind anew the next time."""
        with self._lock:
            old = self._bound.pop(endpoint, None)
        if old is not None:
            self._end(old)

    def confirm(self, binding: Binding, used: Sequence[ChunkAt]) -> bool:
        """Whether the bound incarnation is alive and still has these chunks: without waiting where it can be watched,
        by asking its endpoint again where it cannot."""
        if binding.watch is not None:
            if not self._usable(binding):
                return False
            return not any(chunk.number in binding.watch.withdrawn for chunk in used)
        try:
            return binding.same_as(self._fetch(binding.endpoint), used)
        except EgmError:
            return False

    def map_chunk(self, binding: Binding, chunk: ChunkAt) -> Mapping:
        """Import a chunk of the bound incarnation."""
        if binding.kind == "cuda-fabric":
            buffer = binding.descriptor.covering(chunk.base, chunk.nbytes)
            if buffer is None:
                raise StaleAllocation("the chunk is no longer published", where=binding.endpoint)
            share = Share("cuda-fabric", chunk.numa_node, chunk.nbytes, fabric=buffer.handle)
            return import_share(share, devices=self._devices)
        egm = binding.descriptor.egm
        if egm is None:
            raise Unreachable("no control socket is known", where=binding.endpoint)
        share = export(egm.socket, chunk.number, binding.nonce, chunk.base, chunk.nbytes, self._timeout)
        try:
            return import_share(share, devices=self._devices)
        finally:
            if share.fd is not None:
                os.close(share.fd)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for binding in self.known():
            self.forget(binding.endpoint)
        self._watcher.close()

    def _usable(self, binding: Binding) -> bool:
        if binding.watch is None:
            return True  # asked again after the copy
        alive = binding.watch.alive()
        if not alive or len(binding.watch.withdrawn) != binding.told:
            self._noticed(binding)
        return alive

    def _bind(self, endpoint: str) -> Binding:
        try:
            descriptor = self._fetch(endpoint)
        except EgmError as error:
            raise ProviderGone(f"no descriptor: {error.message}", where=endpoint, hint=error.hint) from error
        egm = descriptor.egm
        if egm is None:
            if descriptor.protocol != "nvlink":
                raise Unreachable(
                    f"memory of another client, offered over {descriptor.protocol or 'no protocol'} only",
                    where=endpoint,
                    hint="only segments of egmctl pools, and nvlink segments with fabric handles, are reached directly",
                )
            self._needs_gpu(endpoint, "cuda-fabric")
            sure = self._stock.note(endpoint, descriptor)
            return Binding(endpoint, descriptor, None, time.monotonic(), exclusive=sure)
        here = egm.host_id == host_id()
        if egm.kind == "cuda-fabric":
            self._needs_gpu(endpoint, egm.kind)
            watch = None
            if here and egm.socket:
                with suppress(ProviderGone, Unreachable):
                    watch = self._watch(endpoint, egm.socket, egm.nonce)
            return self._bound_to(endpoint, descriptor, watch)
        if egm.kind not in ("shm", "cuda-posix"):
            raise Unreachable(f"memory kind {egm.kind!r} is unknown here", where=endpoint)
        if not here:
            raise Unreachable(
                f"pool {egm.pool!r} ({egm.kind}) is on another host, and only processes of that host reach it",
                where=endpoint,
                hint="use it through Mooncake's Transfer Engine, or provide the pool as cuda-fabric",
            )
        if egm.kind == "cuda-posix":
            self._needs_gpu(endpoint, egm.kind)
        return self._bound_to(endpoint, descriptor, self._watch(endpoint, egm.socket, egm.nonce))

    def _bound_to(self, endpoint: str, descriptor: SegmentDescriptor, watch: Watch | None) -> Binding:
        binding = Binding(endpoint, descriptor, watch, time.monotonic())
        if watch is not None:
            self._watcher.add(binding)
        return binding

    def _needs_gpu(self, endpoint: str, kind: str) -> None:
        if not self._devices:
            raise Unreachable(
                f"{kind} memory is imported through CUDA, and this store was opened without a GPU",
                where=endpoint,
                hint="connect with devices=[...]",
            )

    def _watch(self, endpoint: str, path: str, nonce: str) -> Watch:
        old = self._bound.get(endpoint)
        if old is not None and old.nonce == nonce and old.watch is not None and old.watch.alive():
            return old.watch
        watch = Watch(path, self._timeout)
        if watch.nonce != nonce:
            watch.close()
            raise StaleAllocation(
                "the endpoint and the control socket belong to different incarnations of the agent",
                where=endpoint,
                hint="the provider is being restarted; ask again",
            )
        return watch

    def _noticed(self, binding: Binding) -> None:
        watch = binding.watch
        if watch is None:
            return
        if watch.alive():
            withdrawn = frozenset(watch.withdrawn)
            if len(withdrawn) != binding.told:
                binding.told = len(withdrawn)
                self._on_gone(binding.endpoint, binding.nonce, withdrawn)
            return
        with self._lock:
            if self._bound.get(binding.endpoint) is binding:
                del self._bound[binding.endpoint]
        self._end(binding)

    def _end(self, binding: Binding) -> None:
        if binding.watch is not None:
            self._watcher.remove(binding.watch)
            binding.watch.close()
        self._on_gone(binding.endpoint, binding.nonce, None)
