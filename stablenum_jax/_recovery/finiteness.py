"""Which leaves of a state are not finite: one compiled pass over the arrays on devices, and one wait."""

from __future__ import annotations

import cmath
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from stablenum.checkpoints.finiteness import Kind, NonFinite
from stablenum.checkpoints.masks import may_be_mask
from stablenum.diagnosis.audit import OPTAX_STATES
from stablenum_jax._recovery.trees import leaves_of
from stablenum_jax._trees.leaves import is_floating
from stablenum_jax._trees.state import is_guard

__all__ = ["nonfinite"]

PyTree: TypeAlias = Any


def nonfinite(tree: PyTree) -> list[NonFinite]:
    """Return the leaves that are not finite. Guards' states, which hold inf on purpose, are left out."""
    records = _records(tree)
    named = [(name, leaf) for _, name, leaf in leaves_of(tree) if not is_guard(leaf)]
    numbers = [(name, x) for name, x in named if isinstance(x, (float, complex)) and not hasattr(x, "dtype")]
    found = [_of_number(name, x) for name, x in numbers if not cmath.isfinite(x)]
    arrays = [(name, x) for name, x in named if hasattr(x, "dtype") and is_floating(x) and x.size]
    flags = _flags([x for _, x in arrays])
    return found + [
        _of_array(name, x, id(x) in records) for (name, x), bad in zip(arrays, flags, strict=True) if bad
    ]


def _records(tree: PyTree) -> set[int]:
    """Return the ids of the scalars that states of optax hold beside their moments.

    The best loss of a plateau or the value of a line search is inf at first.
    """
    found: set[int] = set()

    def look(node: Any) -> bool:
        if type(node).__module__.startswith("optax") and hasattr(node, "_fields"):
            moments = OPTAX_STATES.get(type(node).__name__, ("", {}))[1]
            fields = zip(node._fields, node, strict=True)
            found.update(
                id(x) for name, x in fields if name not in moments and getattr(x, "shape", None) == ()
            )
        return is_guard(node)

    jax.tree.leaves(tree, is_leaf=look)
    return found


def _flags(arrays: Sequence[Any]) -> list[bool]:
    """Return for each array whether it holds NaN or inf."""
    flags = [False] * len(arrays)
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        if isinstance(x, jax.Array):
            groups.setdefault(frozenset(x.sharding.device_set), []).append(i)
        else:
            flags[i] = not bool(np.isfinite(_wide(np.asarray(x))).all())
    # All groups are started before the first is waited for.
    started = [(places, _bad([arrays[i] for i in places])) for places in groups.values()]
    for places, bad in started:
        for i, flag in zip(places, np.asarray(bad), strict=True):
            flags[i] = bool(flag)
    return flags


@jax.jit
def _bad(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([~jnp.isfinite(x).all() for x in arrays])


@jax.jit
def _counted(x: jax.Array) -> jax.Array:
    """Return how many numbers are NaN, inf, -inf, and whether the others are 0; a complex one is two."""
    parts = jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x
    zero = jnp.where(jnp.isfinite(parts), parts == 0, True).all()
    return jnp.stack([jnp.isnan(parts).sum(), (parts == jnp.inf).sum(), (parts == -jnp.inf).sum(), zero])


def _of_array(name: str, x: Any, record: bool) -> NonFinite:
    values = x if isinstance(x, jax.Array) else jnp.asarray(_wide(np.asarray(x)))
    nan, plus, minus, zero = (int(n) for n in np.asarray(_counted(values)))
    mask = may_be_mask(name.removesuffix(".value"))  # flax.nnx wraps each array in a node
    kind: Kind = "number" if record else "buffer" if mask else "array"
    size = x.size * (2 if jnp.iscomplexobj(x) else 1)
    return NonFinite(name, kind, nan, plus, minus, size, dimensions=x.ndim, others_zero=bool(zero))


def _of_number(name: str, x: complex) -> NonFinite:
    parts = (x.real, x.imag)
    counts = (sum(map(cmath.isnan, parts)), parts.count(cmath.inf), parts.count(-cmath.inf))
    return NonFinite(name, "number", *counts, size=1)


def _wide(x: np.ndarray) -> np.ndarray:
    """Return an array of a format that NumPy knows, with the same values."""
    return x if x.dtype.kind in "fc" and x.dtype.isbuiltin == 1 else x.astype(np.float32)
