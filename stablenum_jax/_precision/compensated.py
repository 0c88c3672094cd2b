"""Keep updates that are too small for a 16-bit parameter, as the last transformation of an optax chain.

1 - 1e-3 is 1 in bfloat16, so a thousand such steps leave the weight where it was. There are three remedies:
:func:`kahan` keeps what rounding lost, :func:`stochastic_rounding` rounds up or down at random, and
:func:`master_weights` runs the optimizer on float32 copies. All return float32 updates, which
``optax.apply_updates`` (it then adds in float32) and :func:`stablenum_jax.step` turn into the new
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from stablenum._support.settings_checks import check_int
from stablenum.errors import bad_field, bad_type
from stablenum.formats import FLOAT32_MAX
from stablenum.precision.rounding import kahan_add, round_stochastically, round_to_nearest
from stablenum_jax._precision.casts import is_castable
from stablenum_jax._trees.leaves import check_gradients, check_transformation

__all__ = [
    "KahanState",
    "MasterWeightsState",
    "StochasticRoundingState",
    "kahan",
    "master_weights",
    "stochastic_rounding",
]

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any

_NARROW = ("bfloat16", "float16")


class KahanState(NamedTuple):
    """What rounding has lost so far, in each parameter's shape; empty for parameters of other dtypes.

    The compensation of a 16-bit parameter is int16, in units of 2^-16 of the parameter's spacing;
    :func:`stablenum.precision.compensated_value` adds it to the parameter. That of a float32 parameter is
    float32.
    """

    compensation: PyTree


class StochasticRoundingState(NamedTuple):
    """The number of updates so far, () int32, which determines the random bits together with the seed."""

    count: Array


class MasterWeightsState(NamedTuple):
    """Float32 copies of the 16-bit parameters, and the state of the optimizer that runs on them."""

    master: PyTree
    inner: PyTree


def kahan() -> optax.GradientTransformation:
    """Compensate updates: add what rounding a parameter lost to its next update.

    The update is ``y = c + u; w' = round(w + y); c = y - (w' - w)``, computed by
    :func:`stablenum.precision.kahan_add` for bfloat16, float16 and float32 parameters; others pass through.
    The compensation needs as much memory as the parameters, and makes 16-bit parameters as exact as float32.
    Put the transformation last in the chain.

    NaN and inf in an update pass through to the parameter and do not enter the compensation.

    Raises:
        TypeError, ValueError: from ``update``: ``params`` is missing, or the arguments do not fit.

    Example:
        >>> tx = optax.chain(optax.sgd(1e-4), kahan())
        >>> w, state = jnp.ones(1, jnp.bfloat16), tx.init(jnp.ones(1, jnp.bfloat16))
        >>> for _ in range(100):
        ...     updates, state = tx.update(jnp.ones(1, jnp.bfloat16), state, w)
        ...     w = optax.apply_updates(w, updates)
        >>> round(float(w[0]), 2), w.dtype
        (0.99, dtype(bfloat16))
    """

    def init(params: PyTree) -> KahanState:
        return KahanState(_keep(params, (*_NARROW, "float32"), _no_compensation))

    def update(updates: PyTree, state: KahanState, params: PyTree = None) -> tuple[PyTree, KahanState]:
        _check_arguments("kahan", params, updates, state, KahanState)

        def one(w: Any, u: Any, c: Any) -> _Two:
            if not _is_array(u) or isinstance(c, optax.MaskedNode):
                return _Two(u, c)
            moved, rest = kahan_add(w, c, u, xp=jnp)
            step = _difference(moved, w, u)
            if w.dtype == jnp.float32:
                # The float32 difference of two float32 numbers may be off by an ulp, which goes into the
                # compensation. That of two 16-bit numbers, added and rounded, gives exactly ``moved``.
                missed = moved - (w + step)
                rest = jnp.where(jnp.isfinite(missed), rest + missed, rest)
            return _Two(step, rest)

        moved, rest = _split(jax.tree.map(one, params, updates, state.compensation))
        return moved, KahanState(rest)

    return optax.GradientTransformation(init, update)


def stochastic_rounding(seed: int = 0) -> optax.GradientTransformation:
    """Round bfloat16 parameters up or down at random, so that an update is exact on average.

    The rounding is that of :func:`stablenum.precision.round_stochastically`. Parameters of 32 and 64 bits
    pass through. No memory is needed. Put the transformation last in the chain. The same seed gives the same
    run; a skipped step draws no random numbers.

    NaN and inf in an update pass through to the parameter; finite values saturate at bfloat16's largest
    number.

    Args:
        seed: the seed of the random bits, a whole number of 0 or more.

    Raises:
        ValueError: ``seed`` is not a whole number of 0 or more. From ``init``: a parameter is float16. From
            ``update``: ``params`` is missing, or the arguments do not fit one another.

    Example:
        >>> tx = optax.chain(optax.sgd(1e-3), stochastic_rounding(0))
        >>> w = jnp.ones(10_000, jnp.bfloat16)
        >>> updates, state = tx.update(jnp.ones_like(w), tx.init(w), w)
        >>> bool(abs(optax.apply_updates(w, updates).astype(jnp.float32).mean() - 0.999) < 1e-4)
        True
    """
    seed = check_int("seed", seed, at_least=0)

    def init(params: PyTree) -> StochasticRoundingState:
        for leaf in jax.tree.leaves(params):
            if is_castable(leaf) and leaf.dtype == jnp.float16:
                raise ValueError(
                    "stochastic_rounding is for bfloat16 parameters; got a float16 one. Use kahan() or "
                    "master_weights(...), or keep the parameters in bfloat16."
                )
        return StochasticRoundingState(jnp.zeros((), jnp.int32))

    def update(
        updates: PyTree, state: StochasticRoundingState, params: PyTree = None
    ) -> tuple[PyTree, StochasticRoundingState]:
        _check_arguments("stochastic_rounding", params, updates, state, StochasticRoundingState)
        key = jax.random.fold_in(jax.random.key(seed), state.count)
        place = iter(range(len(jax.tree.leaves(params))))

        def one(w: Any, u: Any) -> Any:
            here = jax.random.fold_in(key, next(place))
            if not _is_array(u) or not is_castable(w) or w.dtype != jnp.bfloat16:
                return u
            bits = jax.random.bits(here, w.shape, jnp.uint16).astype(jnp.int32)
            old, added = w.astype(jnp.float32), u.astype(jnp.float32)
            finite = jnp.isfinite(old) & jnp.isfinite(added)
            total = old + added
            total = jnp.where(finite, jnp.clip(total, -FLOAT32_MAX, FLOAT32_MAX), total)
            return _difference(round_stochastically(total, bits, xp=jnp), w, u)

        return jax.tree.map(one, params, updates), StochasticRoundingState(state.count + 1)

    return optax.GradientTransformation(init, update)


def master_weights(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Run an optimizer on float32 copies of 16-bit parameters; each parameter is its copy rounded to nearest.

    Micikevicius et al. 2018 (arXiv 1710.03740). ``inner`` sees float32 gradients and parameters and keeps
    its state in float32. Elements of a parameter that something else has changed (loading a checkpoint), so
    that they are no longer the rounded copy, are copied again. Put the guard first, as in
    ``optax.chain(stablenum_jax.guard(), master_weights(optax.adamw(1e-3)))``.

    NaN and inf pass through to the copy and the parameter.

    Args:
        inner: the optimizer.

    Raises:
        TypeError, ValueError: from ``update``: ``params`` is missing, or the arguments do not fit.

    Example:
        >>> tx = master_weights(optax.sgd(1e-4))
        >>> w = jnp.ones(1, jnp.bfloat16)
        >>> state = tx.init(w)
        >>> for _ in range(100):
        ...     updates, state = tx.update(jnp.ones_like(w), state, w)
        ...     w = optax.apply_updates(w, updates)
        >>> state.master.dtype, round(float(state.master[0]), 4), round(float(w[0]), 2)
        (dtype('float32'), 0.99, 0.99)
    """
    check_transformation("inner", inner)
    wide = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> MasterWeightsState:
        master = _keep(params, _NARROW, lambda leaf: leaf.astype(jnp.float32))
        return MasterWeightsState(master, wide.init(jax.tree.map(_master_or_own, params, master)))

    def update(
        updates: PyTree, state: MasterWeightsState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, MasterWeightsState]:
        _check_arguments("master_weights", params, updates, state, MasterWeightsState)
        master = jax.tree.map(_in_step, params, state.master)
        grads = jax.tree.map(_widened, params, updates, master)
        steps, inner_state = wide.update(
            grads, state.inner, jax.tree.map(_master_or_own, params, master), **extra
        )

        def one(w: Any, u: Any, m: Any) -> _Two:
            if not _is_array(u) or isinstance(m, optax.MaskedNode):
                return _Two(u, m)
            moved = (m + u).astype(jnp.float32)
            return _Two(_difference(round_to_nearest(moved, w.dtype.name, xp=jnp), w, u), moved)

        steps, master = _split(jax.tree.map(one, params, steps, master))
        return steps, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


