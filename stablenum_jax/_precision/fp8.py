"""Matrix products in 8 bits with delayed scaling: e4m3 forward, e5m2 backward.

The state is an argument, and the "gradient" with respect to it is the state after the step, because the
largest element of the incoming gradient is known only in the backward pass. flax's 8-bit layers do the same
with their collection ``_overwrite_with_gradient``. States under that name are replaced by
:func:`stablenum_jax.step` instead of being added to, and stay as they are in a skipped step::

    variables = {"params": params, "_overwrite_with_gradient": {"dense": init_fp8()}}
    loss, grads = stablenum_jax.value_and_grad(loss_fn, opt_state)(variables, batch)
    variables, opt_state = stablenum_jax.step(tx, variables, opt_state, grads, value=loss)
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stablenum._support.settings_checks import check_flag
from stablenum.errors import bad_field, bad_type
from stablenum.formats import FORMATS
from stablenum.precision.delayed_scaling import DelayedScaling, DelayedScalingState, fits_hardware
from stablenum.precision.rounding import round_to_nearest
from stablenum_jax._precision.escalate import raised_format

__all__ = ["Fp8State", "fp8_dot", "init_fp8", "quantize"]

Array: TypeAlias = jax.Array


class Fp8State(NamedTuple):
    """The scales of one product.

    Attributes:
        forward: the scales of the product's two factors.
        backward: the scale of the gradient of the product.
    """

    forward: DelayedScalingState
    backward: DelayedScalingState


# TransformerEngine's defaults, but with scales that are powers of two: multiplying by them is exact, and they
# are the same on every machine.
_FORWARD = DelayedScaling(power_of_two=True)
_BACKWARD = DelayedScaling(format="float8_e5m2", power_of_two=True)


class _How(NamedTuple):
    """How one product is computed: the rules for its factors and its gradient, and whether it is native."""

    forward: DelayedScaling
    backward: DelayedScaling
    native: bool


def init_fp8(
    *, forward_scaling: DelayedScaling = _FORWARD, backward_scaling: DelayedScaling = _BACKWARD
) -> Fp8State:
    """Return the state of one product before its first use: scales of 1.

    Args:
        forward_scaling, backward_scaling: as in :func:`stablenum_jax.fp8_dot`.

    Raises:
        ValueError: a rule has another format.

    Example:
        >>> init_fp8(forward_scaling=DelayedScaling(history=16)).forward.history.shape
        (2, 16)
    """
    how = _how(forward_scaling, backward_scaling)
    return Fp8State(how.forward.init(2, xp=jnp), how.backward.init(1, xp=jnp))


def _how(forward: DelayedScaling, backward: DelayedScaling, *, native: bool = False) -> _How:
    for name, given, wanted in (
        ("forward_scaling", forward, "float8_e4m3fn"),
        ("backward_scaling", backward, "float8_e5m2"),
    ):
        if not isinstance(given, DelayedScaling) or given.format != wanted:
            raise bad_field(name, f"a DelayedScaling(format={wanted!r})", given)
    return _How(forward, backward, native)


def fp8_dot(
    x: Array,
    w: Array,
    state: Fp8State,
    *,
    forward_scaling: DelayedScaling = _FORWARD,
    backward_scaling: DelayedScaling = _BACKWARD,
    native: bool = False,
) -> Array:
    """Return ``x @ w`` with both factors in e4m3 and, in the backward pass, the gradient in e5m2.

    ``(q(x s_x) @ q(w s_w)) / (s_x s_w)``, summed in float32, where q rounds to 8 bits and saturates. The
    scales come from earlier uses, and at the first use from the values themselves
    (:class:`stablenum.DelayedScaling`; Micikevicius et al. 2022, arXiv 2209.05433).

    NaN and inf in a factor or a gradient come out as NaN or inf, so the guard sees them; they never enter the
    scales. If a factor is empty, the result is the same as that of ``x @ w``. At an escalation level above
    8 bits (see :func:`stablenum_jax.value_and_grad`) the result is ``x @ w``, and the state is unchanged.

    Args:
        x: (..., k), any floating-point dtype.
        w: (k, n), any floating-point dtype.
        state: the state of this product only. If a state is used twice, its next states would be summed; for
            the same reason, one state for all examples of a ``jax.vmap`` is an error. Pass the whole batch
            to such a product.
        forward_scaling: the rule for both factors, the same in every step.
        backward_scaling: the rule for the gradient, the same in every step.
        native: multiply the 8-bit arrays themselves where all sizes are multiples of 16, on hardware that can
            (NVIDIA from Ada and Hopper on); otherwise their values are multiplied in float32. The results
            differ only by the order of the sum.

    Returns:
        (..., n), in the dtype of ``x @ w``. Its gradient with respect to ``state`` is the next state.

    Raises:
        TypeError: ``x`` or ``w`` is not a floating-point array, or ``state`` is not a state.
        ValueError: the shapes do not fit, the state belongs to other rules, a rule has another format, or a
            gradient is taken under ``jax.vmap`` over ``x`` or ``w`` but not over ``state``.

    Example:
        >>> x, w = jnp.ones((2, 3)), jnp.full((3, 4), 0.5)
        >>> y, pull = jax.vjp(fp8_dot, x, w, init_fp8())
        >>> after = pull(jnp.ones_like(y))[2]
        >>> float(y[0, 0]), after.forward.scale, after.backward.scale
        (1.5, Array([256., 512.], dtype=float32), Array([32768.], dtype=float32))
    """
    for name, factor in (("x", x), ("w", w)):
        if not isinstance(factor, (jax.Array, np.ndarray)) or not jnp.issubdtype(factor.dtype, jnp.floating):
            got = getattr(factor, "dtype", type(factor).__name__)
            raise TypeError(f"{name} must be an array of a floating-point dtype; got {got}.")
    if not isinstance(state, Fp8State):
        raise bad_type("state", "what init_fp8() returned, or the gradient with respect to it", state)
    check_flag("native", native)
    if jnp.ndim(x) < 1 or jnp.ndim(w) != 2 or jnp.shape(x)[-1] != jnp.shape(w)[0]:
        raise ValueError(
            f"x and w must have shapes (..., k) and (k, n); got {jnp.shape(x)} and {jnp.shape(w)}."
        )
    how = _how(forward_scaling, backward_scaling, native=native)
    wanted = (2, how.forward.history), (1, how.backward.history)
    got = state.forward.history.shape, state.backward.history.shape
    if got != wanted:
        raise ValueError(
            "state must come from init_fp8 with the same forward_scaling and backward_scaling, "
            f"with histories of shapes {wanted[0]} and {wanted[1]}; got {got[0]} and {got[1]}."
        )
    if raised_format() is not None:
        return _plain(x, w, state)
    return _dot(how, x, w, state)


@jax.custom_batching.custom_vmap
def _one_state_each(factors: tuple[Array, Array], state: Fp8State) -> Array:
    """Do nothing, but under ``jax.vmap`` raise an error for a state that many products share."""
    return state.backward.scale


@_one_state_each.def_vmap
def _check_not_shared(size: int, batched: Any, factors: Any, state: Fp8State) -> tuple[Array, bool]:
    of_factors, of_state = batched
    if any(of_factors) and not all(jax.tree.leaves(of_state)):
        raise ValueError(
            "each product must have its own state; under jax.vmap the gradients of one state for all "
            f"{size} examples would be summed, and the sum is not a state. Pass the whole batch to fp8_dot "
            "(x may have any number of leading axes), or map over as many states (in_axes=0)."
        )
    return state.backward.scale, of_state.backward.scale


def quantize(x: Array, scale: Array, name: str) -> Array:
    """Return ``x * scale`` in an 8-bit format: finite values saturate, NaN and inf stay (as NaN in e4m3).

    Args:
        x: any floating-point array.
        scale: () float32.
        name: ``"float8_e4m3fn"`` or ``"float8_e5m2"``.

    Example:
        >>> quantize(jnp.asarray([1.0, 1e6, jnp.nan]), jnp.float32(2.0), "float8_e4m3fn")
        Array([2, 448, nan], dtype=float8_e4m3fn)
    """
    wide = x.astype(jnp.float32)
    top = FORMATS[name].max
    # Finite values are clipped, also if the product overflows; inf stays visible.
    scaled = jnp.where(jnp.isfinite(wide), jnp.clip(wide * scale, -top, top), wide)
    # The cast rounds too, unless XLA removes it: a GPU's compiler drops a conversion to a narrower format and
    # back (xla_allow_excess_precision).
    return round_to_nearest(scaled, name, xp=jnp).astype(name)


@jax.custom_vjp
def _plain(x: Array, w: Array, state: Fp8State) -> Array:
    return x @ w


def _plain_forward(x: Array, w: Array, state: Fp8State) -> tuple[Array, Any]:
    return x @ w, (x, w, state)


def _plain_backward(kept: Any, g: Array) -> tuple[Array, Array, Fp8State]:
    x, w, state = kept
    return (*jax.vjp(jnp.matmul, x, w)[1](g), state)


_plain.defvjp(_plain_forward, _plain_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(how: _How, x: Array, w: Array, state: Fp8State) -> Array:
    return _forward(how, x, w, state)[0]


def _forward_to_differentiate(how: _How, x: Array, w: Array, state: Fp8State) -> tuple[Array, Any]:
    # Without a backward pass a state may be shared: no next state is computed.
    _one_state_each((x, w), state)
    return _forward(how, x, w, state)


def _forward(how: _How, x: Array, w: Array, state: Fp8State) -> tuple[Array, Any]:
    amax = jnp.stack([_amax(x), _amax(w)])
    scales, after = how.forward.use(state.forward, amax, xp=jnp)
    qx = quantize(x, scales[0], "float8_e4m3fn")
    qw = quantize(w, scales[1], "float8_e4m3fn")
    out = _product(how, qx, qw, scales[0], scales[1], (((x.ndim - 1,), (0,)), ((), ())))
    # The dtypes are passed as empty arrays, because residuals can only be arrays.
    kinds = (jnp.zeros((0,), x.dtype), jnp.zeros((0,), w.dtype))
    return out.astype(jnp.result_type(x, w)), (qx, qw, kinds, scales, after, state.backward)


def _backward(how: _How, kept: Any, g: Array) -> tuple[Array, Array, Fp8State]:
    qx, qw, kinds, scales, after, backward = kept
    scale_of_g, seen = how.backward.use(backward, _amax(g)[None], xp=jnp)
    scale = scale_of_g[0]
    qg = quantize(g, scale, "float8_e5m2")
    rows = tuple(range(g.ndim - 1))
    dx = _product(how, qg, qw, scale, scales[1], (((g.ndim - 1,), (1,)), ((), ())))
    dw = _product(how, qx, qg, scales[0], scale, ((rows, rows), ((), ())))
    return dx.astype(kinds[0].dtype), dw.astype(kinds[1].dtype), Fp8State(after, seen)


_dot.defvjp(_forward_to_differentiate, _backward)


def _product(how: _How, a: Array, b: Array, scale_a: Array, scale_b: Array, dims: Any) -> Array:
    """Return the product of two quantized arrays, divided by their scales."""
    if not (how.native and _fits(a, b, dims[0])):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    out = lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
    # The scales are divided out one after the other, because the product of the scales may overflow float32.
    return out * (1.0 / scale_a) * (1.0 / scale_b)


def _fits(a: Array, b: Array, contracted: tuple[Any, Any]) -> bool:
    """Return whether the hardware multiplies 8-bit arrays of these sizes."""
    sizes = []
    for array, axes in zip((a, b), contracted, strict=True):
        of_sum = math.prod(array.shape[axis] for axis in axes)
        sizes += [of_sum, array.size // of_sum if of_sum else 0]
    return fits_hardware(*sizes)


def _amax(x: Array) -> Array:
    return jnp.max(jnp.abs(x), initial=0.0).astype(jnp.float32)
