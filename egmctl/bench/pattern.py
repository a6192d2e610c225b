"""Bytes that can be made again anywhere from a seed, so that what arrives is compared without being sent twice."""

from __future__ import annotations

import hashlib
import random

__all__ = ["digest", "pattern"]

_BLOCK = 1 << 20


def pattern(seed: str, nbytes: int) -> bytes:
    """``nbytes`` that depend on ``seed`` alone. Past 1 MiB a block repeats with its number written into it, so that
    blocks which changed places are still told apart."""
    block = bytearray(random.Random(seed).randbytes(min(nbytes, _BLOCK)))  # noqa: S311 - a test pattern, no secret
    if nbytes <= _BLOCK:
        return bytes(block)
    pieces = []
    for number in range(-(-nbytes // _BLOCK)):
        block[:8] = number.to_bytes(8, "little")
        pieces.append(bytes(block))
    return b"".join(pieces)[:nbytes]


def digest(data: bytes | bytearray | memoryview) -> str:
    """A checksum that two processes compare."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
