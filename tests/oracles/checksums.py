"""The checksum of a tensor's words, in Python's whole numbers."""

from __future__ import annotations

from collections.abc import Sequence

BLOCK = 65536
MASK = 2**64 - 1


def splitmix64(n: int) -> int:
    """The n-th output, from 1, of splitmix64 started at 0 (its reference code is public domain)."""
    z = (0x9E3779B97F4A7C15 * n) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def key(place: int) -> int:
    return splitmix64(place + 1) | 1


def checksum(words: Sequence[int]) -> int:
    """The sum over words of word x key of its place in its block x key of its block, modulo 2**64; signed."""
    total = 0
    for i, word in enumerate(words):
        total += word * key(i % BLOCK) * key(BLOCK + i // BLOCK)
    return (total + 2**63) % 2**64 - 2**63
