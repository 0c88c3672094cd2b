"""Training with a guard: the loss scale on the way in, the guarded step on the way out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from stablenum_jax._precision.escalate import check_not_escalating, in_level_format
from stablenum_jax._precision.policy import Policy, as_policy
from stablenum_jax._step.apply import multiply_leaves
from stablenum_jax._step.eager import drive
from stablenum_jax._trees.leaves import FP8_STATISTICS
from stablenum_jax._trees.state import loss_scale

__all__ = ["scale_loss", "step", "value_and_grad"]

PyTree: TypeAlias = Any

# The largest power of two that a float16 cotangent can hold.
_LARGEST_FLOAT16_SCALE = 2.0**15


def step(
    tx: optax.GradientTransformation,
    params: PyTree,
    opt_state: PyTree,
    grads: PyTree,
    *,
    value: Any = None,
    **extra: Any,
) -> tuple[PyTree, PyTree]:
    """One guarded training step: decide, then update and add inside one ``lax.cond``, or nothing.

    On a refused step parameters and the whole state of the optimizer are bit for bit what they
    were; only the guard's own state moves on. Structure and dtypes of both never change, so the
    pair can be a scan's carry, and its buffers may be donated.

    Args:
        tx: an optax transformation with one guard inside, first in its chain.
        params: the parameters.
        opt_state: the state, from ``tx.init(params)``.
        grads: their gradients, multiplied by :func:`stablenum_jax.loss_scale` if there is one (as
            those of :func:`stablenum_jax.value_and_grad` are). None leaves are missing gradients.
        value: the unscaled loss, a scalar; a step whose loss is not finite is refused. Passed on to
            ``tx`` if it takes it.
        **extra: further arguments for ``tx.update``, if it takes them.

    Returns:
        The new parameters and the new state.

    Raises:
        NonFiniteError: called eagerly, and the guard stopped the training (``on_nonfinite="raise"``
            or ``max_skips_in_a_row``). The caller's parameters and state are still good; the
            exception's ``opt_state`` is the one that remembers the refused step. Under jit nothing
            can be raised: all later steps are refused, and ``metrics(opt_state)`` raises.
        ValueError: ``opt_state`` holds no guard or more than one; ``value`` is not a scalar; ``tx``
            changes the structure of its state; ``ClipUpdateRMS`` finds no learning rate in it.

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
    if value is not None:
        extra = {"value": value, **extra}
    if isinstance(grads, Mapping) and FP8_STATISTICS in grads and "params" in grads:
        return drive(_beside_statistics(tx), params, opt_state, grads, extra, add=_add_and_overwrite)
    return drive(tx, params, opt_state, grads, extra, add=_add)


def _add(params: PyTree, updates: PyTree) -> PyTree:
    """``optax.apply_updates`` that leaves a parameter without update alone."""

    def add(param: Any, update: Any) -> Any:
        if param is None or update is None or getattr(update, "dtype", None) == jax.dtypes.float0:
            return param
        return jnp.asarray(param + update).astype(jnp.asarray(param).dtype)

    return jax.tree.map(add, params, updates, is_leaf=lambda leaf: leaf is None)


