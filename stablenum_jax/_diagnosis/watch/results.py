"""Which values in the result of a watched call are not finite, and which of them could matter to training."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from stablenum.diagnosis.watch.frames import raised_by_a_signal
from stablenum.guard.decide import GuardState
from stablenum.guard.reasons import Reason
from stablenum_jax._diagnosis.replay.flags import CLEAN, Flags, flags_of
from stablenum_jax._diagnosis.replay.jax_internals import any_equation, parts_of, scan_counts
from stablenum_jax._diagnosis.watch.trees import Tree
from stablenum_jax._trees.state import GuardOptState

__all__ = ["Suspicion", "floating_leaves", "mark", "metrics_among", "named", "suspicion", "without"]

_jvp, _make_jaxpr = jax.jvp, jax.make_jaxpr
_MARK = "stablenum: needed"


class Suspicion(NamedTuple):
    """What is not finite in a result.

    Attributes:
        nan: positions of leaves with NaN.
        infinite: positions of leaves with an infinity that is probably not a mask or a bound.
        skipped: whether a guard skipped this call's step because it was not finite, other than for what a
            lower loss scale may mend.
    """

    nan: frozenset[int] = frozenset()
    infinite: frozenset[int] = frozenset()
    skipped: bool = False

    @property
    def positions(self) -> frozenset[int]:
        """All suspicious leaves."""
        return self.nan | self.infinite

    @property
    def known_bad(self) -> bool:
        """Whether something is wrong for certain."""
        return bool(self.nan) or self.skipped

    def __bool__(self) -> bool:
        return bool(self.positions) or self.skipped

    def leaving_out(self, positions: Collection[int]) -> Suspicion:
        """Return the rest without these leaves."""
        return Suspicion(self.nan.difference(positions), self.infinite.difference(positions), self.skipped)


def suspicion(result: Tree, arguments: Tree, *, derivative: bool = False) -> Suspicion:
    """Judge the result of a call. This waits for the device.

    Except in a derivative, -inf in an array is usually a mask or the logarithm of a probability of 0; an inf
    that is also among the arguments is usually a bound. A guard's statistics may hold NaN (a loss that it was
    not given) and inf.
    """
    flags = _flags(result)
    high = frozenset(i for i, f in flags.items() if f[1])
    if high and any(f[1] for f in _flags(arguments).values()):
        high = frozenset()
    low = frozenset(i for i, f in flags.items() if f[2] and (derivative or result.leaves[i].ndim == 0))
    return Suspicion(frozenset(i for i, f in flags.items() if f[0]), high | low, _skipped(result, arguments))


def _skipped(result: Tree, arguments: Tree) -> bool:
    """Return whether a guard skipped the step of this call, other than to lower its loss scale."""
    guards = [g.guard for g in _guards_in(result)]
    if not guards:
        return False
    before = [g.guard for g in _guards_in(arguments)]
    counts = [sum(int(np.sum(g.nonfinite_in_a_row)) for g in some) for some in (before, guards)]
    return counts[1] > counts[0] and not any(_may_lower_its_scale(g) for g in guards)


def _may_lower_its_scale(guard: GuardState) -> bool:
    """Return whether a step was skipped for what a lower loss scale may mend: not for its loss."""
    of_loss = np.asarray(guard.recorder.ints)[..., -1, 1] == Reason.NONFINITE_LOSS
    return bool(np.any(np.asarray(guard.loss_scale.scale) > 1.0)) and not np.any(of_loss)


def _guards_in(tree: Tree) -> list[GuardOptState]:
    return [jax.tree.map(lambda at: np.asarray(tree.leaves[at]), guard) for guard in tree.guards]


def named(result: Any, wanted: Collection[str]) -> frozenset[int]:
    """Return the positions of the leaves on whose path one of the names is a key or an attribute."""
    paths, _ = jax.tree_util.tree_flatten_with_path(result)
    return frozenset(i for i, (path, _) in enumerate(paths) if not _keys(path).isdisjoint(wanted))


def _keys(path: tuple[Any, ...]) -> set[str]:
    return {str(getattr(key, "key", getattr(key, "name", ""))) for key in path}


def without(inner: Callable[..., Any], positions: Collection[int]) -> Callable[..., Any]:
    """Return the function with zeros at these leaves of its result."""

    def rest(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten(inner(*args, **kwargs))
        kept = [jnp.zeros_like(leaf) if i in positions else leaf for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(structure, kept)

    return rest


def mark(tree: Any) -> Any:
    """Mark traced losses and gradients, for :func:`metrics_among`."""
    return jax.tree.map(
        lambda x: checkpoint_name(x, _MARK) if isinstance(x, jax.core.Tracer) and _is_floating(x) else x, tree
    )


def metrics_among(
    inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], positions: frozenset[int]
) -> frozenset[int]:
    """Return those leaves of the result that training does not need.

    In a function that differentiates, these are the leaves that depend on no loss and on no gradient, which
    the function marks while it is traced. In any other function, they are the leaves that have no derivative
    with respect to the arguments: an accuracy is a count of comparisons.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if _is_floating(leaf)]
    chosen = sorted(positions)

    def run(*arrays: Any) -> list[Any]:
        given = list(leaves)
        for i, array in zip(at, arrays, strict=True):
            given[i] = array
        again, named = jax.tree.unflatten(structure, given)
        results = jax.tree.leaves(inner(*again, **named))
        return [results[i] for i in chosen]

    arrays = tuple(jnp.asarray(leaves[i]) for i in at)
    try:
        plain = _make_jaxpr(run)(*arrays).jaxpr
        if _has_mark(plain):
            moved = _moved(plain, [False] * len(arrays), carried=False)
        elif not arrays:
            return positions
        else:
            jaxpr = _make_jaxpr(lambda xs, ts: _jvp(run, xs, ts)[1])(arrays, arrays).jaxpr
            moved = _moved(jaxpr, [False] * len(arrays) + [True] * len(arrays), carried=True)
    except Exception as error:  # without an answer, the value is taken to matter
        if raised_by_a_signal(error):
            raise
        return frozenset()
    return frozenset(i for i, m in zip(chosen, moved, strict=True) if not m)


