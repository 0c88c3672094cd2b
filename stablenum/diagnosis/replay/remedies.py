"""What to do about a cause: a safe function if there is one for these arguments, else advice."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from stablenum.diagnosis.replay.argument_remedies import (
    on_negative,
    on_only_zeros,
    on_overflow,
    on_underflowed,
)
from stablenum.diagnosis.replay.causes import CAUSES, Cause
from stablenum.diagnosis.replay.findings import Finding
from stablenum.diagnosis.replay.operations import (
    ADVICE,
    INSIDE,
    MATRICES,
    OF_A_DISTRIBUTION,
    REMEDIES,
    ROWS,
    UNSEEN_WRITE,
    ZERO_WEIGHT,
    Remedy,
)
from stablenum.formats import FORMATS

__all__ = ["Advice", "advice_on", "of_nothing", "options_of"]


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, in words, and the safe function, if there is one."""

    remedy: str
    safe: Remedy | None = None


# A safe function is named only where the function itself is at fault.
_BY_FUNCTION = (
    Cause.DOMAIN,
    Cause.MASK,
    Cause.WHERE_TRAP,
    Cause.BOUNDARY_DERIVATIVE,
    Cause.OVERFLOW,
    Cause.LOW_PRECISION_OVERFLOW,
    Cause.LABELS,
)
# Operations whose safe forms help only at the edge of the domain; they overflow like any other function.
_EDGE_ONLY = ("acos", "arctanh", "atan2", "div", "log", "pow", "reciprocal", "rsqrt", "sqrt", "xlogy")
# Causes that lie in the numbers an operation was given, which a function in its place meets as well.
_OVERFLOWS = (Cause.OVERFLOW, Cause.LOW_PRECISION_OVERFLOW)

# Operations that pick elements, and what to do if they pick one that a mask forbids.
_PICKING = ("gather", "index", "slice")
_PICKED = (
    "the index picks an element that the mask forbids (-inf), so the result is infinite: check that targets "
    "use only what the mask allows, or mask with a large finite number"
)

# A number that keeps an argument from the edge, but is 0 in its format.
_LOST = (
    "compute this part in float32, or use a number that {dtype} can represent (1e-4), so that it keeps the "
    "argument away from 0"
)
_LOST_SETTING = (
    "make the optimizer with an eps that {dtype} can represent (eps=1e-4); or keep the parameters and its "
    "state in float32, and cast to {dtype} in the model"
)
_OPTIMIZERS = ("optax.", "torch.optim")
# Functions of which a row, or a pair, of -inf alone has no derivative.
_OF_LOGARITHMS = ("logaddexp", "logcumsumexp", "logsumexp")
_NOTHING_TO_SUM = (
    "put a large finite negative number (-1e9) in place of -inf, so that every row has something to sum; or "
    "use the safe form, whose derivative is 0 where every term is -inf"
)
# An operation in an update that the user wrote.
_OWN_UPDATE = "add a small number (eps) to the argument in this update, or use the safe form"

_NOTHING = f"leave the batch out where nothing is selected, or {ADVICE['mean']} (reduction='sum')"
_PLAIN_ZERO = (
    "the divisor is the plain number 0: give the setting or the count from which it comes (a temperature, a "
    "scale, a length) another value; in a bias correction (1 - beta ** t), count steps from 1; or use the "
    "safe form"
)
_PRODUCT = (
    "compute this operation in float32 or bfloat16, or scale one of its inputs before it (q / sqrt(d) before "
    "q @ k.T), because scaling the result comes too late; normalise large inputs"
)
# A constant beyond the range of its format.
_LOWER = "lower the constant: it is beyond the largest number of its format"
_MADE_INFINITE = (
    "mend it where it is made: it is a statistic of numbers among which one is infinite, or was stored in a "
    "format in which it is too large (float16 ends at 65504), as in a checkpoint: keep it in float32"
)
_OR_WIDER = "; or keep it in float32, with what it is computed with (a loss scale: the loss in float32)"

_KEEP_AWAY = "keep the argument away from the edge of the domain: clamp it before the call"

# Functions that are often written by hand. The names are those of ``patterns.by_hand``.
_BY_HAND = {
    "inverse softplus": Remedy("", "x + {np}.log(-{np}.expm1(-x))"),
    "log_sigmoid": Remedy(
        "numerics.log_sigmoid", "{ns}.numerics.log_sigmoid(x)  # of -x in place of log(1 - sigmoid(x))"
    ),
    "log_softmax": Remedy("numerics.log_softmax", "{ns}.numerics.log_softmax(x, {axis}=-1)"),
    "logdet": Remedy("", "{np}.linalg.slogdet(A)[1]  # log |det A|"),
    "logsumexp": Remedy("numerics.logsumexp", "{ns}.numerics.logsumexp(x, {axis}=-1)"),
    "normalize": Remedy("numerics.normalize", "{ns}.numerics.normalize(x, {axis}=-1)"),
    "rms_norm": Remedy("numerics.rms_norm", "{ns}.numerics.rms_norm(x, {axis}=-1)"),
    "sigmoid": Remedy("", "{nn}.sigmoid(x)"),
    "softmax": Remedy("numerics.softmax", "{ns}.numerics.softmax(x, {axis}=-1)"),
    "softplus": Remedy("numerics.softplus", "{ns}.numerics.softplus(x)"),
}

