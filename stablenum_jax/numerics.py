"""Safe functions: the right value and the right gradient at every edge, in every float format.

Inputs narrower than float32 are widened to float32, and the result is rounded once to the input's format.
NaN stays NaN. Finite inputs and masked elements never give NaN in the value or in the gradient. The
functions work under ``jax.jit``, ``vmap`` and ``grad``, including gradients of gradients.

Integers and bools become floating-point numbers as in ``jax.numpy``: in the format of the other array, or
else in the default one. Either of two array arguments may be a number.

Example:
    >>> import jax, jax.numpy as jnp
    >>> from stablenum_jax import numerics
    >>> jax.grad(numerics.norm)(jnp.zeros(3))
    Array([0., 0., 0.], dtype=float32)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from stablenum import numerics as core
from stablenum._support.adapter_docs import spelled_text
from stablenum._support.public_names import present

__all__ = [
    "arccos",
    "arctan2",
    "arctanh",
    "cumulative_logsumexp",
    "divide",
    "layer_norm",
    "log",
    "log1mexp",
    "log1pexp",
    "log_sigmoid",
    "log_softmax",
    "logaddexp",
    "logsubexp",
    "logsumexp",
    "norm",
    "normalize",
    "power",
    "reciprocal",
    "rms_norm",
    "rsqrt",
    "soft_cap",
    "softmax",
    "softplus",
    "sqrt",
    "std",
    "variance",
    "xlogy",
]

Axis: TypeAlias = int | tuple[int, ...] | None
_OPTIONAL = ("weight", "bias")
Function = TypeVar("Function", bound=Callable[..., Any])
xp = jnp


def _documented(source: Callable[..., Any]) -> Callable[[Function], Function]:
    """Give a function the docstring of the core's function, with its own example."""

    def document(function: Function) -> Function:
        example = f">>> import jax.numpy as jnp\n{inspect.cleandoc(function.__doc__ or '')}"
        function.__doc__ = spelled_text(source, example)
        return function

    return document


def _arrays(**values: Any) -> tuple[Any, ...]:
    """Return the arguments as JAX arrays; numbers stay numbers if an array determines the format. Integers
    and bools become floating-point numbers, as in ``jax.numpy``: in the format of the other array, or else in
    the default one.

    Raises:
        TypeError: an argument is neither a number nor an array; the message names it.
    """
    given = [v for v in values.values() if hasattr(v, "dtype")]
    for name, value in values.items():
        left_out = value is None and name in _OPTIONAL
        if not left_out and not hasattr(value, "dtype") and not isinstance(value, (float, int)):
            raise TypeError(
                f"{name} must be an array of a floating-point format; got {type(value).__name__}."
            )
    formats = [v.dtype for v in given if jnp.issubdtype(v.dtype, jnp.inexact)]
    wanted = formats[0] if formats else jnp.result_type(float)

    def array(v: Any) -> Any:
        if v is None or (given and not hasattr(v, "dtype")):
            return v
        x = jnp.asarray(v)
        return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(wanted)

    return tuple(map(array, values.values()))


