"""Name the cause of a difference between two updates by the laws that they follow."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from stablenum.diagnosis.diff.causes.formulas.update_laws import DIGITS_OF_RATE, Law

__all__ = ["LEAST_POWER", "Found", "cause_of_laws", "cause_of_rates", "is_limit", "near"]


class Found(NamedTuple):
    """A cause: its code, a sentence, and whether each side's own numbers give it."""

    code: str
    sentence: str
    sure: bool = True


_Numbers: TypeAlias = tuple[Collection[float], Collection[float]]

_USUAL = (0.9, 0.999)  # the decay rates of Adam's moments in torch and optax
# Above, a number is one minus an epsilon rather than the decay rate of a moment.
_LARGEST_RATE = 0.9999
# A factor of 2 is a doubled rate rather than the missing correction of a moment with a decay rate of 0.5.
_SMALLEST_RATE = 0.5
# A loss scale is a power of two, and larger than the factors 2 and 4 that losses are written with.
LEAST_POWER = 3
# How near a fitted constant is to one that is written, or to that of the other side, if it is the same.
# Chosen, not measured.
_ROUGHLY = 1e-3
# How near a factor is to that of a clipped norm: torch divides the limit by the norm + 1e-6, which changes it
# by less if the norm is above 0.01.
_CLIPPED = 1e-4
# How near all other numbers are that are the same. Chosen, not measured.
_EQUAL = 1e-5
_NOTHING = 1e-14  # an epsilon that no optimizer has


def cause_of_laws(a: Law, b: Law, numbers: _Numbers, norm: float) -> Found | None:
    """Return the cause; None if only the rates differ, or for the reason of no optimizer's form.

    Args:
        a, b: the laws of the left and the right side.
        numbers: the constants of each side's update.
        norm: that of all gradients.
    """
    if {a.name, b.name} == {"inside", "outside"}:
        return Found("adam_epsilon_placement", "only one side has the epsilon inside the root.")
    if a.name != b.name:
        return Found("other_function", "the two sides update by different formulas.")
    if _is_sign(a, numbers[0]) != _is_sign(b, numbers[1]):
        side = "left" if _is_sign(a, numbers[0]) else "right"
        return Found("other_function", f"only the {side} side takes the sign of the gradient.")
    if bool(a.decay) != bool(b.decay):
        return Found("decay_coupling", f"only the {'left' if a.decay else 'right'} side decays the weights.")
    if a.coupled != b.coupled:
        return Found("decay_coupling", "only one side adds the decay to the gradient.")
    if a.name == "gradient":
        return _of_limits(a, b, numbers, norm) or _of_factor(a, b, numbers)
    return _of_factor(a, b, numbers) or _of_epsilons(a, b, numbers, norm)


def cause_of_rates(a: Law, b: Law, numbers: _Numbers) -> Found | None:
    """Return the cause if the laws differ in their rates or in how much they decay. A rate that is no number
    of its side is a product of several."""
    if not near(a.rate, b.rate):
        written = all(_among(law.rate, own) for law, own in zip((a, b), numbers, strict=True))
        sentence = f"the rate is {a.rate:.6g} on the left and {b.rate:.6g} on the right."
        return Found("scale", sentence, sure=written)
    if not near(a.decay, b.decay):
        return Found("decay_coupling", "the two sides decay the weights by different amounts.")
    return None


def _of_limits(a: Law, b: Law, numbers: _Numbers, norm: float) -> Found | None:
    """Name what the rates are made of, where each side's own numbers give them: a rate, and the limit of the
    norm of all gradients over that norm."""
    if near(a.rate, b.rate, _ROUGHLY):
        return None
    mine, theirs = (_rates_and_limits(law, own, norm) for law, own in zip((a, b), numbers, strict=True))
    pairs = [(x, y) for x in mine for y in theirs]
    for (rate, limit), (other, further) in pairs:
        if limit < math.inf and near(limit, further) and not near(rate, other):
            return Found("scale", f"the rate is {rate:.6g} on the left and {other:.6g} on the right.")
    told = [(c, d) for (rate, c), (other, d) in pairs if near(rate, other) and not near(c, d)]
    return Found("clip_missing", _of_two_limits(*told[0])) if told else None


