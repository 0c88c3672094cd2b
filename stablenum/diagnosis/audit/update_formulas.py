"""The roles of the entries in an optimizer's state, and the update computed from them.

The formulas are those of ``torch.optim`` and ``optax``. If a number that a formula needs is not known, the
result is None rather than a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Moments", "Role", "UpdateFormula", "update_of"]

Array = Any

_UNCORRECTED_AVERAGES = ("rmsprop", "adadelta")


class Role(StrEnum):
    """The role of an entry of the state that has one element for each element of the parameter.

    Example:
        >>> Role.SECOND.squared, Role.FIRST.squared
        (True, False)
    """

    FIRST = "first"  # the average of the gradients, which is divided by the root of the second moment
    SECOND = "second"  # the average or sum of the squared gradients
    SECOND_MAX = "second_max"  # AMSGrad's running maximum of the second moment
    NORM = "norm"  # Adamax's running maximum of the magnitudes, used instead of a root
    MEAN = "mean"  # the average that centred RMSprop subtracts
    BUFFER = "buffer"  # the momentum: the update before it is multiplied by the learning rate
    ACCUMULATOR = "accumulator"  # Adadelta's average of the squared updates
    COMPENSATION = "compensation"  # what the parameter has lost to rounding (Kahan)
    OTHER = "other"  # an unknown role; such an entry is inspected but never changed

    @property
    def squared(self) -> bool:
        """Whether the entry's values are never negative in a sound state."""
        return self in (Role.SECOND, Role.SECOND_MAX, Role.NORM, Role.ACCUMULATOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFormula:
    """An optimizer's update formula for one parameter and its hyperparameters; None for those not known.

    Attributes:
        kind: "adam", "nadam", "radam", "adamax", "rmsprop", "adagrad", "sgd", or "" if unknown.
        lr: the current learning rate.
        beta1, beta2: the decay of the first and of the second moment.
        eps: the configured value.
        eps_root: the number added under the root (optax).
        step: the number of steps that have entered the moments.
        momentum, nesterov: those of SGD and RMSprop.
        weight_decay: the coupled weight decay, which is added to the gradient.
        maximize: whether gradients are negated first.
        corrected: whether moments are divided by 1 - beta^step.
        rate_decay: Adagrad's lr_decay, or NAdam's momentum_decay.
        momentum_product: NAdam's product of momenta.
    """

    kind: str = ""
    lr: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    eps_root: float = 0.0
    step: float | None = None
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False
    corrected: bool = False
    rate_decay: float = 0.0
    momentum_product: float | None = None

    @property
    def second_correction(self) -> float | None:
        """The second moment's divisor: 1 - beta2^step, or 1 without correction; None if not known."""
        if not self.kind:
            return None
        if not self.corrected:
            return 1.0
        return None if self.beta2 is None else _correction(self.beta2, self.step)

    @property
    def average_correction(self) -> float | None:
        """The divisor that makes the second moment an average, even if the formula does not use it."""
        if self.kind in _UNCORRECTED_AVERAGES and self.beta2 is not None and self.step:
            return _correction(self.beta2, self.step)
        return self.second_correction

    @property
    def first_correction(self) -> float | None:
        """The first moment's divisor; None if not known."""
        if not self.kind:
            return None
        if not self.corrected:
            return 1.0
        return None if self.beta1 is None else _correction(self.beta1, self.step)


def _correction(beta: float, step: float | None) -> float | None:
    return None if not step or step < 1 else 1.0 - beta**step


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """The float64 arrays of one parameter, or of a block of it; None for those that do not exist."""

    first: Array | None = None
    second: Array | None = None
    norm: Array | None = None
    mean: Array | None = None
    buffer: Array | None = None
    gradient: Array | None = None


def update_of(formula: UpdateFormula, moments: Moments, *, eps: float | None, xp: Any) -> Array | None:
    """Return the update computed from the current moments, without decoupled weight decay.

    Args:
        formula: the update formula and its hyperparameters.
        moments: (n,) arrays; ``second`` is the array in the denominator (with AMSGrad, the maximum).
        eps: the value that takes part in the division: 0 if its format rounds it to 0.
        xp: the array namespace.

    Returns:
        (n,), with inf or NaN where the division gives them; None if the formula or a number that it needs is
        not known.
    """
    step = (
        _FORMULAS[formula.kind](formula, moments, eps, xp)
        if formula.kind in _FORMULAS and formula.lr is not None
        else None
    )
    return None if step is None else -step


def _root(formula: UpdateFormula, m: Moments, eps: float | None, xp: Any) -> Array | None:
    correction = formula.second_correction
    if m.second is None or eps is None or correction is None:
        return None
    return xp.sqrt(m.second / correction + formula.eps_root) + eps


def _adam(formula: UpdateFormula, m: Moments, eps: float | None, xp: Any) -> Array | None:
    root, correction = _root(formula, m, eps, xp), formula.first_correction
    if root is None or m.first is None or correction is None:
        return None
    return formula.lr * (m.first / correction / root)


def _nadam(formula: UpdateFormula, m: Moments, eps: float | None, xp: Any) -> Array | None:
    root, product, beta = _root(formula, m, eps, xp), formula.momentum_product, formula.beta1
    if root is None or m.first is None or product is None or beta is None or formula.step is None:
        return None
    gradient = _gradient(formula, m)
    if gradient is None:
        return None
    now, following = (
        beta * (1.0 - 0.5 * 0.96 ** (t * formula.rate_decay)) for t in (formula.step, formula.step + 1)
    )
    numerator = gradient * ((1.0 - now) / (1.0 - product))
    return formula.lr * ((numerator + m.first * (following / (1.0 - product * following))) / root)


def _radam(formula: UpdateFormula, m: Moments, eps: float | None, xp: Any) -> Array | None:
    first, second, t = formula.first_correction, formula.second_correction, formula.step
    if m.first is None or m.second is None or first is None or second is None or eps is None:
        return None
    if formula.beta2 is None or t is None or formula.lr is None:
        return None
    longest = 2.0 / (1.0 - formula.beta2) - 1.0
    length = longest - 2.0 * t * formula.beta2**t / second
    if length <= 5.0:
        return formula.lr * m.first / first
    rest = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return formula.lr * rest**0.5 * second**0.5 * (m.first / first / (xp.sqrt(m.second) + eps))


def _adamax(formula: UpdateFormula, m: Moments, eps: float | None, xp: Any) -> Array | None:
    correction = formula.first_correction
    if m.first is None or m.norm is None or correction is None:
        return None
    # Without a gradient so far, the norm is 0; the first gradient makes it positive before it is a divisor.
    untouched = xp.logical_and(m.norm == 0, m.first == 0)
    return formula.lr * (m.first / correction / xp.where(untouched, xp.ones_like(m.norm), m.norm))


def _rmsprop(formula: UpdateFormula, m: Moments, eps: float | None, xp: Any) -> Array | None:
    if formula.momentum:
        return None if m.buffer is None else formula.lr * m.buffer
    gradient = _gradient(formula, m)
    if gradient is None or m.second is None or eps is None:
        return None
    second = m.second if m.mean is None else m.second - m.mean * m.mean
    return formula.lr * (gradient / (xp.sqrt(second) + eps))


def _adagrad(formula: UpdateFormula, m: Moments, eps: float | None, xp: Any) -> Array | None:
    gradient = _gradient(formula, m)
    if gradient is None or m.second is None or eps is None or formula.step is None or formula.lr is None:
        return None
    lr = formula.lr / (1.0 + (formula.step - 1.0) * formula.rate_decay)
    return lr * (gradient / (xp.sqrt(m.second) + eps))


def _sgd(formula: UpdateFormula, m: Moments, eps: float | None, xp: Any) -> Array | None:
    gradient = _gradient(formula, m)
    if not formula.momentum:
        return None if gradient is None else formula.lr * gradient
    if m.buffer is None or (formula.nesterov and gradient is None):
        return None
    return formula.lr * (gradient + formula.momentum * m.buffer if formula.nesterov else m.buffer)


def _gradient(formula: UpdateFormula, m: Moments) -> Array | None:
    """Return the gradient that the formula uses; None with weight decay, because the weights that it used
    have changed since."""
    if m.gradient is None or formula.weight_decay:
        return None
    return -m.gradient if formula.maximize else m.gradient


_FORMULAS: dict[str, Callable[[UpdateFormula, Moments, float | None, Any], Array | None]] = {
    "adam": _adam,
    "nadam": _nadam,
    "radam": _radam,
    "adamax": _adamax,
    "rmsprop": _rmsprop,
    "adagrad": _adagrad,
    "sgd": _sgd,
}