class _Two:
    """Two results of one leaf; the pair is itself a leaf."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


def _split(tree: PyTree) -> tuple[PyTree, PyTree]:
    return jax.tree.map(lambda two: two.first, tree), jax.tree.map(lambda two: two.second, tree)


def _is_array(update: Any) -> bool:
    """Return whether ``update`` is an array to apply: neither None, nor float0, nor a masked node."""
    return hasattr(update, "dtype") and update.dtype != jax.dtypes.float0


def _keep(params: PyTree, dtypes: tuple[str, ...], make: Callable[[Array], Array]) -> PyTree:
    """Return an array for each floating-point parameter of these dtypes, a masked node for the others."""

    def one(leaf: Any) -> Any:
        kept = is_castable(leaf) and leaf.dtype.name in dtypes
        return make(jnp.asarray(leaf)) if kept else optax.MaskedNode()

    return jax.tree.map(one, params)


def _no_compensation(w: Array) -> Array:
    return jnp.zeros_like(w, dtype=jnp.float32 if w.dtype == jnp.float32 else jnp.int16)


def _check_arguments(name: str, params: PyTree, updates: PyTree, state: Any, kind: type[Any]) -> None:
    """Check that the arguments of an update fit one another. Values are not read.

    Raises:
        TypeError: ``state`` is not of the kind, or an update holds whole numbers.
        ValueError: ``params`` is missing; or ``updates`` or what the state keeps for each parameter is
            another tree, or has another shape.
    """
    if params is None:
        hint = "The update depends on the parameters."
        raise bad_field("params", f"given to the update of {name}", params, hint=hint)
    if not isinstance(state, kind):
        raise bad_type("state", f"a {kind.__name__}, as init(params) of {name} returns it", state)
    _check_tree("updates", updates, params)
    check_gradients(updates, params, "updates")
    if kind is not StochasticRoundingState:
        hint = "Make it with init(params)."
        _check_tree(f"state.{kind._fields[0]}", getattr(state, kind._fields[0]), params, hint)


def _check_tree(name: str, tree: PyTree, params: PyTree, hint: str = "") -> None:
    places, structure = jax.tree_util.tree_flatten_with_path(params)
    try:
        parts = structure.flatten_up_to(tree)
    except (TypeError, ValueError):
        got = jax.tree.structure(tree)
        raise ValueError(
            f"{name} must be a tree like params, {structure}; got {got}. {hint}".rstrip()
        ) from None
    for (path, leaf), part in zip(places, parts, strict=True):
        if _is_array(part) and jnp.shape(part) != jnp.shape(leaf):
            where = f"{name}{jax.tree_util.keystr(path)}"
            allowed = f"of its parameter's shape {jnp.shape(leaf)}"
            raise ValueError(f"{where} must be {allowed}; got {jnp.shape(part)}. {hint}".rstrip())


def _master_or_own(param: Any, master: Any) -> Any:
    return param if isinstance(master, optax.MaskedNode) else master


def _widened(param: Any, grad: Any, master: Any) -> Any:
    return grad if isinstance(master, optax.MaskedNode) or not _is_array(grad) else grad.astype(jnp.float32)


def _in_step(param: Any, master: Any) -> Any:
    """Return the copy or, where the parameter is no longer the rounded copy, the parameter."""
    if isinstance(master, optax.MaskedNode):
        return master
    wide = param.astype(jnp.float32)
    same = round_to_nearest(master, param.dtype.name, xp=jnp) == wide
    return jnp.where(same, master, wide)


def _difference(moved: Array, w: Array, u: Array) -> Array:
    """Return the float32 update that takes ``w`` to ``moved``; ``u`` itself where one of them is not finite.

    The distance from one end of bfloat16's range to the other exceeds float32's range and is clipped to it.
    """
    new, old = moved.astype(jnp.float32), w.astype(jnp.float32)
    step = jnp.clip(new - old, -FLOAT32_MAX, FLOAT32_MAX)
    return jnp.where(jnp.isfinite(new) & jnp.isfinite(old), step, u.astype(jnp.float32))
