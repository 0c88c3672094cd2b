"""What is bad in the state of a training: numbers that are not finite; and what is measured of parameters.

All leaves are counted on their devices, in one compiled pass for each set of devices.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from stablenum.diagnosis.audit import Role
from stablenum.recovery.parameters import Measures
from stablenum.recovery.symptoms import Finding, SymptomCode
from stablenum_jax._diagnosis.optax_states import find_groups
from stablenum_jax._trees.leaves import is_floating, wide_dtype
from stablenum_jax._trees.names import Path, known_names, path_name
from stablenum_jax._trees.state import find_guard, is_guard

__all__ = ["Findings", "buffers_in", "devices_of", "norms"]

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any
_Key = TypeVar("_Key")


class Findings:
    """Looks for bad numbers in states that are like a first one.

    What is not finite in the first state, such as a mask of -inf, is so on purpose.

    Args:
        state: the first state.
    """

    def __init__(self, state: PyTree) -> None:
        self._usual = {path: count for (path, _), count in _counted(_nonfinite, _watched(state)) if count}

    def poisoned_at_first(self, state: PyTree) -> tuple[str, ...]:
        """Return the names of the parameters, and of what is kept for them, that are NaN."""
        parameters = _parameters(state)
        bad = [(path, leaf) for (path, leaf), count in _counted(_nan, _watched(state)) if count]
        return _shown([one for one in bad if _divided(path_name(one[0]), parameters)[1]], state)

    def of(self, state: PyTree) -> list[Finding]:
        """Return what is not finite in a state."""
        counts = _counted(_nonfinite, _watched(state))
        bad = [(path, leaf) for (path, leaf), count in counts if count and count > self._usual.get(path, 0)]
        if not bad:
            return []
        are = "1 array of the state is" if len(bad) == 1 else f"{len(bad)} arrays of the state are"
        return [Finding(SymptomCode.NONFINITE_STATE, f"{are} not finite", _shown(bad, state))]

    def measures(self, state: PyTree) -> dict[str, Measures]:
        """Return what is measured of each parameter; no moments if the optimizer is not known."""
        found = {name: Measures(norm) for (name, _), norm in _counted(norms, _trained(state))}
        for (name, _), lowest in _counted(_lowest, _never_negative(state)):
            known = found.get(name, Measures(0.0))
            found[name] = known._replace(lowest=min(known.lowest, lowest))
        pairs: Any = _counted(_measured, _pairs_of_moments(state))
        for (name, _), (second, ratio) in pairs:
            known = found.get(name, Measures(0.0))
            found[name] = known._replace(second=max(known.second, second), ratio=max(known.ratio, ratio))
        return found


# --- what is looked at -------------------------------------------------------------------------


def _watched(state: PyTree) -> list[tuple[Path, Any]]:
    """Return the floating-point arrays of a state with their paths, each array once; the guard's are left
    out, as its record may hold infinities."""
    found: dict[int, tuple[Path, Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_guard):
        if _is_floating_array(leaf):
            found.setdefault(id(leaf), (path, leaf))
    return list(found.values())


def _trained(state: PyTree) -> list[tuple[str, Any]]:
    """Return the parameters, and averages of them, by name; by path where several have one name."""
    parameters, found = _parameters(state), dict[str, list[tuple[str, Any]]]()
    for path, leaf in _outside_optimizers(state):
        name = _divided(path_name(path), parameters)[1]
        if name:
            found.setdefault(name, []).append((path_name(path), leaf))
    return [(name if len(of) == 1 else path, leaf) for name, of in found.items() for path, leaf in of]


def buffers_in(state: PyTree) -> list[tuple[str, Array]]:
    """Return the floating-point arrays that are neither parameters, nor averages of them, nor an optimizer's,
    by name."""
    parameters = _parameters(state)
    held = [(path_name(path), leaf) for path, leaf in _outside_optimizers(state)]
    return [(_short(path, parameters), leaf) for path, leaf in held if not _divided(path, parameters)[1]]


def _outside_optimizers(state: PyTree) -> list[tuple[Path, Any]]:
    """Return the floating-point arrays that are neither beside the guard nor in a state of optax."""
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: is_guard(x) or _is_of_optax(x))
    beside = next((path[:-1] for path, leaf in leaves if is_guard(leaf)), ())  # it may be in one of optax
    return [
        (path, leaf)
        for path, leaf in leaves
        if _is_floating_array(leaf) and not (beside and path[: len(beside)] == beside)
    ]


def _is_of_optax(node: Any) -> bool:
    return isinstance(node, tuple) and type(node).__module__.startswith("optax.")


def _never_negative(state: PyTree) -> list[tuple[str, Any]]:
    """Return the second moments, and the like, of an optimizer that is known, with their parameters."""
    return [
        (group.parameter, part.leaf)
        for group in find_groups(state, frozenset())
        for part in group.parts
        if part.role.squared and _is_floating_array(part.leaf)
    ]


def _pairs_of_moments(state: PyTree) -> list[tuple[str, tuple[Any, Any]]]:
    """Return the first and second moment of each parameter; None for a first one of other gradients."""
    found = []
    for group in find_groups(state, frozenset()):
        of_role = {part.role: part.leaf for part in group.parts if _is_floating_array(part.leaf)}
        second = of_role.get(Role.SECOND)
        if second is not None:
            first = of_role.get(Role.FIRST)
            alike = first is not None and group.kind != "adabelief" and first.shape == second.shape
            found.append((group.parameter, (first if alike else None, second)))
    return found


def _is_floating_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray)) and is_floating(leaf)


# --- counting ----------------------------------------------------------------------------------


def _counted(count: Any, keyed: Sequence[tuple[_Key, Any]]) -> list[tuple[tuple[_Key, Any], int]]:
    """Return keys and arrays with the counts of the arrays; the host waits once for each set of devices.

    In place of an array, there may be a tuple of arrays.
    """
    on: dict[Any, list[tuple[_Key, Any]]] = {}
    for key, leaf in keyed:
        on.setdefault(devices_of(leaf), []).append((key, leaf))
    started = [(pairs, count([leaf for _, leaf in pairs])) for pairs in on.values()]
    return [
        pair for pairs, counts in started for pair in zip(pairs, np.asarray(counts).tolist(), strict=True)
    ]


def devices_of(leaf: Any) -> frozenset[Any]:
    first = jax.tree.leaves(leaf)[0]
    return frozenset(first.sharding.device_set) if isinstance(first, jax.Array) else frozenset()


@jax.jit
def _nonfinite(leaves: list[Array]) -> Array:
    return jnp.stack([jnp.sum(~jnp.isfinite(_wide(leaf)), dtype=jnp.int32) for leaf in leaves])


@jax.jit
def _nan(leaves: list[Array]) -> Array:
    return jnp.stack([jnp.sum(jnp.isnan(_wide(leaf)), dtype=jnp.int32) for leaf in leaves])


@jax.jit
def norms(leaves: list[Array]) -> Array:
    return jnp.stack([jnp.linalg.norm(jnp.abs(_wide(leaf)).ravel()).astype(jnp.float32) for leaf in leaves])


@jax.jit
def _measured(pairs: list[tuple[Array | None, Array]]) -> Array:
    """Return (n, 2) float32: the largest second moments and the largest ratios, as in ``Measures``."""
    return jnp.stack([jnp.stack([_largest(second), _ratio(first, second)]) for first, second in pairs])


def _largest(second: Array) -> Array:
    return jnp.max(jnp.real(_wide(second)), initial=0.0).astype(jnp.float32)


def _ratio(first: Array | None, second: Array) -> Array:
    if first is None:
        return jnp.zeros((), jnp.float32)
    m, v = jnp.abs(_wide(first)), jnp.real(_wide(second))
    floor = 1e-3 if second.dtype == jnp.float16 else 1e10 * float(jnp.finfo(second.dtype).tiny)
    usable = v > floor
    return jnp.max(jnp.where(usable, m / jnp.sqrt(jnp.where(usable, v, 1)), 0), initial=0.0).astype(
        jnp.float32
    )


@jax.jit
def _lowest(leaves: list[Array]) -> Array:
    return jnp.stack([jnp.min(jnp.real(_wide(x)), initial=0.0).astype(jnp.float32) for x in leaves])


def _wide(leaf: Array) -> Array:
    return leaf.astype(wide_dtype(leaf.dtype))


# --- names -------------------------------------------------------------------------------------


def _shown(bad: Sequence[tuple[Path, Any]], state: PyTree) -> tuple[str, ...]:
    """Return the names that users know: ``w`` and ``nu of w``, rather than ``0.w`` and ``1.1.0.nu.w``.

    Args:
        bad: the paths of some leaves, and the leaves.
        state: the state.
    """
    parameters = _parameters(state)
    of_optimizer = {
        id(part.leaf): f"{part.entry} of {group.parameter}"
        for group in find_groups(state, frozenset())
        for part in group.parts
    }
    paths = [path_name(path) for path, _ in bad]
    short = [
        of_optimizer.get(id(leaf)) or _short(path, parameters)
        for path, (_, leaf) in zip(paths, bad, strict=True)
    ]
    return tuple(path if short.count(name) > 1 else name for path, name in zip(paths, short, strict=True))


def _parameters(state: PyTree) -> frozenset[str]:
    return frozenset(known_names(int(find_guard(state).names_id)) or ())


def _short(path: str, parameters: frozenset[str]) -> str:
    """Leave out the numbers in front of a parameter's name, or the first one where there is none."""
    before, name = _divided(path, parameters)
    if not name:
        return re.sub(r"^\d+\.(?=.)", "", path)
    return ".".join([*(part for part in before if not part.isdigit()), name])


def _divided(path: str, parameters: frozenset[str]) -> tuple[list[str], str]:
    """Return what is in front of the parameter's name at the end of a path, and the name; "" for none."""
    parts = path.split(".")
    for i in range(len(parts)):
        name = ".".join(parts[i:])
        if name in parameters:
            return parts[:i], name
    return parts, ""
