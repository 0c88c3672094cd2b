"""Noise, which shows how a value depends on the rounding of those before it."""

from __future__ import annotations

from typing import Any

import numpy as np

from stablenum.diagnosis.diff.sides.play import MASKED, SEED

__all__ = ["BLOCK", "Noise"]

# Large arrays are gone through in blocks of so many entries, which a processor's nearest cache holds in
# float64: five times as fast as array by array at a million entries.
BLOCK = 2**13

_MASKED = np.float64(MASKED)  # which a narrow format does not hold
# The eight bits of each byte.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)


class Noise:
    """Noise of one size and random signs, the same in every run.

    Args:
        size: relative to what it is added to; 0 for none.
    """

    def __init__(self, size: float) -> None:
        self._size = size
        self._generator = np.random.default_rng(SEED)
        self._factors = 1.0 + size * (2.0 * _BITS - 1.0)

    def __bool__(self) -> bool:
        return bool(self._size)

    def sign(self) -> int:
        """Return 1 or -1."""
        return int(self._generator.integers(0, 2)) * 2 - 1

    def add_to(self, array: Any) -> None:
        """Make each entry of an array larger or smaller by the size of the noise, in place. Entries that are
        masked or not finite stay as they are.

        Args:
            array: of floating-point or complex numbers, which lie in memory in their order.

        Example:
            >>> x = np.asarray([8.0, -1e30, np.nan])
            >>> Noise(0.25).add_to(x)
            >>> abs(x[0] - 8.0).item(), x[1:].tolist()
            (2.0, [-1e+30, nan])
        """
        flat = array.reshape(-1, copy=False)
        drawn = np.frombuffer(self._generator.bytes(-(-flat.size // 8)), np.uint8)
        for begin in range(0, flat.size, BLOCK):
            part = flat[begin : begin + BLOCK]
            factors = self._factors.take(drawn[begin // 8 : (begin + BLOCK) // 8], axis=0).reshape(-1)
            factors = factors[: part.size]
            if not np.abs(part).max() < _MASKED:
                factors[~(np.abs(part) < _MASKED)] = 1.0
            part[...] = part * factors
