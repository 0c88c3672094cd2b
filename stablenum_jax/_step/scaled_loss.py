"""The loss times the guard's loss scale, and the scaled gradients of a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from stablenum.errors import bad_type
from stablenum_jax._step.apply import multiply_leaves
from stablenum_jax._step.measure.norms import check_real_loss
from stablenum_jax._trees.leaves import check_argnums, wide_dtype
from stablenum_jax._trees.models import differentiable, holds_nnx, with_parameters
from stablenum_jax._trees.state import loss_scale

__all__ = ["loss_times_scale", "scale_loss", "scaled_in_range", "scaled_value_and_grad"]

PyTree: TypeAlias = Any

# The largest power of two that a float16 cotangent can hold.
_LARGEST_FLOAT16_SCALE = 2.0**15


def scaled_value_and_grad(
    fun: Callable[..., Any],
    scale: jax.Array,
    argnums: int | Sequence[int],
    has_aux: bool,
    /,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Return the result of ``fun`` and the gradients of its scaled loss.

    Models may be given as they are: see :func:`stablenum_jax._trees.models.differentiable`. What ``fun``
    changes in objects of flax nnx stays changed.
    """
    check_argnums(argnums, len(args))
    dtypes: list[Any] = []

    def scaled(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        out = fun(*args, **kwargs)
        loss = _loss_of(out, has_aux)
        dtypes.append(loss.dtype)
        return scaled_in_range(loss, scale), out

    if holds_nnx((args, kwargs)):
        from flax import nnx

        numbers = (argnums,) if isinstance(argnums, int) else argnums
        counted = [i + len(args) if i < 0 else i for i in numbers]
        # flax takes no keyword arguments that the signature does not name, so they are one more argument.
        (_, out), grads = nnx.value_and_grad(
            lambda *given: scaled(*given[:-1], **given[-1]),
            argnums=counted[0] if isinstance(argnums, int) else tuple(counted),
            has_aux=True,
        )(*args, kwargs)
    else:
        (_, out), grads = _value_and_grad(scaled, argnums, args, kwargs)
    if dtypes[-1] == jnp.float16:
        grads = multiply_leaves(grads, scale / _scale_on_loss(scale, dtypes[-1]))
    return out, grads


def _value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Do what ``jax.value_and_grad`` with ``has_aux`` does, with respect to the differentiable leaves."""
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    parts = list(args)
    for i in numbers:
        if -len(args) <= i < len(args):
            parts[i] = differentiable(args[i])
    whole = [i for i, (part, arg) in enumerate(zip(parts, args, strict=True)) if part is not arg]
    if not whole:
        return jax.value_and_grad(fun, argnums, has_aux=True)(*args, **kwargs)

    def of_parts(*given: Any, **kwargs: Any) -> tuple[Any, Any]:
        models = (with_parameters(args[i], x) if i in whole else x for i, x in enumerate(given))
        result: tuple[Any, Any] = fun(*models, **kwargs)
        return result

    result: tuple[Any, Any] = jax.value_and_grad(of_parts, argnums, has_aux=True)(*parts, **kwargs)
    return result


def _loss_of(out: Any, has_aux: bool) -> jax.Array:
    """Return the loss in the result of a function that is differentiated.

    Raises:
        TypeError: there is no floating-point scalar where the loss should be.
    """
    allowed = "(loss, aux)" if has_aux else "the loss"
    if has_aux and not (isinstance(out, (tuple, list)) and len(out) >= 2):
        raise bad_type("the result of fun with has_aux=True", allowed, out)
    loss = out[0] if has_aux else out
    if not hasattr(loss, "dtype") and not isinstance(loss, (bool, int, float, complex)):
        hint = "Give has_aux=True if fun returns (loss, aux)." if isinstance(loss, (tuple, list)) else ""
        raise bad_type("the loss that fun returns", "a floating-point scalar", loss, hint=hint)
    dtype, shape = jnp.result_type(loss), jnp.shape(loss)
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"the loss that fun returns must be a floating-point scalar; got {dtype} of shape {shape}."
        )
    return jnp.asarray(loss)


def _scale_on_loss(scale: jax.Array, dtype: Any) -> jax.Array:
    """Return the part of the scale by which the loss is multiplied.

    The cotangent of a float16 loss is float16, where 65536 is inf. The gradients are multiplied by the
    rest of the scale.
    """
    return jnp.minimum(scale, _LARGEST_FLOAT16_SCALE) if dtype == jnp.float16 else scale


def scale_loss(loss: Any, opt_state: PyTree) -> jax.Array:
    """Return the loss times the guard's loss scale, in float32 (float64 for a float64 loss).

    Use this for gradients that you compute yourself; :func:`stablenum_jax.value_and_grad` scales for you.
    Compute the loss in float32: the derivative of a float16 loss cannot hold a scale of 65536.

    Args:
        loss: a scalar of a floating-point format.
        opt_state: a pytree with one guard's state in it.

    Raises:
        TypeError: ``loss`` is not a floating-point number.
        ValueError: ``opt_state`` has no guard, or more than one.

    Example:
        >>> import optax, stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(loss_scale="dynamic"), optax.sgd(0.1))
        >>> scale_loss(jnp.asarray(3.0, jnp.float16), tx.init(jnp.ones(2)))
        Array(196608., dtype=float32)
    """
    check_real_loss("loss", loss)
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise TypeError(f"loss must be of a floating-point format; got {jnp.result_type(loss)}.")
    return loss_times_scale(jnp.asarray(loss), loss_scale(opt_state))


def scaled_in_range(loss: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the loss times as much of the scale as its cotangent can represent, in float32 or wider."""
    return loss_times_scale(loss, _scale_on_loss(scale, loss.dtype))


def loss_times_scale(loss: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the product in float32 or wider. All scaled losses come from here."""
    wide = wide_dtype(loss.dtype)
    return loss.astype(wide) * scale.astype(wide)
