"""What clip rules share that remember nothing."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Stateless"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


class Stateless:
    """A clip rule without state. By itself it leaves all gradients alone: some rules act elsewhere."""

    __slots__ = ()

    def init(self, n_tensors: int, *, xp: Namespace, device: Any = None) -> tuple[Array, ...]:
        """No state."""
        return ()

    def multiplier(
        self, state: tuple[Array, ...], norms: Array, total: Array, *, applied: Array, xp: Namespace
    ) -> tuple[Array, tuple[Array, ...]]:
        """1, and no state."""
        return xp.ones_like(total), state
