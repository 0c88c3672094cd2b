"""The arguments or the result of a watched call: flattened once, with what follows from the structure alone
kept from the last such call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from stablenum_jax._diagnosis.watch.magnitudes import magnitudes_of
from stablenum_jax._trees.state import GuardOptState, numbered_guards

__all__ = ["Tree"]

T = TypeVar("T")
# More structures than this are not kept. Chosen: a script calls few functions, with few structures each.
_MOST = 1024


class Tree:
    """A pytree.

    Args:
        value: the tree.

    Attributes:
        value: the tree.
        leaves: its leaves.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.leaves, self._structure = jax.tree.flatten(value)

    @property
    def traced(self) -> bool:
        """Whether a trace of JAX runs, as the leaves show."""
        return any(issubclass(kind, jax.core.Tracer) for kind in set(map(type, self.leaves)))

    @cached_property
    def guards(self) -> list[GuardOptState]:
        """The guards' states, with the positions of their leaves in place of these."""
        return self.kept(numbered_guards)

    @cached_property
    def arrays(self) -> list[tuple[int, jax.Array]]:
        """The floating-point arrays, with their positions."""
        return [
            (i, leaf)
            for i, leaf in enumerate(self.leaves)
            if isinstance(leaf, jax.Array) and _is_inexact(leaf.dtype)
        ]

    @cached_property
    def magnitudes(self) -> dict[int, float]:
        """The largest magnitude in each real array that is not empty, by its position. The host may wait."""
        return magnitudes_of(self.leaves)

    def kept(self, find: Callable[[Any], T]) -> T:
        """Return what is found in the tree, which depends on its structure alone."""
        try:
            found = _found.get((find, self._structure))
        except (TypeError, ValueError):  # the structure holds what cannot be compared
            return find(self.value)
        if found is None:
            if len(_found) >= _MOST:
                _found.clear()
            found = _found[find, self._structure] = find(self.value)
        return found


_found: dict[tuple[Callable[[Any], Any], Any], Any] = {}


@lru_cache(maxsize=64)
def _is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))
