"""What is bad in the state of a training: numbers that are not finite, and negative second moments.

All leaves are counted on their devices, in one compiled pass for each set of devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from stablenum.recovery.loop import Finding
from stablenum.recovery.symptoms import SymptomCode
from stablenum_jax._diagnosis.optax_states import find_groups
from stablenum_jax._trees.leaves import is_floating, wide_dtype
from stablenum_jax._trees.names import known_names, path_name
from stablenum_jax._trees.state import find_guard, is_guard

__all__ = ["Findings"]

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any


class Findings:
    """Looks for bad numbers in states that are like a first one.

    What is not finite in the first state, such as a mask of -inf, is so on purpose.

    Args:
        state: the first state.
    """

    def __init__(self, state: PyTree) -> None:
        self._usual = {path: count for path, count in _counted(_nonfinite, _watched(state)) if count}

    def of(self, state: PyTree, *, audit: bool) -> list[Finding]:
        """Return what is bad in a state; second moments are looked at if ``audit`` is true."""
        found = []
        counts = _counted(_nonfinite, _watched(state))
        bad = [path for path, count in counts if count > self._usual.get(path, 0)]
        if bad:
            detail = f"{_entries(len(bad))} of the state hold numbers that are not finite"
            found.append(Finding(SymptomCode.NONFINITE_STATE, detail, _shown(bad, state)))
        negative = (
            [name for name, count in _counted(_negative, _second_moments(state)) if count] if audit else []
        )
        if negative:
            detail = "second moments are negative, so that their roots are NaN"
            found.append(Finding(SymptomCode.POISONED_MOMENTS, detail, tuple(dict.fromkeys(negative))))
        return found


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


# --- what is looked at -------------------------------------------------------------------------


def _watched(state: PyTree) -> list[tuple[str, Any]]:
    """Return the floating-point arrays of a state with their paths, each array once; the guard's are left
    out, as its record may hold infinities."""
    found: dict[int, tuple[str, Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_guard):
        if _is_floating_array(leaf):
            found.setdefault(id(leaf), (path_name(path), leaf))
    return list(found.values())


def _second_moments(state: PyTree) -> list[tuple[str, Any]]:
    """Return the second moments of an optimizer that is known, with the names of their parameters."""
    return [
        (group.parameter, part.leaf)
        for group in find_groups(state, frozenset())
        for part in group.parts
        if part.role.squared and _is_floating_array(part.leaf)
    ]


def _is_floating_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray)) and is_floating(leaf)


# --- counting ----------------------------------------------------------------------------------


def _counted(count: Any, named: Sequence[tuple[str, Any]]) -> list[tuple[str, int]]:
    """Return the names with the counts of their arrays."""
    on: dict[Any, list[tuple[str, Any]]] = {}
    for name, leaf in named:
        on.setdefault(_devices(leaf), []).append((name, leaf))
    started = [([name for name, _ in part], count([leaf for _, leaf in part])) for part in on.values()]
    return [
        (name, int(number))
        for names, counts in started
        for name, number in zip(names, jax.device_get(counts), strict=True)
    ]


def _devices(leaf: Any) -> frozenset[Any]:
    return frozenset(leaf.sharding.device_set) if isinstance(leaf, jax.Array) else frozenset()


@jax.jit
def _nonfinite(leaves: list[Array]) -> list[Array]:
    return [jnp.sum(~jnp.isfinite(_wide(leaf)), dtype=jnp.int32) for leaf in leaves]


@jax.jit
def _negative(leaves: list[Array]) -> list[Array]:
    return [jnp.sum(jnp.real(_wide(leaf)) < 0, dtype=jnp.int32) for leaf in leaves]


def _wide(leaf: Array) -> Array:
    return leaf.astype(wide_dtype(leaf.dtype))


# --- names -------------------------------------------------------------------------------------


def _shown(paths: Iterable[str], state: PyTree) -> tuple[str, ...]:
    """Return the names that users know: ``w`` or ``nu.w``, rather than ``0.w`` and ``1.1.0.nu.w``."""
    names = set(known_names(int(find_guard(state).names_id)) or ())
    paths = list(paths)
    short = [_short(path, names) for path in paths]
    return tuple(path if short.count(name) > 1 else name for path, name in zip(paths, short, strict=True))


def _short(path: str, names: set[str]) -> str:
    """Leave out the numbers in front of a parameter's name, or the first one where there is none."""
    parts = path.split(".")
    for i in range(len(parts)):
        name = ".".join(parts[i:])
        if name in names:
            return ".".join([*(part for part in parts[:i] if not part.isdigit()), name])
    return re.sub(r"^\d+\.(?=.)", "", path)