def _of_two_limits(mine: float, theirs: float) -> str:
    if math.inf in (mine, theirs):
        side = "right" if mine == math.inf else "left"
        return f"only the {side} side clips the gradients, to the norm {min(mine, theirs):.6g}."
    return f"the left side clips the gradients to the norm {mine:.6g}, the right one to {theirs:.6g}."


def _rates_and_limits(law: Law, own: Collection[float], norm: float) -> list[tuple[float, float]]:
    """Return the rates and limits of a side whose product over the norm is the law's rate, and that alone
    with an infinite limit. Of two numbers, the smaller one is taken for the rate."""
    whole = [(rate, math.inf) for rate in own if near(rate, law.rate)]
    clipped = [(r, c) for r in own for c in own if r <= c < norm and near(r * c, law.rate * norm, _CLIPPED)]
    return whole + clipped


def _of_factor(a: Law, b: Law, numbers: _Numbers) -> Found | None:
    """Name the factor between two rates by the decay rates of the moments."""
    ratio = a.rate / b.rate
    size = max(ratio, 1 / ratio) if ratio > 0 else 0.0
    written = all(_among(law.rate, own) for law, own in zip((a, b), numbers, strict=True))
    if size < 1 + _ROUGHLY or (written and near(a.epsilon, b.epsilon, _ROUGHLY)):
        return None
    scale = _left_in(size)
    if scale is not None:
        return scale
    if a.decay and a.name != "gradient" and near(a.decay / b.decay, ratio):
        return None  # the rate, which the decay is multiplied by too
    betas = None if a.name == "gradient" else _of_betas(a, b, numbers)
    if betas is not None:
        return betas
    every = {*numbers[0], *numbers[1]}
    for known, sure in ((every, True), (_USUAL, False)):
        found = _of_moments(a.name, size, _decay_rates(known))
        if found is not None:
            return found._replace(sure=sure)
    return None


def _decay_rates(numbers: Iterable[float]) -> list[float]:
    return [x for n in numbers for x in (n, 1 - n) if _SMALLEST_RATE <= x <= _LARGEST_RATE]


def _of_moments(name: str, size: float, rates: Sequence[float]) -> Found | None:
    """Name a factor by decay rates of the moments: what Nesterov's form, dampening or a missing correction
    makes of a first step."""
    if any(near(size, 1 + x if name == "gradient" else 1 + x / (1 + x)) for x in rates):
        return Found("nesterov", f"the two updates differ by the factor {size:.6g}, as with Nesterov's form.")
    if name == "gradient":
        dampened = any(near(size, 1 / (1 - x)) for x in rates if x > _SMALLEST_RATE)
        sentence = f"only one side multiplies the gradient by {1 / size:.6g}."
        return Found("momentum_dampening", sentence) if dampened else None
    both = [(1 - x) / math.sqrt(1 - y) for x in rates for y in rates if x < y]
    either = [f(1 - x) for x in rates if x > _SMALLEST_RATE for f in (float, math.sqrt)]
    if any(near(size, max(c, 1 / c)) for c in (*both, *either)):
        return Found("bias_correction", "only one side corrects the moments for their start at zero.")
    return None


def _of_betas(a: Law, b: Law, numbers: _Numbers) -> Found | None:
    """Return the decay rates of two means of squares, neither corrected for its start at zero, where each
    side's own numbers give them."""
    mine, theirs = (_uncorrected(law, own) for law, own in zip((a, b), numbers, strict=True))
    for rate, beta in mine:
        for other, further in theirs:
            if near(rate, other) and not near(beta, further):
                return Found(
                    "betas",
                    f"the squares decay by {beta:.6g} on the left and by {further:.6g} on the right.",
                )
    return None


