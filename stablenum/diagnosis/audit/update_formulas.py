"""The roles of the entries in an optimizer's state, and the update computed from them.

The laws are those of ``torch.optim`` and ``optax``. If a number that a law needs is not known, the result is
None rather than a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Law", "Moments", "Role", "update_of"]

Array = Any

_UNCORRECTED_AVERAGES = ("rmsprop", "adadelta")


class Role(StrEnum):
    """The role of an entry of the state, which has one element per element of the parameter.

    Example:
        >>> Role.SECOND.squared, Role.FIRST.squared
        (True, False)
    """

    FIRST = "first"  # average of the gradients, divided by the root of the second moment
    SECOND = "second"  # average or sum of the squared gradients
    SECOND_MAX = "second_max"  # AMSGrad's running maximum of the second moment
    NORM = "norm"  # Adamax: running maximum of the magnitudes, used instead of a root
    MEAN = "mean"  # centred RMSprop: the average that is subtracted
    BUFFER = "buffer"  # momentum: the update before it is multiplied by the learning rate
    ACCUMULATOR = "accumulator"  # Adadelta: average of the squared updates
    COMPENSATION = "compensation"  # Kahan: what the parameter has lost to rounding
    OTHER = "other"  # unknown: inspected, never changed

    @property
    def squared(self) -> bool:
        """Whether values are never negative in a sound state."""
        return self in (Role.SECOND, Role.SECOND_MAX, Role.NORM, Role.ACCUMULATOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """An optimizer's update rule for one parameter, with its numbers; None for those not known.

    Attributes:
        kind: "adam", "nadam", "radam", "adamax", "rmsprop", "adagrad", "sgd", or "" if unknown.
        lr: the current learning rate.
        beta1, beta2: decay of the first and second moment.
        eps: as configured.
        eps_root: added below the root (optax).
        step: the number of steps that went into the moments.
        momentum, nesterov: of SGD and RMSprop.
        weight_decay: the coupled kind, which is added to the gradient.
        maximize: gradients change sign before anything else.
        corrected: moments are divided by 1 - beta^step.
        rate_decay: Adagrad's lr_decay; NAdam's momentum_decay.
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
        """The divisor that makes the second moment an average, even if the law does not use it."""
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
    """float64 arrays of one parameter, or of a block of it; None for those that do not exist."""

    first: Array | None = None
    second: Array | None = None
    norm: Array | None = None
    mean: Array | None = None
    buffer: Array | None = None
    gradient: Array | None = None


def update_of(law: Law, moments: Moments, *, eps: float | None, xp: Any) -> Array | None:
    """Return the update that the law computes from the current moments, without decoupled weight decay.

    Args:
        law: the rule and its numbers.
        moments: (n,) arrays; ``second`` is the one in the denominator (with AMSGrad, the maximum).
        eps: as it takes part in the division: 0 if its format rounds it to 0.
        xp: array namespace.

    Returns:
        (n,), inf or NaN where the division is; None if the law or a number that it needs is not known.
    """
    step = _LAWS[law.kind](law, moments, eps, xp) if law.kind in _LAWS and law.lr is not None else None
    return None if step is None else -step


def _root(law: Law, m: Moments, eps: float | None, xp: Any) -> Array | None:
    correction = law.second_correction
    if m.second is None or eps is None or correction is None:
        return None
    return xp.sqrt(m.second / correction + law.eps_root) + eps


def _adam(law: Law, m: Moments, eps: float | None, xp: Any) -> Array | None:
    root, correction = _root(law, m, eps, xp), law.first_correction
    if root is None or m.first is None or correction is None:
        return None
    return law.lr * (m.first / correction / root)


def _nadam(law: Law, m: Moments, eps: float | None, xp: Any) -> Array | None:
    root, product, beta = _root(law, m, eps, xp), law.momentum_product, law.beta1
    if root is None or m.first is None or product is None or beta is None or law.step is None:
        return None
    gradient = _gradient(law, m)
    if gradient is None:
        return None
    now, following = (beta * (1.0 - 0.5 * 0.96 ** (t * law.rate_decay)) for t in (law.step, law.step + 1))
    numerator = gradient * ((1.0 - now) / (1.0 - product))
    return law.lr * ((numerator + m.first * (following / (1.0 - product * following))) / root)


def _radam(law: Law, m: Moments, eps: float | None, xp: Any) -> Array | None:
    first, second, t = law.first_correction, law.second_correction, law.step
    if m.first is None or m.second is None or first is None or second is None or eps is None:
        return None
    if law.beta2 is None or t is None or law.lr is None:
        return None
    longest = 2.0 / (1.0 - law.beta2) - 1.0
    length = longest - 2.0 * t * law.beta2**t / second
    if length <= 5.0:
        return law.lr * m.first / first
    rest = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return law.lr * rest**0.5 * second**0.5 * (m.first / first / (xp.sqrt(m.second) + eps))


def _adamax(law: Law, m: Moments, eps: float | None, xp: Any) -> Array | None:
    correction = law.first_correction
    if m.first is None or m.norm is None or correction is None:
        return None
    # Without a gradient so far, the norm is 0; the first gradient makes it positive before it is a divisor.
    untouched = xp.logical_and(m.norm == 0, m.first == 0)
    return law.lr * (m.first / correction / xp.where(untouched, xp.ones_like(m.norm), m.norm))


def _rmsprop(law: Law, m: Moments, eps: float | None, xp: Any) -> Array | None:
    if law.momentum:
        return None if m.buffer is None else law.lr * m.buffer
    gradient = _gradient(law, m)
    if gradient is None or m.second is None or eps is None:
        return None
    second = m.second if m.mean is None else m.second - m.mean * m.mean
    return law.lr * (gradient / (xp.sqrt(second) + eps))


def _adagrad(law: Law, m: Moments, eps: float | None, xp: Any) -> Array | None:
    gradient = _gradient(law, m)
    if gradient is None or m.second is None or eps is None or law.step is None or law.lr is None:
        return None
    lr = law.lr / (1.0 + (law.step - 1.0) * law.rate_decay)
    return lr * (gradient / (xp.sqrt(m.second) + eps))


def _sgd(law: Law, m: Moments, eps: float | None, xp: Any) -> Array | None:
    gradient = _gradient(law, m)
    if not law.momentum:
        return None if gradient is None else law.lr * gradient
    if m.buffer is None or (law.nesterov and gradient is None):
        return None
    return law.lr * (gradient + law.momentum * m.buffer if law.nesterov else m.buffer)


def _gradient(law: Law, m: Moments) -> Array | None:
    """Return the gradient that the law uses; None with weight decay, whose weights have changed since."""
    if m.gradient is None or law.weight_decay:
        return None
    return -m.gradient if law.maximize else m.gradient


_LAWS: dict[str, Callable[[Law, Moments, float | None, Any], Array | None]] = {
    "adam": _adam,
    "nadam": _nadam,
    "radam": _radam,
    "adamax": _adamax,
    "rmsprop": _rmsprop,
    "adagrad": _adagrad,
    "sgd": _sgd,
}