@_documented(core.arccos)
def arccos(x: ArrayLike) -> jax.Array:
    """
    >>> arccos(jnp.array([1.0, 0.0]))
    Array([0.       , 1.5707964], dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.arccos(x, xp=xp)


@_documented(core.arctan2)
def arctan2(y: ArrayLike, x: ArrayLike) -> jax.Array:
    """
    >>> arctan2(jnp.array([0.0, 1.0]), jnp.array([0.0, 0.0]))
    Array([0.       , 1.5707964], dtype=float32)
    """
    y, x = _arrays(y=y, x=x)
    return core.arctan2(y, x, xp=xp)


@_documented(core.arctanh)
def arctanh(x: ArrayLike) -> jax.Array:
    """
    >>> arctanh(jnp.array([0.5, 1.0]))
    Array([0.54930615, 8.66434   ], dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.arctanh(x, xp=xp)


@_documented(core.cumulative_logsumexp)
def cumulative_logsumexp(x: ArrayLike, axis: int = -1) -> jax.Array:
    """
    >>> cumulative_logsumexp(jnp.array([-1000.0, 0.0, 0.0]))
    Array([-1.000000e+03,  0.000000e+00,  6.931472e-01], dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.cumulative_logsumexp(x, axis=axis, xp=xp)


@_documented(core.divide)
def divide(x: ArrayLike, y: ArrayLike, *, fill: float = 0.0) -> jax.Array:
    """
    >>> divide(jnp.array([1.0, 0.0]), jnp.array([2.0, 0.0]))
    Array([0.5, 0. ], dtype=float32)
    """
    x, y = _arrays(x=x, y=y)
    return core.divide(x, y, fill=fill, xp=xp)


@_documented(core.layer_norm)
def layer_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    eps: float = 1e-5,
) -> jax.Array:
    """
    >>> layer_norm(jnp.array([[1.0, 3.0], [2.0, 2.0]]), eps=0.0)
    Array([[-1.,  1.],
           [ 0.,  0.]], dtype=float32)
    """
    x, weight, bias = _arrays(x=x, weight=weight, bias=bias)
    return core.layer_norm(x, weight, bias, axis=axis, eps=eps, xp=xp)


@_documented(core.log)
def log(x: ArrayLike) -> jax.Array:
    """
    >>> log(jnp.array([1.0, 0.0]))
    Array([  0.     , -87.33655], dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.log(x, xp=xp)


@_documented(core.log1mexp)
def log1mexp(a: ArrayLike) -> jax.Array:
    """
    >>> log1mexp(jnp.array([1e-9, 50.0]))
    Array([-2.0723267e+01, -1.9287499e-22], dtype=float32)
    """
    (a,) = _arrays(a=a)
    return core.log1mexp(a, xp=xp)


@_documented(core.log1pexp)
def log1pexp(x: ArrayLike) -> jax.Array:
    """
    >>> log1pexp(jnp.array([0.0, 100.0]))
    Array([  0.6931472, 100.       ], dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.log1pexp(x, xp=xp)


@_documented(core.log_sigmoid)
def log_sigmoid(x: ArrayLike) -> jax.Array:
    """
    >>> log_sigmoid(jnp.array([-100.0, 0.0]))
    Array([-100.       ,   -0.6931472], dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.log_sigmoid(x, xp=xp)


@_documented(core.log_softmax)
def log_softmax(x: ArrayLike, axis: int = -1, *, mask: ArrayLike | None = None) -> jax.Array:
    """
    >>> log_softmax(jnp.array([[0.0, 0.0], [-jnp.inf, 5.0]]))
    Array([[-0.6931472, -0.6931472],
           [      -inf,  0.       ]], dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.log_softmax(x, axis=axis, mask=mask, xp=xp)


@_documented(core.logaddexp)
def logaddexp(a: ArrayLike, b: ArrayLike) -> jax.Array:
    """
    >>> logaddexp(jnp.array([1000.0, -jnp.inf]), jnp.array([1000.0, -jnp.inf]))
    Array([1000.6932,      -inf], dtype=float32)
    """
    a, b = _arrays(a=a, b=b)
    return core.logaddexp(a, b, xp=xp)


@_documented(core.logsubexp)
def logsubexp(a: ArrayLike, b: ArrayLike) -> jax.Array:
    """
    >>> logsubexp(jnp.array([1000.0, 2.0]), jnp.array([999.0, 2.0]))
    Array([999.5413,     -inf], dtype=float32)
    """
    a, b = _arrays(a=a, b=b)
    return core.logsubexp(a, b, xp=xp)


@_documented(core.logsumexp)
def logsumexp(
    x: ArrayLike, axis: int = -1, *, mask: ArrayLike | None = None, keepdims: bool = False
) -> jax.Array:
    """
    >>> logsumexp(jnp.array([[1000.0, 1000.0], [-jnp.inf, -jnp.inf]]))
    Array([1000.6932,      -inf], dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.logsumexp(x, axis=axis, mask=mask, keepdims=keepdims, xp=xp)


@_documented(core.norm)
def norm(x: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> jax.Array:
    """
    >>> norm(jnp.array([[3e30, 4e30], [0.0, 0.0]]), axis=1)
    Array([5.e+30, 0.e+00], dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.norm(x, axis=axis, keepdims=keepdims, xp=xp)


@_documented(core.normalize)
def normalize(x: ArrayLike, axis: Axis = -1) -> jax.Array:
    """
    >>> normalize(jnp.array([[3.0, 4.0], [0.0, 0.0]]))
    Array([[0.6, 0.8],
           [0. , 0. ]], dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.normalize(x, axis=axis, xp=xp)


@_documented(core.power)
def power(x: ArrayLike, exponent: ArrayLike, *, fill: float = 0.0) -> jax.Array:
    """
    >>> power(jnp.array([4.0, 0.0]), 0.5)
    Array([2., 0.], dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.power(x, exponent, fill=fill, xp=xp)


@_documented(core.reciprocal)
def reciprocal(x: ArrayLike, *, fill: float = 0.0) -> jax.Array:
    """
    >>> reciprocal(jnp.array([4.0, 0.0]))
    Array([0.25, 0.  ], dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.reciprocal(x, fill=fill, xp=xp)


@_documented(core.rms_norm)
def rms_norm(
    x: ArrayLike, weight: ArrayLike | None = None, *, axis: Axis = -1, eps: float = 1e-6
) -> jax.Array:
    """
    >>> rms_norm(jnp.array([[3.0, 4.0], [0.0, 0.0]]))
    Array([[0.8485281, 1.1313708],
           [0.       , 0.       ]], dtype=float32)
    """
    x, weight = _arrays(x=x, weight=weight)
    return core.rms_norm(x, weight, axis=axis, eps=eps, xp=xp)


@_documented(core.rsqrt)
def rsqrt(x: ArrayLike, *, fill: float = 0.0) -> jax.Array:
    """
    >>> rsqrt(jnp.array([4.0, 0.0]))
    Array([0.5, 0. ], dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.rsqrt(x, fill=fill, xp=xp)


@_documented(core.soft_cap)
def soft_cap(x: ArrayLike, cap: float) -> jax.Array:
    """
    >>> soft_cap(jnp.array([1.0, 1e9]), 30.0)
    Array([ 0.9996298, 30.       ], dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.soft_cap(x, cap, xp=xp)


@_documented(core.softmax)
def softmax(x: ArrayLike, axis: int = -1, *, mask: ArrayLike | None = None) -> jax.Array:
    """
    >>> softmax(jnp.array([[0.0, 0.0], [-jnp.inf, -jnp.inf]]))
    Array([[0.5, 0.5],
           [0. , 0. ]], dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.softmax(x, axis=axis, mask=mask, xp=xp)


@_documented(core.softplus)
def softplus(x: ArrayLike) -> jax.Array:
    """
    >>> softplus(jnp.array([0.0, 100.0]))
    Array([  0.6931472, 100.       ], dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.softplus(x, xp=xp)


@_documented(core.sqrt)
def sqrt(x: ArrayLike) -> jax.Array:
    """
    >>> sqrt(jnp.array([4.0, 0.0, -1.0]))
    Array([2., 0., 0.], dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.sqrt(x, xp=xp)


@_documented(core.std)
def std(x: ArrayLike, axis: Axis = -1, *, correction: int = 0, keepdims: bool = False) -> jax.Array:
    """
    >>> std(jnp.array([[1.0, 3.0], [0.1, 0.1]]))
    Array([0.99999994, 0.        ], dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.std(x, axis=axis, correction=correction, keepdims=keepdims, xp=xp)


@_documented(core.variance)
def variance(x: ArrayLike, axis: Axis = -1, *, correction: int = 0, keepdims: bool = False) -> jax.Array:
    """
    >>> variance(jnp.array([10000.0, 10002.0]))
    Array(1., dtype=float32)
    """
    (x,) = _arrays(x=x)
    return core.variance(x, axis=axis, correction=correction, keepdims=keepdims, xp=xp)


@_documented(core.xlogy)
def xlogy(x: ArrayLike, y: ArrayLike) -> jax.Array:
    """
    >>> xlogy(jnp.array([0.0, 2.0]), jnp.array([0.0, 1.0]))
    Array([0., 0.], dtype=float32)
    """
    x, y = _arrays(x=x, y=y)
    return core.xlogy(x, y, xp=xp)


__dir__ = present(globals())