# ``numerics.power`` takes a plain number as its exponent.
_POWER_OF_ARRAYS = Remedy("numerics.log", "{np}.exp(y * {ns}.numerics.log(x))  # x ** y, for an array y")

# What to change about an argument if the operation itself is out of reach, in a library.
_POSITIVE = "keep it above 0: clamp it to at least a small number such as 1e-6"
_DIVISOR = f"the argument that it divides by (a scale, a count, a norm) is at fault: {_POSITIVE}"
_LOGARITHM = (
    f"the argument that it takes the logarithm of (a scale, a rate, a probability) is at fault: {_POSITIVE}"
)
_AT_THE_CALL = {
    "div": _DIVISOR,
    "exp": "bound the argument that it exponentiates: clamp it, or apply a soft cap",
    "log": _LOGARITHM,
    "log10": _LOGARITHM,
    "log1p": _LOGARITHM,
    "log2": _LOGARITHM,
    "norm": "the argument whose length it takes is a vector of zeros: add a small number, or leave it out",
    "pow": f"the argument that it raises to a power is at fault: {_POSITIVE}",
    "reciprocal": _DIVISOR,
    "rsqrt": _DIVISOR,
    "sqrt": f"the argument that it takes the root of (a variance, a distance) is at fault: {_POSITIVE}",
    "std": "the argument whose spread it takes is constant: add a small number, or leave it out",
    "xlogy": f"a value or a probability is exactly at the edge: {ADVICE['logpdf']}",
}


# Libraries of distributions, whose squashed samples are rounded to the edge of their support.
_OF_DISTRIBUTIONS = ("distrax", "numpyro", "tensorflow_probability", "torch.distributions")
_SQUASHED = (
    "the value lies at the edge, 1 or -1, to which a squashed sample is rounded. Keep what it was before the "
    "squashing: take sample and density together (sample_and_log_prob), or let the transform remember its "
    "input (TanhTransform(cache_size=1) in torch). A clamp of the sample is finite, but then the density "
    "has no meaning there and training may drive it without bound"
)


# Optimizers of optax that take a number to add inside the root of their second moment.
_EPS_ROOT = ("adam", "adan", "amsgrad", "belief", "radam", "yogi")
_THROUGH = (
    "it is differentiated through, and the root of its second moment has an infinite derivative where the "
    "moment is 0"
)


# Parametrizations that divide a weight by its length.
_NORMALISED_WEIGHTS = ("torch.nn.utils.spectral_norm", "torch.nn.utils.weight_norm")


def _about_optimizer(library: str) -> str:
    """Return what to do if the root in an optimizer's update is differentiated; "" for another library."""
    package, _, name = library.rpartition(".")
    if package == "optax" and name.startswith("scale_by_"):
        name = name.removeprefix("scale_by_")
        if name in _EPS_ROOT:
            return f"{_THROUGH}: make the optimizer with a number inside the root (eps_root=1e-8)"
        return f"{_THROUGH}: make the optimizer with eps inside the root (eps_in_sqrt=True)"
    if package == "torch.optim":
        return (
            f"{_THROUGH}, which torch's optimizers cannot keep it from: use SGD for the steps that are "
            "differentiated, or write the update with (v + 1e-8).sqrt()"
        )
    return ""


def advice_on(
    cause: Cause, finding: Finding | None, *, loss_finite: bool | None = None, tried: str = ""
) -> Advice:
    """Return what to do about a cause.

    Args:
        cause: the cause.
        finding: the first finding.
        loss_finite: whether the loss is finite.
        tried: what came of the safe function on the recorded arguments; one that failed is not named.
    """
    plain = CAUSES[cause].remedy
    if finding is not None and finding.lost and cause is Cause.OPTIMIZER_STATE:
        lost = _LOST_SETTING if finding.library.startswith(_OPTIMIZERS) else _LOST
        return Advice(lost.format(dtype=finding.inputs[0].dtype))
    if finding is None or cause not in _BY_FUNCTION:
        return Advice(_about_before(finding, plain, masked=loss_finite is True))
    if cause is Cause.MASK and finding.operation in _PICKING and not finding.derivative:
        return Advice(_PICKED)
    if cause is Cause.OVERFLOW and finding.constant:
        return Advice(_about_constant(finding))
    if finding.library and cause is not Cause.LABELS:
        return Advice(_at_the_call(cause, finding))
    if finding.operation in _OF_LOGARITHMS and cause in (Cause.DOMAIN, Cause.MASK):
        return Advice(_NOTHING_TO_SUM, REMEDIES[finding.operation])
    advice = _about_lost(cause, finding, _by_function(cause, finding))
    if advice.safe is not None and tried not in ("", "finite"):
        return Advice(_without_function(cause, finding))
    if advice.remedy == INSIDE and _is_rounded(finding):
        return Advice(f"{INSIDE}, in float32: {finding.inputs[0].dtype} rounds a bound such as 1 - 1e-6 to 1")
    return advice