def _uncorrected(law: Law, own: Collection[float]) -> list[tuple[float, float]]:
    """Return the rates r and decay rates b of squares that give a law's rate as r / sqrt(1 - b)."""
    betas = {
        x for n in own for x in (n, round(1 - n, DIGITS_OF_RATE)) if _SMALLEST_RATE <= x <= _LARGEST_RATE
    }
    return [(r, x) for r in own for x in betas if near(r / math.sqrt(1 - x), law.rate)]


def _of_epsilons(a: Law, b: Law, numbers: _Numbers, norm: float) -> Found | None:
    """Name the factor between two epsilons, which is also that between gradients whose size cancels."""
    ratio = a.epsilon / b.epsilon if a.epsilon and b.epsilon else 1.0
    if near(ratio, 1.0, _CLIPPED) or not near(a.rate, b.rate, _ROUGHLY):
        return None
    told = f"the epsilon is {a.epsilon:.4g} on the left and {b.epsilon:.4g} on the right."
    if all(_among(law.epsilon, own) for law, own in zip((a, b), numbers, strict=True)):
        return Found("epsilon_value", told)
    every = {*numbers[0], *numbers[1]}
    if is_limit(ratio, norm, every):
        return Found("clip_missing", "only one side clips the gradients, or the norms differ.")
    scale = _left_in(max(ratio, 1 / ratio))
    if scale is not None:
        return scale
    if _is_correction(ratio, every):
        # With decay rates of 0.9 and 0.99, both moments have the same correction, and none is seen.
        return _EITHER if _is_correction(ratio, every, power=1) else _BEFORE_CORRECTION
    if any(_among(law.epsilon, numbers[0]) and _among(law.epsilon, numbers[1]) for law in (a, b)):
        return Found("scale", f"the gradients on the left are {1 / ratio:.6g} times those on the right.")
    if _is_correction(ratio, _USUAL):
        return _BEFORE_CORRECTION._replace(sure=False)
    return Found("epsilon_value", told, sure=False)


_BEFORE_CORRECTION = Found(
    "adam_epsilon_placement", "only one side adds the epsilon before the bias correction."
)
_EITHER = Found(
    "adam_epsilon_placement",
    "only one side adds the epsilon before the bias correction, or only one side has a correction: with "
    "these decay rates, the two are the same in the first step.",
    sure=False,
)


def _is_correction(ratio: float, numbers: Iterable[float], *, power: float = 0.5) -> bool:
    """Return whether a factor is that of Adam's bias correction in the first step, by one of some numbers: of
    the second moment, whose root is taken, or with a power of 1 of the first one."""
    rates = [x for n in numbers for x in (n, 1 - n) if 0 < x < 1]
    return any(near(min(ratio, 1 / ratio), (1 - x) ** power, _ROUGHLY) for x in rates)


def _is_sign(law: Law, numbers: Collection[float]) -> bool:
    return law.name == "outside" and law.epsilon < _NOTHING and not _among(law.epsilon, numbers)


def is_limit(factor: float, norm: float, numbers: Collection[float]) -> bool:
    """Return whether a factor is that of a clipped norm: the largest norm over that of all gradients."""
    return factor > 0 and any(near(norm * min(factor, 1 / factor), x, _CLIPPED) for x in numbers)


def near(a: float, b: float, gap: float = _EQUAL) -> bool:
    """Return whether two numbers are equal but for a relative gap."""
    return a == b or abs(a - b) <= gap * abs(b) < math.inf


def _among(x: float, numbers: Collection[float]) -> bool:
    return any(near(x, n, _ROUGHLY) for n in numbers)


def _left_in(size: float) -> Found | None:
    """Name a power of two of at least 8 between the gradients."""
    power = math.log2(size)
    # Powers are whole up to 5e-11 in the tests, and others are not by 0.09 and more.
    if power < LEAST_POWER or abs(power - round(power)) >= 1e-6:
        return None
    return Found("loss_scale_left_in", f"a factor of 2^{round(power)} is left in the gradients.", sure=False)
