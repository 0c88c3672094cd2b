"""Which leaves of a state are not finite: one compiled pass over the arrays on devices, and one wait."""

from __future__ import annotations

import cmath
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from stablenum.checkpoints.finiteness import Kind, NonFinite
from stablenum.checkpoints.names import (
    in_optimizer,
    is_record,
    is_setting,
    is_training,
    kind_of_number,
    may_be_mask,
)
from stablenum.diagnosis.audit import OPTAX_STATES
from stablenum_jax._recovery.trees import leaves_of
from stablenum_jax._trees.leaves import is_floating
from stablenum_jax._trees.state import is_guard

__all__ = ["nonfinite"]

PyTree: TypeAlias = Any


def nonfinite(tree: PyTree) -> list[NonFinite]:
    """Return the leaves that are not finite. Guards' states, which hold inf on purpose, are left out."""
    records = _records(tree)
    named = [(keys, leaf) for keys, _, leaf in leaves_of(tree) if not is_guard(leaf)]
    in_training = is_training([keys for keys, _ in named])
    numbers = [(keys, x) for keys, x in named if isinstance(x, (float, complex)) and not hasattr(x, "dtype")]
    found = [_of_number(keys, x) for keys, x in numbers if not cmath.isfinite(x)]
    arrays = [(keys, x) for keys, x in named if hasattr(x, "dtype") and is_floating(x) and x.size]
    flags = _flags([x for _, x in arrays])
    return found + [
        _of_array(keys, x, _kind(keys, x, records, in_training))
        for (keys, x), bad in zip(arrays, flags, strict=True)
        if bad
    ]


def _kind(keys: Sequence[str], x: Any, records: set[int], in_training: bool) -> Kind:
    if x.size == 1:
        by_name = is_setting(keys) or is_record(keys, beside_model=in_training and len(keys) == 1)
        # What NumPy computes from plain numbers is as plain as they are.
        if by_name or id(x) in records or isinstance(x, np.generic):
            return kind_of_number(keys, optimizer=in_optimizer(keys))
    # flax.nnx wraps each array in a node.
    return "buffer" if may_be_mask(".".join(keys).removesuffix(".value")) else "array"


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


def _of_array(keys: Sequence[str], x: Any, kind: Kind) -> NonFinite:
    values = x if isinstance(x, jax.Array) else jnp.asarray(_wide(np.asarray(x)))
    nan, plus, minus, zero = (int(n) for n in np.asarray(_counted(values)))
    size = x.size * (2 if jnp.iscomplexobj(x) else 1)
    return NonFinite(".".join(keys), kind, nan, plus, minus, size, x.ndim, others_zero=bool(zero))


def _of_number(keys: Sequence[str], x: complex) -> NonFinite:
    parts = (x.real, x.imag)
    counts = (sum(map(cmath.isnan, parts)), parts.count(cmath.inf), parts.count(-cmath.inf))
    kind = kind_of_number(keys, optimizer=in_optimizer(keys))
    return NonFinite(".".join(keys), kind, *counts, size=1)


def _wide(x: np.ndarray) -> np.ndarray:
    """Return an array of a format that NumPy knows, with the same values."""
    return x if x.dtype.kind in "fc" and x.dtype.isbuiltin == 1 else x.astype(np.float32)
