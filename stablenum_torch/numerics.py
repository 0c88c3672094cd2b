"""Safe functions: the right value and the right gradient at every edge, in every float format.

Inputs narrower than float32 are widened to float32, and the result is rounded once to the input's format,
even under autocast. NaN stays NaN. Finite inputs and masked elements never give NaN in the value or
in the gradient. The functions work under ``torch.compile(fullgraph=True)``, ``torch.func.vmap`` and ``grad``,
are twice differentiable, and never make the host wait for the device.

Integers and bools become floating-point numbers as in torch's own functions: in the format of the other
tensor, or else in the default one. Either of two tensors may be a plain number.

Example:
    >>> import torch
    >>> from stablenum_torch import numerics
    >>> x = torch.zeros(3, requires_grad=True)
    >>> numerics.norm(x).backward()
    >>> x.grad
    tensor([0., 0., 0.])
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import array_api_compat.torch as xp
import torch
from torch import Tensor

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
Function = TypeVar("Function", bound=Callable[..., Tensor])


_WORDS = (
    ("``axis``", "``dim``"),
    ("axis:", "dim:"),
    ("keepdims: keep the axis", "keepdim: keep the dimension"),
    ("keepdims: keep the axes", "keepdim: keep the dimensions"),
    ("an axis", "a dimension"),
)


def _documented(source: Callable[..., Any]) -> Callable[[Function], Function]:
    """Give a function the core's docstring, in torch's terms, followed by its own example."""

    def document(function: Function) -> Function:
        example = f">>> import torch\n{inspect.cleandoc(function.__doc__ or '')}"
        function.__doc__ = spelled_text(source, example, words=_WORDS)
        return function

    return document


def _tensors(**values: Any) -> tuple[Any, ...]:
    """Return the arguments, checked. Whole numbers and bools become floating-point numbers, as in torch's own
    functions: in the format of the other tensor, or else in torch's default one.

    Raises:
        TypeError: an argument is not a tensor, a number or None; the message names it.
    """
    for name, value in values.items():
        left_out = value is None and name in _OPTIONAL
        if not left_out and not isinstance(value, (Tensor, float, int)):
            raise TypeError(
                f"{name} must be a tensor of a floating-point format; got {type(value).__name__}."
            )
    tensors = [v for v in values.values() if isinstance(v, Tensor)]
    formats = [t.dtype for t in tensors if t.is_floating_point() or t.is_complex()]
    if len(formats) == len(tensors):
        return tuple(values.values())
    wanted = formats[0] if formats else torch.get_default_dtype()
    whole = {id(t) for t in tensors if not (t.is_floating_point() or t.is_complex())}
    return tuple(v.to(wanted) if id(v) in whole else v for v in values.values())


@_documented(core.arccos)
def arccos(x: Tensor) -> Tensor:
    """
    >>> arccos(torch.tensor([1.0, 0.0]))
    tensor([0.0000, 1.5708])
    """
    (x,) = _tensors(x=x)
    return core.arccos(x, xp=xp)


@_documented(core.arctan2)
def arctan2(y: Tensor | float, x: Tensor | float) -> Tensor:
    """
    >>> arctan2(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0]))
    tensor([0.0000, 1.5708])
    """
    y, x = _tensors(y=y, x=x)
    return core.arctan2(y, x, xp=xp)


@_documented(core.arctanh)
def arctanh(x: Tensor) -> Tensor:
    """
    >>> arctanh(torch.tensor([0.5, 1.0]))
    tensor([0.5493, 8.6643])
    """
    (x,) = _tensors(x=x)
    return core.arctanh(x, xp=xp)


@_documented(core.cumulative_logsumexp)
def cumulative_logsumexp(x: Tensor, dim: int = -1) -> Tensor:
    """
    >>> cumulative_logsumexp(torch.tensor([-1000.0, 0.0, 0.0]))
    tensor([-1.0000e+03,  0.0000e+00,  6.9315e-01])
    """
    (x,) = _tensors(x=x)
    return core.cumulative_logsumexp(x, axis=dim, xp=xp)


@_documented(core.divide)
def divide(x: Tensor | float, y: Tensor | float, *, fill: float = 0.0) -> Tensor:
    """
    >>> divide(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]))
    tensor([0.5000, 0.0000])
    """
    x, y = _tensors(x=x, y=y)
    return core.divide(x, y, fill=fill, xp=xp)


@_documented(core.layer_norm)
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, dim: Axis = -1, eps: float = 1e-5
) -> Tensor:
    """
    >>> layer_norm(torch.tensor([[1.0, 3.0], [2.0, 2.0]]), eps=0.0)
    tensor([[-1.,  1.],
            [ 0.,  0.]])
    """
    x, weight, bias = _tensors(x=x, weight=weight, bias=bias)
    return core.layer_norm(x, weight, bias, axis=dim, eps=eps, xp=xp)


@_documented(core.log)
def log(x: Tensor) -> Tensor:
    """
    >>> log(torch.tensor([1.0, 0.0]))
    tensor([  0.0000, -87.3365])
    """
    (x,) = _tensors(x=x)
    return core.log(x, xp=xp)


@_documented(core.log1mexp)
def log1mexp(a: Tensor) -> Tensor:
    """
    >>> log1mexp(torch.tensor([1e-9, 50.0]))
    tensor([-2.0723e+01, -1.9287e-22])
    """
    (a,) = _tensors(a=a)
    return core.log1mexp(a, xp=xp)


@_documented(core.log1pexp)
def log1pexp(x: Tensor) -> Tensor:
    """
    >>> log1pexp(torch.tensor([0.0, 100.0]))
    tensor([  0.6931, 100.0000])
    """
    (x,) = _tensors(x=x)
    return core.log1pexp(x, xp=xp)


@_documented(core.log_sigmoid)
def log_sigmoid(x: Tensor) -> Tensor:
    """
    >>> log_sigmoid(torch.tensor([-100.0, 0.0]))
    tensor([-100.0000,   -0.6931])
    """
    (x,) = _tensors(x=x)
    return core.log_sigmoid(x, xp=xp)


@_documented(core.log_softmax)
def log_softmax(x: Tensor, dim: int = -1, *, mask: Tensor | None = None) -> Tensor:
    """
    >>> log_softmax(torch.tensor([[0.0, 0.0], [-torch.inf, 5.0]]))
    tensor([[-0.6931, -0.6931],
            [   -inf,  0.0000]])
    """
    (x,) = _tensors(x=x)
    return core.log_softmax(x, axis=dim, mask=mask, xp=xp)


@_documented(core.logaddexp)
def logaddexp(a: Tensor | float, b: Tensor | float) -> Tensor:
    """
    >>> logaddexp(torch.tensor([1000.0, -torch.inf]), torch.tensor([1000.0, -torch.inf]))
    tensor([1000.6932,      -inf])
    """
    a, b = _tensors(a=a, b=b)
    return core.logaddexp(a, b, xp=xp)


@_documented(core.logsubexp)
def logsubexp(a: Tensor | float, b: Tensor | float) -> Tensor:
    """
    >>> logsubexp(torch.tensor([1000.0, 2.0]), torch.tensor([999.0, 2.0]))
    tensor([999.5413,     -inf])
    """
    a, b = _tensors(a=a, b=b)
    return core.logsubexp(a, b, xp=xp)


@_documented(core.logsumexp)
def logsumexp(x: Tensor, dim: int = -1, *, mask: Tensor | None = None, keepdim: bool = False) -> Tensor:
    """
    >>> logsumexp(torch.tensor([[1000.0, 1000.0], [-torch.inf, -torch.inf]]))
    tensor([1000.6932,      -inf])
    """
    (x,) = _tensors(x=x)
    return core.logsumexp(x, axis=dim, mask=mask, keepdims=keepdim, xp=xp)


@_documented(core.norm)
def norm(x: Tensor, dim: Axis = None, *, keepdim: bool = False) -> Tensor:
    """
    >>> norm(torch.tensor([[3e30, 4e30], [0.0, 0.0]]), dim=1)
    tensor([5.0000e+30, 0.0000e+00])
    """
    (x,) = _tensors(x=x)
    return core.norm(x, axis=dim, keepdims=keepdim, xp=xp)


@_documented(core.normalize)
def normalize(x: Tensor, dim: Axis = -1) -> Tensor:
    """
    >>> normalize(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    (x,) = _tensors(x=x)
    return core.normalize(x, axis=dim, xp=xp)


@_documented(core.power)
def power(x: Tensor, exponent: float | Tensor, *, fill: float = 0.0) -> Tensor:
    """
    >>> power(torch.tensor([4.0, 0.0]), 0.5)
    tensor([2., 0.])
    """
    (x,) = _tensors(x=x)
    return core.power(x, exponent, fill=fill, xp=xp)


@_documented(core.reciprocal)
def reciprocal(x: Tensor, *, fill: float = 0.0) -> Tensor:
    """
    >>> reciprocal(torch.tensor([4.0, 0.0]))
    tensor([0.2500, 0.0000])
    """
    (x,) = _tensors(x=x)
    return core.reciprocal(x, fill=fill, xp=xp)


@_documented(core.rms_norm)
def rms_norm(x: Tensor, weight: Tensor | None = None, *, dim: Axis = -1, eps: float = 1e-6) -> Tensor:
    """
    >>> rms_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.8485, 1.1314],
            [0.0000, 0.0000]])
    """
    x, weight = _tensors(x=x, weight=weight)
    return core.rms_norm(x, weight, axis=dim, eps=eps, xp=xp)


@_documented(core.rsqrt)
def rsqrt(x: Tensor, *, fill: float = 0.0) -> Tensor:
    """
    >>> rsqrt(torch.tensor([4.0, 0.0]))
    tensor([0.5000, 0.0000])
    """
    (x,) = _tensors(x=x)
    return core.rsqrt(x, fill=fill, xp=xp)


@_documented(core.soft_cap)
def soft_cap(x: Tensor, cap: float) -> Tensor:
    """
    >>> soft_cap(torch.tensor([1.0, 1e9]), 30.0)
    tensor([ 0.9996, 30.0000])
    """
    (x,) = _tensors(x=x)
    return core.soft_cap(x, cap, xp=xp)


@_documented(core.softmax)
def softmax(x: Tensor, dim: int = -1, *, mask: Tensor | None = None) -> Tensor:
    """
    >>> softmax(torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]]))
    tensor([[0.5000, 0.5000],
            [0.0000, 0.0000]])
    """
    (x,) = _tensors(x=x)
    return core.softmax(x, axis=dim, mask=mask, xp=xp)


@_documented(core.softplus)
def softplus(x: Tensor) -> Tensor:
    """
    >>> softplus(torch.tensor([0.0, 100.0]))
    tensor([  0.6931, 100.0000])
    """
    (x,) = _tensors(x=x)
    return core.softplus(x, xp=xp)


@_documented(core.sqrt)
def sqrt(x: Tensor) -> Tensor:
    """
    >>> sqrt(torch.tensor([4.0, 0.0, -1.0]))
    tensor([2., 0., 0.])
    """
    (x,) = _tensors(x=x)
    return core.sqrt(x, xp=xp)


@_documented(core.std)
def std(x: Tensor, dim: Axis = -1, *, correction: int = 0, keepdim: bool = False) -> Tensor:
    """
    >>> std(torch.tensor([[1.0, 3.0], [0.1, 0.1]]))
    tensor([1., 0.])
    """
    (x,) = _tensors(x=x)
    return core.std(x, axis=dim, correction=correction, keepdims=keepdim, xp=xp)


@_documented(core.variance)
def variance(x: Tensor, dim: Axis = -1, *, correction: int = 0, keepdim: bool = False) -> Tensor:
    """
    >>> variance(torch.tensor([10000.0, 10002.0]))
    tensor(1.)
    """
    (x,) = _tensors(x=x)
    return core.variance(x, axis=dim, correction=correction, keepdims=keepdim, xp=xp)


@_documented(core.xlogy)
def xlogy(x: Tensor | float, y: Tensor | float) -> Tensor:
    """
    >>> xlogy(torch.tensor([0.0, 2.0]), torch.tensor([0.0, 1.0]))
    tensor([0., 0.])
    """
    x, y = _tensors(x=x, y=y)
    return core.xlogy(x, y, xp=xp)


__dir__ = present(globals())
