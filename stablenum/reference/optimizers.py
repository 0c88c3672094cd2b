"""NumPy optimizers for the reference: torch's formulas in torch's order of operations.

The optimizers are pure functions of one parameter, so a step is skipped by not calling them. The state has
the parameter's dtype, as in torch; each operation computes in float32 or wider and rounds once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from stablenum._support.settings_checks import check_number
from stablenum.errors import bad_field

__all__ = ["SGD", "Adam", "AdamState", "AdamW", "Optimizer", "SGDState", "wide_dtype"]

Array: TypeAlias = "np.ndarray[Any, Any]"


class Optimizer(Protocol):
    """A pure optimizer for one parameter, as :class:`Guarded` uses it."""

    @property
    def lr(self) -> float:
        """The learning rate."""
        ...

    def init(self, param: Array) -> Any:
        """Return the state before the first step."""

    def update(self, param: Array, gradient: Array, state: Any) -> tuple[Array, Any]:
        """Return the next parameter and the next state; the arguments are not changed."""


class SGDState(NamedTuple):
    """The momentum of one parameter. ``momentum_buffer`` is None before the first step, as in torch."""

    momentum_buffer: Array | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """Stochastic gradient descent in the operation order of ``torch.optim.SGD``.

    Args:
        lr: the learning rate.
        momentum, dampening, weight_decay, nesterov: as in torch.

    Raises:
        ValueError: a setting is out of its range; torch rejects it too.

    Example:
        >>> param, state = SGD(lr=0.1).update(np.ones(1, np.float32), np.ones(1, np.float32), SGDState(None))
        >>> param.round(3).tolist()
        [0.8999...]
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_number("SGD.lr", self.lr, at_least=0.0)
        check_number("SGD.momentum", self.momentum, at_least=0.0)
        check_number("SGD.dampening", self.dampening)
        check_number("SGD.weight_decay", self.weight_decay, at_least=0.0)
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise bad_field("SGD.nesterov", "False unless momentum is above 0 and dampening is 0", True)

    def init(self, param: Array) -> SGDState:
        """Return the state before the first step: no momentum."""
        return SGDState(None)

    def update(self, param: Array, gradient: Array, state: SGDState) -> tuple[Array, SGDState]:
        """Take one step."""
        buffer = state.momentum_buffer
        if self.weight_decay != 0:
            gradient = _add(gradient, param, self.weight_decay)
        if self.momentum != 0:
            if buffer is None:
                buffer = gradient.copy()
            else:
                buffer = _add(_mul(buffer, self.momentum), gradient, 1 - self.dampening)
            gradient = _add(gradient, buffer, self.momentum) if self.nesterov else buffer
        return _add(param, gradient, -self.lr), SGDState(buffer)


class AdamState(NamedTuple):
    """The step count, and the two moments in the parameter's dtype."""

    step: int
    exp_avg: Array
    exp_avg_sq: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Adam in the operation order of ``torch.optim.Adam`` (Kingma and Ba 2015, arXiv 1412.6980).

    The moments have the parameter's dtype, so Adam in pure float16 behaves as it does in torch: eps
    rounds to 0, and a zero gradient gives 0/0.

    Args:
        lr: the learning rate.
        betas, eps, weight_decay: as in torch.
        decoupled: whether weight decay acts on the parameter (AdamW, arXiv 1711.05101) instead of the
            gradient.

    Raises:
        ValueError: a setting is out of its range; torch rejects it too.

    Example:
        >>> adam = Adam(lr=0.1)
        >>> param = np.ones(1, np.float32)
        >>> adam.update(param, np.ones(1, np.float32), adam.init(param))[0].round(3).tolist()
        [0.8999...]
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        check_number("Adam.lr", self.lr, at_least=0.0)
        for i, beta in enumerate(self.betas):
            check_number(f"Adam.betas[{i}]", beta, at_least=0.0, below=1.0)
        check_number("Adam.eps", self.eps, at_least=0.0)
        check_number("Adam.weight_decay", self.weight_decay, at_least=0.0)

    def init(self, param: Array) -> AdamState:
        """Return the state before the first step: zero moments."""
        return AdamState(0, np.zeros_like(param), np.zeros_like(param))

    def update(self, param: Array, gradient: Array, state: AdamState) -> tuple[Array, AdamState]:
        """Take one step."""
        beta1, beta2 = self.betas
        step = state.step + 1
        if self.weight_decay != 0 and self.decoupled:
            param = _mul(param, 1 - self.lr * self.weight_decay)
        elif self.weight_decay != 0:
            gradient = _add(gradient, param, self.weight_decay)
        exp_avg = _lerp(state.exp_avg, gradient, 1 - beta1)
        exp_avg_sq = _addcmul(_mul(state.exp_avg_sq, beta2), gradient, 1 - beta2)
        bias1, bias2 = 1 - beta1**step, 1 - beta2**step
        denominator = _shift(_div(_sqrt(exp_avg_sq), math.sqrt(bias2)), self.eps)
        param = _addcdiv(param, exp_avg, denominator, -self.lr / bias1)
        return param, AdamState(step, exp_avg, exp_avg_sq)


def AdamW(  # noqa: N802 - the usual name
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Adam:
    """Adam with decoupled weight decay and the defaults of ``torch.optim.AdamW``.

    Example:
        >>> AdamW().decoupled
        True
    """
    return Adam(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled=True)


# torch's element-wise operations: the arithmetic is in float32 or wider and is rounded to the dtype once, at
# the end.


def _add(a: Array, b: Array, alpha: float) -> Array:
    wide = wide_dtype(a.dtype)
    return _rounded(a.astype(wide) + wide.type(alpha) * b.astype(wide), a)


def _mul(a: Array, factor: float) -> Array:
    wide = wide_dtype(a.dtype)
    return _rounded(a.astype(wide) * wide.type(factor), a)


def _div(a: Array, divisor: float) -> Array:
    wide = wide_dtype(a.dtype)
    return _rounded(a.astype(wide) / wide.type(divisor), a)


def _shift(a: Array, value: float) -> Array:
    wide = wide_dtype(a.dtype)
    return _rounded(a.astype(wide) + wide.type(value), a)


def _sqrt(a: Array) -> Array:
    return _rounded(np.sqrt(a.astype(wide_dtype(a.dtype))), a)


def _lerp(start: Array, end: Array, weight: float) -> Array:
    wide = wide_dtype(start.dtype)
    a, b = start.astype(wide), end.astype(wide)
    if weight < 0.5:
        return _rounded(a + wide.type(weight) * (b - a), start)
    return _rounded(b - (b - a) * (1 - wide.type(weight)), start)


def _addcmul(a: Array, b: Array, value: float) -> Array:
    wide = wide_dtype(a.dtype)
    b = b.astype(wide)
    return _rounded(a.astype(wide) + wide.type(value) * b * b, a)


def _addcdiv(a: Array, b: Array, c: Array, value: float) -> Array:
    wide = wide_dtype(a.dtype)
    return _rounded(a.astype(wide) + wide.type(value) * b.astype(wide) / c.astype(wide), a)


def _rounded(wide: Any, like: Array) -> Array:
    rounded: Array = wide.astype(like.dtype)
    return rounded


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the arithmetic: float32 for 16-bit formats, otherwise the dtype itself."""
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype
