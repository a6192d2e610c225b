"""The sums of a plan: alignment, even shares, chunks. Integers in, integers out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm

from egmctl.units import MIB

__all__ = ["DESCRIPTOR_LIMIT", "SLAB", "alignment_of", "cut", "descriptor_bytes", "shares"]

SLAB = 16 * MIB  # Mooncake's `cachelib` allocator takes segments in multiples of its slab

DESCRIPTOR_LIMIT = 1 << 20  # a stock reader of the handshake refuses longer messages
# A buffer (name, address, length, 128 hex digits for nvlink) with the longest numbers that can occur; for tcp its name
# is the endpoint's, of up to 110 characters. The part of our own lists runs of chunks, a handful for any pool.
_BUFFER = {"nvlink": 215, "tcp": 180}
_REST = 4096


def alignment_of(granularities: Iterable[int]) -> int:
    """The unit of a pool: the least common multiple of the slab and every node's granularity."""
    return lcm(SLAB, *granularities)


def shares(units: int, nodes: Sequence[int]) -> dict[int, int]:
    """Units spread evenly over ``nodes`` (ascending), the lowest ids taking the remainder."""
    each, rest = divmod(units, len(nodes))
    return {node: each + (1 if position < rest else 0) for position, node in enumerate(sorted(nodes))}


def cut(nbytes: int, largest: int) -> list[int]:
    """One node's share in full-size chunks and one rest."""
    full, rest = divmod(nbytes, largest)
    return [largest] * full + ([rest] if rest else [])


def descriptor_bytes(protocol: str, chunks: int) -> int:
    """An upper bound of the length of the descriptor of so many chunks."""
    return _REST + chunks * _BUFFER[protocol]
