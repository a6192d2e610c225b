"""What the copies of a store were really asked to do, counted: it shows that nothing is staged, for `verify`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

from egmctl.consumer.buffers import Buffers
from egmctl.consumer.errors import InvalidBuffer
from egmctl.consumer.host_copy import Completion, Copier, Fragment
from egmctl.consumer.mappings import MappingCache

__all__ = ["Audit", "AuditedCopier"]


class Audit:
    """``direct``: bytes copied between a registered buffer and an imported chunk, in one step. ``other``: bytes of
    which an end was neither, as that of a staging buffer would be."""

    def __init__(self, buffers: Buffers, mappings: MappingCache) -> None:
        self._buffers = buffers
        self._mappings = mappings
        self._lock = threading.Lock()
        self.direct = 0
        self.other = 0

    def note(self, fragments: Sequence[Fragment]) -> None:
        """Called ahead of each copy."""
        chunks = self._mappings.ranges()
        for destination, source, nbytes in fragments:
            ends = {self._is(destination, nbytes, chunks), self._is(source, nbytes, chunks)}
            with self._lock:
                if ends == {"buffer", "chunk"}:
                    self.direct += nbytes
                else:
                    self.other += nbytes

    def _is(self, address: int, nbytes: int, chunks: Sequence[tuple[int, int]]) -> str:
        if any(start <= address and address + nbytes <= end for start, end in chunks):
            return "chunk"
        with suppress(InvalidBuffer):
            self._buffers.find(address, nbytes)
            return "buffer"
        return ""


class AuditedCopier:
    """A copier whose copies are noted before they begin."""

    def __init__(self, inner: Copier, audit: Audit) -> None:
        self._inner = inner
        self._audit = audit

    def copy(
        self, fragments: Sequence[Fragment], *, device: int | None = None, stream: int | None = None
    ) -> Completion:
        self._audit.note(fragments)
        return self._inner.copy(fragments, device=device, stream=stream)

    def close(self) -> None:
        closer = getattr(self._inner, "close", None)
        if closer is not None:
            closer()
