"""Losses with the right value and the right gradient at every edge, in every float format.

Losses of inputs narrower than float32 are computed in float32; the result has the format of the first
argument, or ``dtype``. A batch with no valid items gives a loss of 0 and a gradient of 0. All losses work
under ``jax.jit``, ``vmap`` and ``grad`` of ``grad``, in forward and reverse mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from stablenum import losses as core
from stablenum._support.adapter_docs import spelled_signature, spelled_text
from stablenum._support.public_names import present
from stablenum.errors import bad_field, bad_type
from stablenum.losses.classes import ClassSums, class_sums
from stablenum.losses.common import argument_kinds, check_arguments, check_fits

__all__ = [
    "binary_cross_entropy",
    "binary_focal",
    "cosine_embedding",
    "cosine_similarity",
    "cross_entropy",
    "focal",
    "gaussian_nll",
    "hinge",
    "huber",
    "info_nce",
    "js_divergence",
    "kl_divergence",
    "log_cosh",
    "negative_binomial_nll",
    "poisson_nll",
]

Array: TypeAlias = jax.Array
Loss = Callable[..., Array]
_SETTINGS = (str, bool, int, float, type(None))


def _spelled(function: Callable[..., Any], example: str, note: str = "") -> Callable[[Loss], Loss]:
    """Give an implementation the name, the arguments and the docstring of a core function."""

    def spell(implementation: Loss) -> Loss:
        @functools.wraps(function)
        def loss(*arrays: Any, **options: Any) -> Array:
            given = {
                k: v if isinstance(v, _SETTINGS) or k == "dtype" else _as_array(k, v)
                for k, v in options.items()
            }
            names = [*kinds, *("an argument" for _ in arrays)]
            args = [v if v is None else _as_array(k, v) for k, v in zip(names, arrays)]
            check_arguments(kinds, args, given, is_array=_is_array, noun="an array")
            _check_dtype(given.get("dtype"))
            if isinstance(axis := options.get("axis", -1), bool) or not isinstance(axis, int):
                raise bad_field("axis", "a whole number", axis)
            return implementation(*args, **given)

        kinds = argument_kinds(function)
        loss.__signature__ = spelled_signature(function)  # type: ignore[attr-defined]
        loss.__doc__ = spelled_text(function, example, note=note)
        loss.__module__ = __name__
        return loss

    return spell


def _as_array(name: str, value: Any) -> Array:
    """Return an argument as an array.

    Raises:
        TypeError: it is not one.
    """
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise bad_type(name, "an array", value) from None


def _is_array(value: object) -> bool:
    return isinstance(value, jax.Array)


def _check_dtype(dtype: Any) -> None:
    """Check that the format of the result is a floating-point one, or None.

    Raises:
        TypeError: it is not.
    """
    if dtype is None:
        return
    try:
        if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            return
    except TypeError:
        pass
    raise TypeError(f"dtype must be a floating-point dtype or None, such as jnp.float32; got {dtype!r}.")


def _plain(function: Callable[..., Any], example: str) -> Loss:
    return _spelled(function, example)(functools.partial(function, xp=jnp))


# --- the sums over classes -----------------------------------------------------------------------------

# The derivative is written out: if JAX differentiated the sums, XLA would write an array of the size of the
# logits to memory and read it again. Forward and reverse mode, and second derivatives, follow from this rule.


@functools.partial(jax.custom_jvp, nondiff_argnums=(4,))
def _sums(
    x: Array, weight: Array | None, index: Array, keep: Array, smoothing: bool
) -> tuple[ClassSums, Array, Array]:
    """Return the sums, a shift for the logits, and the total of the exponentials of the shifted logits."""
    # Nothing is differentiated here, so masking rows is enough; elements need not be masked first.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    top = jnp.max(x if not smoothing else jnp.where(keep[..., None], x, 0.0), axis=-1).astype(wide)
    shift = jnp.where(jnp.isfinite(top), top, 0.0)
    away = (x if not smoothing else jnp.where(keep[..., None], x, 0.0)) - shift[..., None]
    some = top != -jnp.inf
    total = jnp.where(some, jnp.sum(jnp.exp(away), axis=-1), 1.0)
    total = jnp.where(top == jnp.inf, jnp.nan, total)
    if smoothing:
        sums = class_sums(x, index, keep, weight=weight, smoothing=True, xp=jnp)
        return sums, shift, total
    log_total = jnp.log(total)
    picked = jnp.squeeze(jnp.take_along_axis(x, index[..., None], axis=-1), axis=-1)
    nll = jnp.where(picked == -jnp.inf, jnp.inf, log_total - (picked - shift))
    lse = jnp.where(some, log_total + shift, -jnp.inf)
    return ClassSums(jnp.where(keep, nll, 0.0), jnp.where(keep, lse, 0.0), None), shift, total


@_sums.defjvp
def _sums_jvp(smoothing: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    x, weight, index, keep = primals
    dx, d_weight, _, _ = tangents
    sums, shift, total = _sums(x, weight, index, keep, smoothing)
    wide = sums.nll.dtype
    some = keep & (sums.lse != -jnp.inf)
    x, dx = x.astype(wide), dx.astype(wide)
    away = x - jnp.where(some, shift, 0.0)[..., None]
    safe = jnp.where(some, total, 1.0)
    # Not exp(x - logsumexp): the logarithm of many classes is rounded more coarsely than a quotient.
    p = jnp.where(some[..., None], jnp.exp(away) * (1.0 / safe)[..., None], 0.0)
    d_lse = jnp.sum(p * dx, axis=-1)
    there = some & (sums.nll != jnp.inf)
    one_hot = (index[..., None] == jnp.arange(x.shape[-1])) & there[..., None]
    d_nll = jnp.where(there, d_lse, 0.0) - jnp.sum(jnp.where(one_hot, dx, 0.0), axis=-1)
    parts, d_parts = (shift, total), (jnp.zeros_like(shift), safe * d_lse)
    if not smoothing:
        return (sums, *parts), (ClassSums(d_nll, d_lse, None), *d_parts)
    here = (x != -jnp.inf) & some[..., None]
    classes = jnp.maximum(jnp.sum(here, axis=-1, dtype=wide), 1.0)
    share = jnp.where(here, jnp.ones((), wide) if weight is None else weight.astype(wide), 0.0)
    d_smooth = jnp.sum(share, axis=-1) * d_lse - jnp.sum(jnp.where(here, share * dx, 0.0), axis=-1)
    if weight is not None:
        below = away - jnp.log(safe)[..., None]
        d_smooth = d_smooth - jnp.sum(jnp.where(here, below, 0.0) * d_weight.astype(wide), axis=-1)
    return (sums, *parts), (ClassSums(d_nll, d_lse, d_smooth / classes), *d_parts)


def _class_sums(
    x: Array, index: Array, keep: Array, *, weight: Array | None = None, smoothing: bool = False, xp: Any
) -> ClassSums:
    return _sums(x, weight, index, keep, smoothing)[0]


def _checked(targets: Array, logits: Array, axis: int, ignore_index: int, mask: Array | None) -> None:
    """Check that targets are in range, if they are known and on the host."""
    known = [a for a in (targets, mask) if a is not None]
    if any(isinstance(a, jax.core.Tracer) or {d.platform for d in a.devices()} != {"cpu"} for a in known):
        return
    if (
        not jnp.issubdtype(targets.dtype, jnp.integer)
        or not -logits.ndim <= axis < logits.ndim
        or not logits.shape[axis]
    ):
        return
    index, classes = np.asarray(targets), logits.shape[axis]
    wrong = (index != ignore_index) & ((index < 0) | (index >= classes))
    if mask is not None:
        check_fits("mask", mask, index.shape, of="the items")
        wrong = wrong & np.asarray(mask)
    if wrong.any():
        allowed = f"whole numbers from 0 to {classes - 1}, or ignore_index ({ignore_index})"
        raise bad_field("targets", allowed, int(np.broadcast_to(index, wrong.shape)[wrong][0]))


_CLASSES = """\
Outside ``jit`` and ``vmap``, on a CPU, a target that is not a class raises a ValueError; elsewhere targets
are not known in time, so the loss of such an item is NaN instead."""


@_spelled(
    core.cross_entropy,
    """
    >>> import jax, jax.numpy as jnp
    >>> x = jnp.asarray([[0.0, 0.0, -jnp.inf], [jnp.nan, 0.0, 0.0]])
    >>> loss, grad = jax.value_and_grad(cross_entropy)(x, jnp.asarray([1, -100]), label_smoothing=0.1)
    >>> bool(jnp.isfinite(loss) & jnp.isfinite(grad).all())
    True
    """,
    _CLASSES,
)
def cross_entropy(
    logits: Array, targets: Array, *, axis: int = -1, ignore_index: int = -100, **options: Any
) -> Array:
    _checked(targets, logits, axis, ignore_index, options.get("mask"))
    return core.cross_entropy(
        logits, targets, axis=axis, ignore_index=ignore_index, sums=_class_sums, xp=jnp, **options
    )


@_spelled(
    core.focal,
    """
    >>> import jax, jax.numpy as jnp
    >>> grad = jax.grad(focal)(jnp.asarray([[80.0, 0.0]]), jnp.asarray([0]), gamma=0.5)
    >>> bool(jnp.isfinite(grad).all())
    True
    """,
    _CLASSES,
)
def focal(
    logits: Array, targets: Array, *, axis: int = -1, ignore_index: int = -100, **options: Any
) -> Array:
    _checked(targets, logits, axis, ignore_index, options.get("mask"))
    return core.focal(logits, targets, axis=axis, ignore_index=ignore_index, xp=jnp, **options)


binary_cross_entropy = _plain(
    core.binary_cross_entropy,
    """
    >>> import jax.numpy as jnp
    >>> binary_cross_entropy(jnp.asarray([200.0, -200.0]), jnp.asarray([1.0, 1.0])).item()
    100.0
    """,
)
binary_focal = _plain(
    core.binary_focal,
    """
    >>> import jax.numpy as jnp
    >>> binary_focal(jnp.asarray([0.0]), jnp.asarray([1.0])).item()
    0.173...
    """,
)
kl_divergence = _plain(
    core.kl_divergence,
    """
    >>> import jax.numpy as jnp
    >>> kl_divergence(jnp.log(jnp.asarray([[0.5, 0.5]])), jnp.asarray([[1.0, 0.0]])).item()
    0.693...
    """,
)
js_divergence = _plain(
    core.js_divergence,
    """
    >>> import jax.numpy as jnp
    >>> js_divergence(jnp.asarray([[0.0, -jnp.inf]]), jnp.asarray([[-jnp.inf, 0.0]])).item()
    0.693...
    """,
)
gaussian_nll = _plain(
    core.gaussian_nll,
    """
    >>> import jax.numpy as jnp
    >>> gaussian_nll(jnp.zeros(2), jnp.ones(2), jnp.ones(2)).item()
    0.5
    """,
)
poisson_nll = _plain(
    core.poisson_nll,
    """
    >>> import jax.numpy as jnp
    >>> bool(jnp.isfinite(poisson_nll(jnp.asarray([0.0, 1000.0]), jnp.asarray([1.0, 0.0]))))
    True
    """,
)
negative_binomial_nll = _plain(
    core.negative_binomial_nll,
    """
    >>> import jax.numpy as jnp
    >>> negative_binomial_nll(jnp.zeros(1), jnp.zeros(1), jnp.ones(1)).item()  # P(0) = 1 / 2
    0.693...
    """,
)
huber = _plain(
    core.huber,
    """
    >>> import jax.numpy as jnp
    >>> huber(jnp.asarray([0.5, 3.0]), jnp.zeros(2), reduction="none").tolist()
    [0.125, 2.5]
    """,
)
log_cosh = _plain(
    core.log_cosh,
    """
    >>> import jax.numpy as jnp
    >>> log_cosh(jnp.asarray([100.0]), jnp.zeros(1)).item()
    99.306...
    """,
)
hinge = _plain(
    core.hinge,
    """
    >>> import jax.numpy as jnp
    >>> hinge(jnp.asarray([0.5, 3.0]), jnp.asarray([1.0, -1.0]), reduction="none").tolist()
    [0.5, 4.0]
    """,
)
cosine_similarity = _plain(
    core.cosine_similarity,
    """
    >>> import jax.numpy as jnp
    >>> cosine_similarity(jnp.zeros((1, 2)), jnp.ones((1, 2))).tolist()
    [0.0]
    """,
)
cosine_embedding = _plain(
    core.cosine_embedding,
    """
    >>> import jax.numpy as jnp
    >>> cosine_embedding(jnp.eye(2), jnp.eye(2)).item()
    0.0
    """,
)
info_nce = _plain(
    core.info_nce,
    """
    >>> import jax.numpy as jnp
    >>> info_nce(jnp.eye(2), jnp.eye(2), temperature=1.0).item()
    0.313...
    """,
)


__dir__ = present(globals())