def _is_rounded(f: Finding) -> bool:
    """Return whether the argument is in a format in which numbers next to 1 are far apart."""
    known = FORMATS.get(f.inputs[0].dtype) if f.inputs else None
    return known is not None and known.eps > 1e-4


def _about_constant(f: Finding) -> str:
    if f.phase == "before" and f.operation == "input":
        return _MADE_INFINITE
    narrow = any(f"in {known.name}," in f.constant for known in FORMATS.values() if known.bits <= 16)
    return _LOWER + _OR_WIDER if narrow else _LOWER


def options_of(name: str, f: Finding) -> dict[str, Any]:
    """Return the arguments with which a safe function over rows does what the user's call does; empty if they
    are not known, or if the function has none that match.

    A correction that leaves nothing to divide by is 0 instead: of one element, the spread is then 0.

    Example:
        >>> given = {"axis": (0,), "correction": 1}
        >>> f = Finding(operation="std", phase="forward", kind="nan", options=given)
        >>> options_of("numerics.std", f)
        {'axis': 0, 'correction': 1}
    """
    allowed, given = ROWS.get(name, ()), f.options
    if "axis" not in given:
        return {}
    axis = given["axis"]
    if isinstance(axis, tuple) and len(axis) == 1:
        axis = axis[0]
    if "axes" not in allowed and not isinstance(axis, int):
        return {}
    found = {"axis": axis}
    if "correction" in allowed:
        correction = given.get("correction", 0)
        found["correction"] = correction if given.get("count", math.inf) > correction else 0
    if "keepdims" in allowed and given.get("keepdims"):
        found["keepdims"] = True
    return found


def of_nothing(f: Finding) -> bool:
    """Return whether a mean, or a loss that takes one, was given no elements."""
    spread = f.operation in ("median", "std", "var")
    empty = bool(f.inputs) and f.inputs[0].size == 0 and f.inputs[0].shape != ()
    return empty and f.kind == "nan" and not f.derivative and not spread


def _by_function(cause: Cause, f: Finding) -> Advice:
    if of_nothing(f):
        return Advice(ADVICE["mean"] if f.operation == "mean" else _NOTHING)
    if cause is Cause.DOMAIN and f.operation == "div" and _divides_by_a_plain_zero(f):
        return Advice(_PLAIN_ZERO, REMEDIES["div"])
    if cause is Cause.LOW_PRECISION_OVERFLOW and f.operation in ("attention", "einsum", "matmul"):
        return Advice(_PRODUCT)
    if f.by_hand:
        does = "is finite at 0, too" if f.by_hand in ("normalize", "rms_norm") else "stays in range"
        what = f"this is {f.by_hand} written by hand: the function itself {does}"
        return Advice(what, _BY_HAND[f.by_hand])
    if only_zeros := on_only_zeros(f):
        return Advice(only_zeros, REMEDIES["div"])
    if cause in _OVERFLOWS and (f.operation in _EDGE_ONLY or cause is Cause.LOW_PRECISION_OVERFLOW):
        return Advice(_without_function(cause, f))
    safe = _POWER_OF_ARRAYS if _is_power_of_arrays(f) else REMEDIES.get(f.operation)
    if f.options.get("ord", 2) != 2:  # the safe functions have the Euclidean norm
        safe = None
    if f.operation == "pow" and f.primitive.endswith("pow.Scalar"):  # the base is a plain number
        safe = None
    about = (on_underflowed(f) or on_negative(f)) if cause is Cause.DOMAIN else ""
    return Advice(about or CAUSES[cause].remedy, safe) if safe else Advice(_without_function(cause, f))


def _divides_by_a_plain_zero(f: Finding) -> bool:
    return f.upstream.plain_divisor or (0.0 in f.scalars and len(f.inputs) == 1)


def _about_lost(cause: Cause, f: Finding, advice: Advice) -> Advice:
    """Return the advice with what is to be done about a small number that is 0 in its format."""
    if cause not in (Cause.DOMAIN, Cause.BOUNDARY_DERIVATIVE):
        return advice
    also = "; or use the safe form" if advice.safe else ""
    if f.lost:
        return Advice(_LOST.format(dtype=f.inputs[0].dtype) + also, advice.safe)
    if f.phase == "update" and advice.safe:
        return Advice(_OWN_UPDATE, advice.safe)
    return advice


