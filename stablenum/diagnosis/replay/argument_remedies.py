"""What to do about an operation whose arguments are at fault: numbers too large for it, or below 0."""

from __future__ import annotations

import math

from stablenum.diagnosis.replay.findings import Finding
from stablenum.formats import FORMATS, Format

__all__ = [
    "largest_exponent",
    "lost_squares",
    "on_negative",
    "on_only_zeros",
    "on_overflow",
    "on_underflowed",
]

_OWN_DERIVATIVE = (
    "this derivative is written by hand, and its parts leave the range of numbers where it is small itself: "
    "write it with functions that stay in range, as sigmoid(x) * (1 - sigmoid(x)) for exp(x) / (1 + "
    "exp(x))^2, or clamp x and return the limit beyond the clamp"
)
_EXP = (
    "clamp what is exponentiated (to at most {most:g}, and to less where the result is squared or multiplied "
    "further: what is computed from it must stay below {largest:.3g}, too); where only ratios of the results "
    "are used, subtract the largest exponent first; for a number that only has to be positive, take softplus "
    "in place of exp"
)
_FROM_EXP = (
    "these numbers come from exp in line {line}: add their logarithms in place of multiplying them, subtract "
    "the largest exponent before exp where only ratios of the results are used, or clamp what is "
    "exponentiated (what is computed from it must stay below {largest:.3g})"
)
_RECURRENCE = (
    "the line computes this number from its own earlier result, {turns} times in this step, and the number "
    "grows: keep the factor of a turn at or below 1 (a gate or a pole bounded by sigmoid or tanh, a "
    "normalised matrix, a smaller step size), or normalise the result after each turn"
)
_RECURRENT_EXP = (
    "; the factor comes from exp in line {line}: carry the largest exponent so far beside the result, and "
    "subtract it before exp"
)

_OF_OPERATIONS = {
    "cosh": "write log(cosh(x)) as abs(x) + softplus(-2 * abs(x)) - log(2); elsewhere clamp its argument",
    "cumprod": "add logarithms (cumsum), and exponentiate only where a product itself is needed",
    "prod": "add logarithms, and exponentiate only where the product itself is needed",
    "sinh": "clamp its argument, or use tanh, which stays in range",
}
_POWER = (
    "a number below 1 with a large negative exponent (or above 1 with a positive one) leaves the range: "
    "combine the exponents first (gamma ** (i - j) in place of gamma ** i * gamma ** -j), or bound them"
)
_SQUARE = (
    "divide its argument by a typical size before it is squared, or bound it where it grew (normalisation, "
    "clipping, a lower learning rate); for the length of a vector, use numerics.norm, which scales by itself"
)

_CANCELLED = (
    "a subtraction takes the argument below 0: compute it in a form that cannot be negative (a variance as "
    "the mean of squared differences, a covariance as A P A^T + Q), clamp it to at least a small number, or "
    "use the safe form"
)
_NOT_POSITIVE = (
    "the argument is below 0: make what is learned or predicted positive by construction (softplus or exp of "
    "the raw number), clamp it to at least a small number, or use the safe form"
)
_OF_POSITIVE_NUMBERS = ("log", "log10", "log2", "pow", "rsqrt", "sqrt")

_UNDERFLOWED_LOGARITHM = (
    "what it takes the logarithm of underflows to 0: compute with logarithms from the start (a sum of "
    "logarithms for a product, logsumexp for a sum, x for log(exp(x))), or use the safe form, whose "
    "derivative is 0 there"
)
_UNDERFLOWED = (
    "both parts of the quotient underflow to 0 where their ratio is an ordinary number: subtract their "
    "logarithms, as exp(logpdf(x) - logcdf(x)), or use the safe form, which gives 0 there"
)
_ONLY_ZEROS = (
    "all {n} divisors are 0, so a safe quotient would be the same number everywhere: mend what makes them "
    "(a comparison that is never true, a mask that leaves nothing, a weight that is not initialised); if "
    "that is meant, use the safe form"
)
_LOST_SQUARES = "compute the divisor (a norm, a variance) in float32, or use the safe form"


