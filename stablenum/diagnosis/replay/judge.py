"""From evidence to verdict: a table of signatures, in which the first match decides.

The signatures are in order of certainty: first what keeps us from judging, then what was bad before the step,
what a second run shows, and what the first bad operation shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from stablenum.diagnosis.replay.argument_remedies import lost_squares
from stablenum.diagnosis.replay.causes import CAUSES, NOTHING_TO_TRY, Cause
from stablenum.diagnosis.replay.evidence import Evidence, Verdict
from stablenum.diagnosis.replay.findings import Finding
from stablenum.diagnosis.replay.operations import (
    BOUNDARIES,
    DEFAULT_AXIS,
    MASKED,
    MOVING,
    OF_A_DISTRIBUTION,
    Remedy,
)
from stablenum.diagnosis.replay.remedies import Advice, advice_on, of_nothing, options_of
from stablenum.diagnosis.replay.update_remedies import centred, of_settings, on_update
from stablenum.diagnosis.replay.values import TensorStats
from stablenum.formats import FORMATS

__all__ = ["Evidence", "Verdict", "judge"]


def judge(evidence: Evidence) -> Verdict:
    """Return the verdict for the first cause whose signature matches.

    Example:
        >>> judge(Evidence(framework="torch", loss_finite=True)).cause.value
        'nothing_wrong'
    """
    for cause, signature in _SIGNATURES:
        fact = signature(evidence)
        if fact:
            return _verdict(cause, fact, evidence)
    return _verdict(Cause.UNKNOWN if evidence.bad else Cause.NOTHING_WRONG, "", evidence)


# --- signatures: each returns a description of the evidence for its cause, or "" ------------------------

Signature = Callable[[Evidence], str]


def _before(role: tuple[str, ...]) -> Signature:
    def signature(e: Evidence) -> str:
        f = e.first
        if f is None or f.phase != "before" or f.operation not in role or f.placed:
            return ""
        article = "an" if f.operation == "input" else "a"
        return f"{f.name or f'{article} {f.operation}'} holds {f.gives} before the first operation reads it"

    return signature


def _parameters(e: Evidence) -> str:
    if e.bad_parameters and (e.first is None or e.first.phase == "before"):
        return f"non-finite before the step: {_some(e.bad_parameters)}"
    return _before(("parameter", "buffer"))(e)


def _data(e: Evidence) -> str:
    f = e.first
    if f is None or not f.data:
        return ""
    return f"{f.operation} reads data with infinities, such as a logarithm of 0, from before the step"


def _transient(e: Evidence) -> str:
    if e.reproduced is not False:
        return ""
    if e.bad:
        return "of two runs from the same state and seed, one failed and one did not: they disagree"
    return "it did not show in a run from the same state and seed"


def _other_rank(e: Evidence) -> str:
    f = e.first
    if not e.other_rank or (f is None and e.bad):
        return ""
    return "another rank reported the failure" if f is None else f"{f.operation} brought in {f.gives}"


def _low_precision(e: Evidence) -> str:
    f = e.first
    if f is None or not f.outputs or f.wide_finite is not True:
        return ""
    if f.kind != "inf" and (f.operation in BOUNDARIES or not all(s.finite for s in f.inputs)):
        return ""
    dtype = f.outputs[0].dtype
    known = FORMATS.get(dtype)
    if known is None or known.bits > 16:
        return ""
    return f"{f.operation} computes in {dtype} (largest number {known.max:.4g}); in float32 it is finite"


def _settings(e: Evidence) -> str:
    """Name a setting that is not a number, unless something was wrong before the optimizer read it."""
    before = (
        e.first is not None and e.first.phase != "update" and e.first.operation not in ("constant", "setting")
    )
    return "" if before or not e.settings else e.settings[0]


# A function at the edge of its domain that read only smaller numbers failed by itself.
_LARGE = 1e4


def _exploded(e: Evidence) -> str:
    """Name what blew up in the steps before, unless something was wrong before this one began."""
    f = e.first
    if f is not None and (
        f.phase == "before" or (f.operation in BOUNDARIES and f.inputs and not _reads_large(f))
    ):
        return ""
    return e.unbounded or e.exploded


def _reads_large(f: Finding) -> bool:
    """Return whether an operation read numbers as large as an explosion leaves them."""
    return any(not s.finite or s.amax > _LARGE for s in f.inputs)


def _update(e: Evidence) -> str:
    f = e.first
    if f is None or f.phase != "update" or (f.kind == "inf" and f.operation not in BOUNDARIES):
        return ""
    if centred(f, e.state):
        low = min(s.min for s in f.inputs)
        return f"gradients are finite, but E[g^2] - E[g]^2 is {low:.4g} in {f.library}: it cancels below 0"
    at = _divisors(f) if not f.library and not e.state and f.operation in _ZERO_EDGE else ()
    if any(_has_zero(s) or s.min < 0.0 for s in at):
        return ""  # the user's own line, which is judged like any other
    return f"gradients are finite, but {f.operation} in the optimizer's update gives {f.gives}"


def _mask(e: Evidence) -> str:
    f = e.first
    if f is None:
        return ""
    if f.derivative:
        masked = f.placed and f.operation in MASKED
        return f"the derivative of {f.operation} is {f.gives} for a fully masked row" if masked else ""
    if f.placed and f.phase == "before":
        return "an infinity in the input or in a constant reaches the result"
    if f.placed:
        source = f", in {f.name}" if f.name else ""
        return f"{f.operation} reads infinities that a mask put there{source}"
    return ""


def _constant(e: Evidence) -> str:
    f = e.first
    if f is None or not f.constant or f.phase == "before":
        return ""
    return f"{f.operation} computes with a constant that is {f.constant}"


def _scale(e: Evidence) -> str:
    if e.loss_scale > 1.0 and e.unscaled_finite:
        return f"with a loss scale of {e.loss_scale:g} gradients overflow; with 1 they are finite"
    return ""


def _where_trap(e: Evidence) -> str:
    f = e.first
    if f is None or not f.selected or f.squared:
        return ""
    if f.derivative:
        fact = f"the value of {f.operation} is discarded afterwards, but its derivative is {f.gives}"
        return "" if _is_overflow(f) else fact
    if f.phase != "forward" or not (e.loss_finite or f.healed):
        return ""
    what = f"{f.operation} is {f.gives} where its value is discarded afterwards"
    return f"{what}; its derivative multiplies that by 0"


def _boundary(e: Evidence) -> str:
    f = e.first
    if f is None or not f.derivative or _is_overflow(f) or not f.value_finite:
        return ""
    edge = BOUNDARIES.get(f.operation)
    here = [v for s in f.inputs for v in s.values] if f.received and len(f.inputs) == 1 else []
    shown = f", here {min(here, key=abs):.4g}" if here and 0.0 not in here else ""
    return f"the value of {f.operation} is finite; its derivative is {f.gives}" + (
        f" at {edge}{shown}" if edge else ""
    )


def _domain(e: Evidence) -> str:
    f = e.first
    if f is None or f.phase == "before":
        return ""
    if of_nothing(f):
        return f"{f.operation} was called with no elements: the mean of nothing is 0/0"
    if f.operation not in BOUNDARIES or _is_overflow(f) or _is_rising(f):
        return ""
    return f"{f.operation} was called with {BOUNDARIES[f.operation]}{_here(f)}"


def _here(f: Finding) -> str:
    """Return the argument at the failure, and why it may be 0, in words."""
    if f.operation in _OF_ONE and f.inputs and f.inputs[0].values:
        return f"; here it is {min(f.inputs[0].values):.4g}"
    lost = lost_squares(f)
    return f"; {lost}" if lost else ""


def _is_rising(f: Finding) -> bool:
    """Return whether a function that is infinite at 0 and for large numbers was given large ones."""
    return f.operation == "poisson_nll" and f.kind == "inf" and not any(_has_zero(s) for s in f.inputs[:1])


def _beyond(e: Evidence) -> str:
    """Return a note that a function whose edges are not known has one, if small numbers gave NaN or inf."""
    f = e.first
    if f is None or not f.primitive.startswith("aten.") or f.derivative or f.phase != "forward":
        return ""
    everywhere = f.operation in _EVERYWHERE or not f.inputs or not all(s.finite for s in f.inputs)
    largest = max((s.amax for s in f.inputs if s.amax == s.amax), default=0.0)
    if everywhere or f.placed or (f.kind == "inf" and largest > 1.0) or _is_overflow(f):
        return ""
    known = f" up to {largest:.4g}" if largest else " of which all are 0" if f.inputs[0].size else ""
    return f"{f.operation} gave {f.gives} for finite numbers{known}: it is not defined there"


def _overflow(e: Evidence) -> str:
    f = e.first
    if f is None or f.phase == "before" or not (f.kind == "inf" or _is_overflow(f)):
        return ""
    if f.derivative and f.operation in _ZERO_EDGE and f.received:
        return f"the derivative of {f.operation} overflows{_near(_divisors(f))}, which is not 0"
    size = _size(f)
    if size == "0":  # zeros do not overflow, so this is the edge of the domain of an unknown function
        return ""
    of = "the derivative of " if f.derivative else ""
    return f"{of}{f.operation} of finite numbers{f' {size}' if size else ''}" + (
        " is inf" if f.kind == "inf" else " is NaN: inf - inf inside"
    )


# Functions that overflow for large positive numbers only.
_RISING = ("exp", "exp2", "expm1", "lgamma", "log_sigmoid", "softplus")


def _size(f: Finding) -> str:
    """Return the number that overflows in words, with its sign; "" if none is known, "0" for zeros."""
    known = [s for s in f.inputs if s.amax == s.amax]
    if not known:
        return ""
    largest = max(known, key=lambda s: s.amax)
    if largest.amax == 0.0:
        return "0"
    # With a single array, the numbers at the failure show on which side it lies.
    single = sum(s.size > 1 for s in known) <= 1
    here = [v for v in largest.values if math.isfinite(v)] if single else []
    upward = largest.max == largest.amax
    if here and (min(here) > 0.0 or max(here) < 0.0):
        upward = here[0] > 0.0
    elif f.operation in _RISING and single:
        upward = True
    return f"up to {largest.max:.4g}" if upward else f"down to {largest.min:.4g}"


def _near(inputs: Sequence[TensorStats]) -> str:
    known = [v for s in inputs for v in s.values]
    return f" at {min(known, key=abs):.4g}" if known else " close to 0"


# The results of these operations can also be inf for small numbers, away from the edge of the domain.
_QUOTIENTS = ("div", "pow", "reciprocal", "rsqrt")
# Operations that have a finite result for all finite numbers, unless it overflows.
_EVERYWHERE = (
    "add", "avg_pool", "bmm", "cast", "conv", "cumsum", "embedding", "exp", "matmul", "mul", "neg", "sub",
    "sum", *MOVING,
)  # fmt: skip
# Functions of one argument, whose value says on which side of the edge it lies.
_OF_ONE = (
    "acos", "acosh", "arctanh", "asin", "log", "log10", "log1p", "log2", "pow", "rsqrt", "sqrt",
)  # fmt: skip
# Operations whose edge is at 0.
_ZERO_EDGE = (*_QUOTIENTS, "log", "log10", "log2", "sqrt")


def _divisors(f: Finding) -> tuple[TensorStats, ...]:
    """Return the arguments that decide whether an operation is at its edge: of a quotient, the divisor; of a
    power, the base."""
    if f.operation == "pow" and len(f.inputs) == 2:
        return f.inputs[:1]
    if f.operation == "div" and len(f.inputs) == 2 and (f.received or not f.derivative):
        return f.inputs[1:]
    return f.inputs


def _has_zero(s: TensorStats) -> bool:
    """Return whether an argument is 0 at the failure, or anywhere if its values there are not known.

    A subnormal number counts as 0, as it does for the safe functions.
    """
    if not s.values:
        return bool((s.zero or s.subnormal) and s.size)
    known = FORMATS.get(s.dtype, FORMATS["float32"])
    return any(abs(v) < known.smallest_normal for v in s.values)


def _is_overflow(f: Finding) -> bool:
    """Return whether large numbers gave inf without a zero divisor, or NaN through inf - inf in a sum."""
    if f.operation in OF_A_DISTRIBUTION:
        return False
    users = bool(f.derivative and f.received)
    if users and f.operation in _ZERO_EDGE:
        at = _divisors(f)
        return not any(_has_zero(s) or s.min < 0 or not s.finite for s in at) and f.kind in ("inf", "nan")
    if f.kind == "inf" and any(_has_zero(s) for s in _divisors(f)):
        return False
    read = f.received or f.inputs
    if f.kind != "inf" and (f.operation in BOUNDARIES or not all(s.finite for s in read)):
        return False
    if f.operation in _QUOTIENTS and not f.derivative:
        return 0.0 not in f.scalars
    largest = max((s.amax for s in read if s.amax == s.amax), default=0.0)
    known = FORMATS.get(f.outputs[0].dtype if f.outputs else "float32", FORMATS["float32"])
    return bool(largest > known.max**0.25)


_RETURN_LOSS = "end the function with `return loss`, as optimizers that call a closure need it"
_REPLAY_LOSS = "replay the function that computes the loss, with the arguments that it had in this call"
_UNBOUNDED = (
    "check the sign of the objective: what is to be maximised (a log-likelihood, an ELBO, a reward) is "
    "negated before it is minimised; if the sign is right, give it a lower bound (a penalty, a floor for a "
    "variance)"
)
_OUTLIER = (
    "if the outlier is an error, drop or mend that record; if it is not, bound it before it enters the model "
    "(a clip after the standardisation, a logarithm)"
)
_OF_LARGE_NUMBERS = (Cause.OVERFLOW, Cause.LOW_PRECISION_OVERFLOW)
# Causes in an optimizer's own update.
_IN_UPDATES = (Cause.OPTIMIZER_STATE, Cause.OVERFLOW)

_SIGNATURES: tuple[tuple[Cause, Signature], ...] = (
    (Cause.NOT_REPLAYED, lambda e: e.unreplayed),
    (Cause.UNKNOWN, lambda e: e.unjudged),
    (Cause.PARAMETERS, _parameters),
    (Cause.OPTIMIZER_STATE, _settings),
    (Cause.BATCH, _before(("input", "constant"))),
    (Cause.LABELS, lambda e: e.labels),
    (Cause.OTHER_RANK, _other_rank),
    (Cause.TRANSIENT, _transient),
    (Cause.OVERFLOW, _constant),
    (Cause.LOSS_SCALE, _scale),
    (Cause.EXPLODED, _exploded),
    (Cause.OPTIMIZER_STATE, _update),
    (Cause.OPTIMIZER_STATE, _before(("state",))),
    (Cause.BATCH, _data),
    (Cause.MASK, _mask),
    (Cause.LOW_PRECISION_OVERFLOW, _low_precision),
    (Cause.WHERE_TRAP, _where_trap),
    (Cause.BOUNDARY_DERIVATIVE, _boundary),
    (Cause.DOMAIN, _domain),
    (Cause.DOMAIN, _beyond),
    (Cause.OVERFLOW, _overflow),
    (
        Cause.NORM_OVERFLOW,
        lambda e: "the plain norm is inf, but every gradient is finite" if e.norm_overflow else "",
    ),
    (
        Cause.OPTIMIZER_STATE,
        lambda e: (
            (e.state[0] if e.state else f"non-finite after the update: {_some(e.bad_updates)}")
            if e.bad_updates or e.state
            else ""
        ),
    ),
)


_POISONED = (
    "a batch that is dropped after the forward pass has already entered the running statistics: drop it "
    "before the forward pass, or let the guard take them back (`wrap(optimizer, buffers=model)`)"
)


def _verdict(cause: Cause, fact: str, e: Evidence) -> Verdict:
    facts = [fact] if fact else []
    f = e.first
    if f is not None:
        if f.warned:
            facts.insert(1, f"NumPy warned: {f.warned}")
        facts += [f"in:  {s}" for s in f.inputs] + [f"out: {s}" for s in f.outputs]
        if f.lost and cause in (Cause.DOMAIN, Cause.BOUNDARY_DERIVATIVE, Cause.OPTIMIZER_STATE):
            facts.insert(1, f.lost)
        if f.squared and cause is Cause.BOUNDARY_DERIVATIVE:
            facts.append(
                "its value is squared after it; at 0 the derivative of the square is 0: 0 x inf is NaN"
            )
        if f.clipped and (f.derivative or f.kind == "inf") and cause is not Cause.EXPLODED:
            facts.append(
                "a clip, a maximum or a ReLU after it cuts the value but not the derivative: 0 x inf is NaN"
            )
        if f.spread:
            facts.append(f"from {f.shard} it spread through {', '.join(f.spread)}")
    if e.reproduced:
        facts.append("a second run failed in the same way")
    if cause is Cause.TRANSIENT:
        facts += [f"differs: {difference}" for difference in e.differences]
    if e.bad_gradients:
        facts.append(f"non-finite gradients: {_some(e.bad_gradients)}")
    advice = advice_on(cause, f, loss_finite=e.loss_finite, tried=e.tried)
    if cause is Cause.OPTIMIZER_STATE and fact in e.settings:
        advice = Advice(of_settings(fact))
    elif f is not None and f.phase == "update" and not f.lost and cause in _IN_UPDATES:
        advice = Advice(on_update(f, e.state) or advice.remedy, None if f.library else advice.safe)
    if cause is Cause.EXPLODED and e.unbounded:
        facts[1:1] = [e.exploded] if e.exploded else []
        advice = Advice(_UNBOUNDED)
    if f is not None and f.outlier and cause in _OF_LARGE_NUMBERS:
        facts.insert(1, f.outlier)
        advice = Advice(f"{_OUTLIER}; else {advice.remedy}", advice.safe)
    if e.poisoned:
        facts.insert(1, f"the forward pass left NaN in {_some(e.poisoned)}, for good: no step undoes that")
        advice = Advice(f"{advice.remedy}; {_POISONED}", advice.safe)
    if e.unjudged:
        advice = Advice(_RETURN_LOSS if e.framework == "torch" else _REPLAY_LOSS)
    safe = advice.safe
    torch = e.framework == "torch"
    words = {"ns": f"stablenum_{e.framework}", "axis": "dim" if torch else "axis"}
    words |= {"nn": "torch" if torch else "jax.nn", "np": "torch" if torch else "jnp"}
    return Verdict(
        cause=cause,
        what="nothing was judged" if e.unjudged else CAUSES[cause].what,
        evidence=tuple(facts),
        remedy=advice.remedy,
        safe_function=f"{words['ns']}.{safe.name}" if safe and safe.name else "",
        code=_code(safe, f, words) if safe else "",
        tried=e.tried if safe else "",
        left=e.left if safe and e.tried else (),
        trial=f"not tried: {e.untried}" if e.untried and cause not in NOTHING_TO_TRY else "",
    )


def _code(safe: Remedy, f: Finding | None, words: Mapping[str, str]) -> str:
    """Return the line of code that calls a safe function, with the arguments of the user's call."""
    options = options_of(safe.name, f) if f is not None else {}
    keep = "keepdim" if words["axis"] == "dim" else "keepdims"
    named = {"axis": words["axis"], "keepdims": keep}
    given = "".join(f", {named.get(k, k)}={v}" for k, v in options.items())
    code = safe.code.replace(DEFAULT_AXIS, given) if given else safe.code
    if f is not None and f.operation == "pow" and len(f.scalars) == 1:
        code = code.replace("exponent", f"{f.scalars[0]:g}")
    return code.format(**words)


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
