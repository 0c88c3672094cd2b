"""``step``: one guarded training step of an optax transformation."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import optax

from stablenum.errors import bad_type
from stablenum.guard.restored import OtherSettingsError
from stablenum_jax._step.eager import guarded_update
from stablenum_jax._trees.leaves import FP8_STATISTICS, check_transformation, is_floating, wide_dtype
from stablenum_jax._trees.models import first_state_of, parameters, watched_parameters, with_parameters
from stablenum_jax._trees.state import has_guard

__all__ = ["step"]

PyTree: TypeAlias = Any
Params = TypeVar("Params")
State = TypeVar("State")


def step(
    tx: optax.GradientTransformation,
    params: Params,
    opt_state: State,
    grads: PyTree,
    *,
    value: Any = None,
    **extra: Any,
) -> tuple[Params, State]:
    """Run one guarded training step: decide, then update and add inside one ``lax.cond``, or skip.

    A skipped step leaves the parameters and the whole state of the optimizer bit for bit as they were; only
    the guard's own state changes. The structure and dtypes of both never change, so the pair can be the carry
    of a scan, and its buffers may be donated.

    Mind the order: ``tx.update`` takes ``(grads, opt_state, params)``, and ``step`` takes
    ``(tx, params, opt_state, grads)``. Gradients are a tree like the parameters, so where all parameters are
    trained arrays, nothing shows that the two have been swapped: the gradients would be trained. Given by
    keyword, ``step(tx, params=..., opt_state=..., grads=...)``, they have no order.

    Args:
        tx: an optax transformation with one guard inside, first in its chain.
        params: the parameters, or a model: of an equinox module the floating-point arrays are trained, and
            everything else is returned as it is; flax nnx modules, alone or in a dict, list or tuple, are
            changed in place.
        opt_state: the state, from ``tx.init(params)``. Of a model, the transformations of optax take only the
            trained part, ``tx.init(equinox.filter(model, equinox.is_inexact_array))`` or
            ``tx.init(nnx.state(model, nnx.Param))``; :func:`stablenum_jax.chain` and
            ``stablenum_jax.guard(inner)`` take the model.
        grads: the gradients of the parameters. If the guard has a ``loss_scale``, they must come from
            ``stablenum_jax.value_and_grad(loss_fn, opt_state)`` or be multiplied by
            ``loss_scale(opt_state)``: the step divides by the scale, and gradients from plain
            ``jax.value_and_grad`` become about 65536 times too small, so nothing is trained. A leaf that is
            None is a missing gradient.
        value: the unscaled loss, a scalar; a step whose loss is not finite is skipped. The loss is passed to
            ``tx`` if ``tx`` accepts it.
        **extra: further arguments for ``tx.update``, if it takes them.

    Returns:
        The new parameters and the new state.

    Raises:
        NonFiniteError: called eagerly, and the guard halted the training (``on_nonfinite="raise"`` or
            ``max_skips_in_a_row``). The caller's parameters and state are still good; the exception's
            ``opt_state`` is the state that has recorded the skipped step. Under jit nothing can be raised:
            all later steps are skipped, and ``metrics(opt_state)`` raises.
        TypeError: ``tx`` is not an optax transformation; ``value`` or a gradient is not of a format that it
            can have.
        ValueError: the arguments are in another order, as far as that can be seen; ``opt_state`` holds no
            guard or more than one; ``value`` is not a scalar; ``grads`` or ``opt_state`` does not fit
            ``params`` or the guard's settings; ``tx`` changes the structure of its state; ``ClipUpdateRMS``
            finds no learning rate in it.

    Example:
        >>> import stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(), optax.adam(0.1))
        >>> params = {"w": jnp.ones(2)}
        >>> opt_state = tx.init(params)
        >>> params, opt_state = step(tx, params, opt_state, {"w": jnp.asarray([jnp.inf, 1.0])})
        >>> params["w"]
        Array([1., 1.], dtype=float32)
        >>> stablenum_jax.metrics(opt_state)["reason"].name
        'INF_GRADIENT'
    """
    check_transformation("tx", tx)
    if params is None:
        raise bad_type("params", "the parameters", params)
    _check_order(params, opt_state, grads)
    model, params = params, parameters(params, grads)
    if value is not None:
        extra = {"value": value, **extra}
    add = _add
    if isinstance(grads, Mapping) and FP8_STATISTICS in grads and "params" in grads:
        tx, add = _with_statistics(tx), _add_and_overwrite
    try:
        params, opt_state = guarded_update(tx, params, opt_state, grads, extra, add=add)
    except OtherSettingsError:
        raise  # which says what does not fit, and how to mend it
    except (TypeError, ValueError, AttributeError) as error:
        found = _mismatch(tx, model, params, opt_state, grads)
        if found is None:
            raise
        raise ValueError(f"{found} Nothing was changed.") from error
    return with_parameters(model, params), opt_state


def _check_order(params: PyTree, opt_state: PyTree, grads: PyTree) -> None:
    """Check that the arguments are in the order of ``step``, as far as their structure tells.

    Gradients and parameters are trees alike, except that a parameter may lack a gradient, but no gradient a
    parameter, and that only a model holds functions.

    Raises:
        ValueError: they are in another order, such as that of ``tx.update``.
    """
    hint = (
        "step takes (tx, params, opt_state, grads), unlike tx.update, which takes (grads, opt_state, params)."
    )
    if not has_guard(opt_state):
        for name, tree in (("params", params), ("grads", grads)):
            if has_guard(tree):
                raise ValueError(f"opt_state must be the state of tx; got it as {name}. {hint}")
    given, trained = (
        jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is None) for tree in (params, grads)
    )
    of_params = dict(given)
    for path, leaf in trained:
        where = jax.tree_util.keystr(path)
        if callable(leaf) and not hasattr(leaf, "dtype"):
            raise ValueError(f"grads must hold gradients; grads{where} is {leaf!r}. {hint}")
        if leaf is not None and path in of_params and of_params[path] is None and is_floating(leaf):
            raise ValueError(f"grads{where} must be None, as params{where} is; got an array. {hint}")
        both = {"grads": leaf, "params": of_params.get(path) if is_floating(leaf) else None}
        for name, one in both.items():
            if not (one is None or hasattr(one, "dtype") or isinstance(one, (int, float, complex))):
                raise bad_type(f"{name}{where}", "an array", one)
    for path, leaf in given:
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:
            raise ValueError(f"params{jax.tree_util.keystr(path)} is a gradient of dtype float0. {hint}")


def _mismatch(
    tx: optax.GradientTransformation, model: PyTree, params: PyTree, opt_state: PyTree, grads: PyTree
) -> str | None:
    """Return what does not fit in the arguments of a step that failed, in words; None if nothing is found.

    ``params`` are the parameters of ``model``, which is what the caller gave.
    """
    if has_guard(opt_state) != 1:
        return None  # which has been said
    of_params, of_grads = (
        jax.tree.structure(t, is_leaf=lambda x: x is None) for t in (watched_parameters(params), grads)
    )
    if of_params != of_grads:
        return f"grads must be a tree like params, {of_params}; got {of_grads}."
    try:
        made = jax.eval_shape(tx.init, params)
    except Exception:  # noqa: BLE001 - whatever the optimizer raises, the first error is shown
        return None
    places = jax.tree_util.tree_leaves_with_path(made)
    given = dict(jax.tree_util.tree_leaves_with_path(opt_state))
    for path, leaf in places:
        where = f"opt_state{jax.tree_util.keystr(path)}"
        if path not in given or jnp.shape(given[path]) != leaf.shape:
            got = f"one of shape {jnp.shape(given[path])}" if path in given else "none"
            return (
                f"opt_state must be the state of tx for these params, with an array of shape {leaf.shape} at "
                f"{where}; got {got}. Make it with {first_state_of(model)}."
            )
    return None


def _add(params: PyTree, updates: PyTree) -> PyTree:
    """Apply updates as optax does, but leave a parameter without an update unchanged."""

    def add(param: Any, update: Any) -> Any:
        if param is None or update is None or getattr(update, "dtype", None) == jax.dtypes.float0:
            return param
        param, update = jnp.asarray(param), jnp.asarray(update)
        if param.dtype != update.dtype and is_floating(param) and is_floating(update):
            wide = wide_dtype(param.dtype, update.dtype)
            return (param.astype(wide) + update.astype(wide)).astype(param.dtype)
        return (param + update).astype(param.dtype)

    return jax.tree.map(add, params, updates, is_leaf=lambda leaf: leaf is None)


@functools.lru_cache(maxsize=32)
def _with_statistics(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return ``tx`` for the trained part of a flax dict of variables; fp8 statistics pass through."""
    inner = optax.with_extra_args_support(tx)

    def update(grads: Any, state: PyTree, params: Any = None, **extra: Any) -> tuple[PyTree, PyTree]:
        updates, state = inner.update(grads["params"], state, params["params"], **extra)
        return {"params": updates, FP8_STATISTICS: grads[FP8_STATISTICS]}, state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _add_and_overwrite(params: Any, updates: Any) -> Any:
    """Do what flax's ``TrainState.apply_gradients`` does: replace each statistic by its "gradient"."""
    added = {
        "params": _add(params["params"], updates["params"]),
        FP8_STATISTICS: updates[FP8_STATISTICS],
    }
    return type(params)({**params, **added})