def _moved(jaxpr: Any, given: Sequence[bool], *, carried: bool) -> list[bool]:
    """Return which results depend on the given inputs, or on anything marked.

    Args:
        jaxpr: the program.
        given: for each input, whether it counts.
        carried: whether what one iteration of a scan hands to the next counts there.
    """
    moved = {v for v, moves in zip(jaxpr.invars, given, strict=True) if moves}

    def of(variables: Sequence[Any]) -> list[bool]:
        return [not isinstance(v, core.Literal) and v in moved for v in variables]

    for eqn in jaxpr.eqns:
        outputs = zip(eqn.outvars, _outputs(eqn, of(eqn.invars), carried=carried), strict=True)
        moved.update(v for v, moves in outputs if moves)
    return of(jaxpr.outvars)


def _outputs(eqn: Any, given: list[bool], *, carried: bool) -> list[bool]:
    """Return which outputs of an equation depend on its given inputs, or on anything marked inside it."""
    parts = parts_of(eqn)
    same = [p for p in parts if (len(p.invars), len(p.outvars)) == (len(given), len(eqn.outvars))]
    if len(parts) != 1 or not same:
        return [_is_mark(eqn) or any(given) or any(map(_has_mark, parts))] * len(eqn.outvars)
    found = _moved(same[0], given, carried=carried)
    if eqn.primitive.name == "scan" and carried:
        constants, carry = scan_counts(eqn.params, len(given))
        for _ in range(carry):  # each round moves at least one more, or none at all
            given = [g or (0 <= i - constants < carry and found[i - constants]) for i, g in enumerate(given)]
            found = _moved(same[0], given, carried=carried)
    return found


def _is_mark(eqn: Any) -> bool:
    return eqn.primitive.name == "name" and eqn.params.get("name") == _MARK


def _has_mark(jaxpr: Any) -> bool:
    return any_equation(jaxpr, _is_mark)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, jax.core.Tracer)) and jnp.issubdtype(
        leaf.dtype, jnp.inexact
    )


def floating_leaves(tree: Tree) -> list[tuple[int, jax.Array]]:
    """Return the floating-point arrays outside guards, with their positions."""
    own = {i for guard in tree.guards for i in jax.tree.leaves(guard)}
    return [(i, leaf) for i, leaf in tree.arrays if i not in own] if own else tree.arrays


def _flags(tree: Tree) -> dict[int, Flags]:
    """Return, by the position of each leaf that is not finite, whether it holds any NaN, inf and -inf."""
    sizes = tree.magnitudes
    doubtful = [(i, x) for i, x in floating_leaves(tree) if i not in sizes or not math.isfinite(sizes[i])]
    flags = [(i, flags_of(leaf)) for i, leaf in doubtful]
    return {i: found for i, found in flags if found != CLEAN}