@functools.lru_cache(maxsize=32)
def _beside_statistics(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """``tx`` on the part of a flax variable dict that is trained; fp8 statistics pass through."""
    inner = optax.with_extra_args_support(tx)

    def update(grads: Any, state: PyTree, params: Any = None, **extra: Any) -> tuple[PyTree, PyTree]:
        updates, state = inner.update(grads["params"], state, params["params"], **extra)
        return {"params": updates, FP8_STATISTICS: grads[FP8_STATISTICS]}, state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _add_and_overwrite(params: Any, updates: Any) -> Any:
    """As flax's ``TrainState.apply_gradients``: statistics are replaced by their "gradients"."""
    added = {
        "params": _add(params["params"], updates["params"]),
        FP8_STATISTICS: updates[FP8_STATISTICS],
    }
    return type(params)({**params, **added})


def value_and_grad(
    fun: Callable[..., Any],
    opt_state: PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    policy: Any = None,
    formats: Sequence[Any] | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """``jax.value_and_grad`` with the guard's loss scale: small gradients survive half precision.

    The loss is multiplied by the scale in float32, so a float16 loss does not overflow; the value
    comes back unscaled and in its own dtype. The gradients come back *scaled*: the guard inspects
    them and unscales them in float32. Micikevicius et al. 2018 (arXiv 1710.03740).

    With ``policy`` the floating-point arrays in all arguments are cast for computing, module by module, and
    the gradients come in the dtypes of the arguments themselves. If the guard has an
    :class:`stablenum.EscalatePrecision`, the computation runs in the format of the guard's level. All
    formats are in the one compiled program, in a ``lax.switch``, and the host never waits; call it under
    ``jit``, or each call compiles anew. Losses and auxiliary results come in the widest level's dtype.

    Args:
        fun: returns a scalar loss, or ``(loss, aux)`` with ``has_aux``.
        opt_state: a pytree with one guard's state in it.
        argnums: which arguments to differentiate.
        has_aux: as in JAX.
        policy: None, or a policy: words, :class:`stablenum_jax.Policy`, ``stablenum.Policy`` or jmp's.
        formats: with an escalation whose formats are not the policy's and those usually above it (float8,
            bfloat16, float32; float16, float32), its ``formats``.

    Returns:
        A function that returns ``(loss, grads)`` or ``((loss, aux), grads)``. Without loss scaling and
        policy it is ``jax.value_and_grad(fun)``, exactly.

    Raises:
        ValueError: no guard in ``opt_state``, or more than one; ``policy`` is none, or not that of the first
            of ``formats``; there is none although the guard has an ``EscalatePrecision``, for it is the
            policy's casts that become wider.

    Example:
        >>> import stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(loss_scale=1024.0), optax.sgd(0.1))
        >>> opt_state = tx.init(jnp.ones(2))
        >>> loss, grads = value_and_grad(lambda x: x.sum(), opt_state)(jnp.ones(2))
        >>> loss, grads
        (Array(2., dtype=float32), Array([1024., 1024.], dtype=float32))
    """
    scale = loss_scale(opt_state)
    if policy is None:
        check_not_escalating(opt_state)
        return functools.wraps(fun)(functools.partial(_scaled_grad, fun, scale, argnums, has_aux))
    wanted = as_policy(policy)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        def call(now: Policy) -> tuple[Any, Any]:
            def cast_first(*args: Any, **kwargs: Any) -> Any:
                cast = [now.cast_to_compute(arg) for arg in args]
                return fun(*cast, **now.cast_to_compute(kwargs))

            return _scaled_grad(cast_first, scale, argnums, has_aux, *args, **kwargs)

        return in_level_format(call, wanted, opt_state, formats)

    return wrapped


def _scaled_grad(
    fun: Callable[..., Any],
    scale: jax.Array,
    argnums: int | Sequence[int],
    has_aux: bool,
    /,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """What ``fun`` returns, and the scaled gradients."""
    dtypes: list[Any] = []

    def scaled(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        out = fun(*args, **kwargs)
        loss = jnp.asarray(out[0] if has_aux else out)
        dtypes.append(loss.dtype)
        if not jnp.issubdtype(loss.dtype, jnp.floating):
            return loss, out  # JAX says what is wrong with it
        return _scaled(loss, _scale_on_loss(scale, loss.dtype)), out

    (_, out), grads = jax.value_and_grad(scaled, argnums, has_aux=True)(*args, **kwargs)
    if dtypes[-1] == jnp.float16:
        grads = multiply_leaves(grads, scale / _scale_on_loss(scale, dtypes[-1]))
    return out, grads


def _scale_on_loss(scale: jax.Array, dtype: Any) -> jax.Array:
    """The part of the scale that the loss can bear.

    The cotangent of a float16 loss is float16, where 65536 is inf. What is left over is multiplied
    onto the gradients instead.
    """
    return jnp.minimum(scale, _LARGEST_FLOAT16_SCALE) if dtype == jnp.float16 else scale


def scale_loss(loss: Any, opt_state: PyTree) -> jax.Array:
    """The loss times the guard's loss scale, in float32 (float64 for a float64 loss).

    For a gradient computed by hand; :func:`stablenum_jax.value_and_grad` does it for you. Compute
    the loss in float32: the derivative of a float16 loss cannot hold a scale of 65536.

    Args:
        loss: a scalar.
        opt_state: a pytree with one guard's state in it.

    Raises:
        ValueError: no guard in ``opt_state``, or more than one.

    Example:
        >>> import stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(loss_scale="dynamic"), optax.sgd(0.1))
        >>> scale_loss(jnp.asarray(3.0, jnp.float16), tx.init(jnp.ones(2)))
        Array(196608., dtype=float32)
    """
    return _scaled(jnp.asarray(loss), loss_scale(opt_state))


def _scaled(loss: jax.Array, scale: jax.Array) -> jax.Array:
    wide = jnp.promote_types(loss.dtype, jnp.float32)
    return loss.astype(wide) * scale.astype(wide)