def on_only_zeros(f: Finding) -> str:
    """Return what to do about a quotient whose divisors are all 0; "" for any other. A safe quotient would be
    its ``fill`` everywhere. A single divisor, such as a count, may well be 0 once.

    Example:
        >>> from stablenum.diagnosis.replay.values import TensorStats
        >>> counts = TensorStats(dtype="int64", shape=(256,), size=256, min=0.0, max=0.0, amax=0.0, zero=256)
        >>> one = TensorStats(dtype="float32", shape=(256,), size=256, min=0.0, max=0.0, amax=0.0, zero=256)
        >>> on_only_zeros(Finding(operation="div", phase="forward", kind="nan", inputs=(one, counts)))[:28]
        'all 256 divisors are 0, so a'
    """
    if f.operation != "div" or f.derivative or len(f.inputs) != 2:
        return ""
    divisor = f.inputs[1]
    return _ONLY_ZEROS.format(n=divisor.size) if 1 < divisor.size == divisor.zero else ""


def on_overflow(f: Finding) -> str:
    """Return what to do about an operation whose result is too large; "" if nothing is known of how its
    arguments came about."""
    from_exp = f.upstream.exponential
    bounds = {"most": largest_exponent(f), "largest": _format_of(f).max}
    if f.own_derivative:
        return _OWN_DERIVATIVE
    if f.operation in _OF_OPERATIONS:
        return _OF_OPERATIONS[f.operation]
    if f.upstream.turns:
        text = _RECURRENCE.format(turns=f.upstream.turns)
        inside = from_exp is not None and f.operation != "exp"
        return text + (_RECURRENT_EXP.format(line=from_exp.line) if from_exp and inside else "")
    if f.operation in ("exp", "exp2", "expm1"):
        return _EXP.format(**bounds)
    if from_exp is not None and f.place is not None:
        line = from_exp.line if from_exp.file == f.place.file else from_exp
        return _FROM_EXP.format(line=line, **bounds)
    if f.operation != "pow":
        return ""
    if not f.scalars:
        return _POWER
    return _SQUARE if _is_power_of_a_large_number(f) else _EXP.format(**bounds)


def _is_power_of_a_large_number(f: Finding) -> bool:
    """Return whether the plain number of a power is its exponent, not its base (10 ** x)."""
    largest = max((s.amax for s in f.inputs if s.amax == s.amax), default=0.0)
    return largest > 1.0 and math.log(largest) * max(f.scalars) > 0.99 * math.log(_format_of(f).max)


def _format_of(f: Finding) -> Format:
    return FORMATS.get(f.outputs[0].dtype if f.outputs else "float32", FORMATS["float32"])


def largest_exponent(f: Finding) -> int:
    """Return a bound of what is exponentiated that leaves room for what is computed with the exponential."""
    return math.floor(math.log(_format_of(f).max) / 2)


def on_negative(f: Finding) -> str:
    """Return what to do about a function of positive numbers that read one below 0; "" for any other."""
    negative = f.operation in _OF_POSITIVE_NUMBERS and bool(f.inputs) and f.inputs[0].min < 0.0
    if not negative or f.derivative:
        return ""
    return _CANCELLED if f.upstream.subtracted else _NOT_POSITIVE


def on_underflowed(f: Finding) -> str:
    """Return what to do about a quotient of which a part underflows, or a logarithm of what does; "" for any
    other."""
    if lost_squares(f):
        return _LOST_SQUARES
    if not f.upstream.underflowed or any(s.min < 0.0 for s in f.inputs):
        return ""
    if f.operation != "div":
        return _UNDERFLOWED_LOGARITHM
    return _UNDERFLOWED if f.kind == "nan" else ""


def lost_squares(f: Finding) -> str:
    """Return a note that a divisor is 0 in a narrow format although what it divides is not; "" elsewhere."""
    if f.operation != "div" or f.derivative or len(f.inputs) != 2 or not f.inputs[0].amax > 0.0:
        return ""
    divisor = f.inputs[1]
    known = FORMATS.get(divisor.dtype)
    if known is None or known.bits > 16 or divisor.size != 1 or not divisor.zero:
        return ""
    smallest = math.sqrt(known.smallest_subnormal)
    return f"in {divisor.dtype} squares of numbers below {smallest:.1g} are 0, as in a norm or a variance"