def _is_power_of_arrays(f: Finding) -> bool:
    """Return whether the exponent is an array; a plain number in JAX is an input without a shape."""
    if f.operation != "pow" or len(f.inputs) < 2:
        return False
    return f.primitive.startswith("aten.") or f.inputs[1].shape != ()


def _without_function(cause: Cause, f: Finding) -> str:
    if cause in (Cause.DOMAIN, Cause.BOUNDARY_DERIVATIVE):
        return ADVICE.get(f.operation, _KEEP_AWAY)
    if cause is Cause.OVERFLOW and f.derivative and f.operation in _EDGE_ONLY:
        return "keep the argument further away from 0: its derivative is beyond the range of the format"
    if f.clipped and cause in _OVERFLOWS:
        return "clip the argument, before the operation: a clip of its result keeps the infinite derivative"
    if cause is Cause.OVERFLOW:
        return on_overflow(f) or CAUSES[cause].remedy
    return CAUSES[cause].remedy


def _at_the_call(cause: Cause, f: Finding) -> str:
    if f.library in _NORMALISED_WEIGHTS and cause in (Cause.DOMAIN, Cause.BOUNDARY_DERIVATIVE):
        return f"the weight is all zeros, and {f.library} divides by its length: {ZERO_WEIGHT}"
    own = f.own_frame
    where = f"at your call in {own}" if own is not None else "at your call"
    about = _about_optimizer(f.library) if f.derivative and f.operation in ("sqrt", "rsqrt") else ""
    function = f.library.rpartition(".")[2]
    of_a_distribution = function in OF_A_DISTRIBUTION and f.operation not in MATRICES
    if about:
        return f"the operation is inside {f.library}; {about}"
    if f.operation == "arctanh" and f.library.startswith(_OF_DISTRIBUTIONS):
        change = _SQUASHED
    elif cause in _OVERFLOWS:
        change = "bound what you pass: scale it down, clip it, or call it in float32"
    elif of_a_distribution:
        change = ADVICE[function]
    else:
        change = _AT_THE_CALL.get(f.operation, ADVICE.get(f.operation, "clamp what you pass to its domain"))
    return f"the operation is inside {f.library}; {where}, {change}"


# What to do where data was prepared by this function.
_MAKERS = {
    "divide": "keep the divisor away from 0, and both numbers finite: where a standard deviation, a count or "
    "a range is 0 or infinite, use 1",
    "log": "take the logarithm of numbers above 0 only: drop the others, or use log(1 + x) for counts",
    "log1p": "keep the argument above -1",
    "sqrt": "keep the argument at or above 0",
    "power": "raise only numbers above 0 to a fraction; keep 0 away from negative exponents",
    "exp": "subtract the largest number first, as in a softmax (x - x.max()), or clip the argument",
    "DataLoader": "the values were made in a worker process, which is not watched: with num_workers=0 the "
    "report names the line that made them",
}
_MAKERS |= {"log10": _MAKERS["log"], "log2": _MAKERS["log"], "true_divide": _MAKERS["divide"]}


_WRITTEN_UNSEEN = (
    "look for what writes into memory that this tensor shares with an array (tensor.numpy(), "
    "torch.from_numpy): no operation of torch has made these numbers"
)
_CAPTURED = (
    "mend the array where it is prepared: look for the non-finite element (0/0, a missing value), "
    "and put a number in its place there; np.errstate and functions such as nanmax hide where it came from"
)


_IN_ITS_PLACE = (
    "put a number (0) in its place before anything is computed from it: a mask does not remove a NaN, "
    "because 0 x NaN is NaN, in the value and in the derivative"
)


def _about_before(f: Finding | None, plain: str, *, masked: bool) -> str:
    """Return the remedy for values that were bad before the step: a constant, or an input that is masked out,
    is not dropped with its batch, and the line that made bad data is mended."""
    if f is not None and f.constant:
        return _about_constant(f)
    if f is not None and f.maker == UNSEEN_WRITE:
        return _WRITTEN_UNSEEN
    if f is not None and f.maker:
        return _MAKERS.get(f.maker.rpartition(" ")[2], f"keep what {f.maker} reads inside its domain")
    if f is not None and f.name.startswith("captured ") and not masked:
        return _CAPTURED
    data = f is not None and f.phase == "before" and f.kind == "nan"
    if f is not None and data and (f.operation == "constant" or (f.operation == "input" and masked)):
        if masked:
            return _IN_ITS_PLACE
        return f"if it came with a batch, {plain}; if it is a constant of the code, {_IN_ITS_PLACE}"
    return plain
