"""From evidence to verdict: a table of signatures, in which the first match decides.

The signatures are in order of certainty: first what was bad before the step, then what a second run shows,
then what the first bad operation shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stablenum.diagnosis.replay.causes import CAUSES, Cause
from stablenum.diagnosis.replay.findings import Finding
from stablenum.diagnosis.replay.operations import BOUNDARIES, DEFAULT_AXIS, MASKED, OF_A_DISTRIBUTION, Remedy
from stablenum.diagnosis.replay.remedies import Advice, advice_on, options_of
from stablenum.diagnosis.replay.values import TensorStats
from stablenum.formats import FORMATS

__all__ = ["Evidence", "Verdict", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that a replay found; None for checks that were not made.

    Attributes:
        framework: "torch" or "jax", for the spelling of the remedy.
        findings: the first causes, from :func:`stablenum.diagnosis.replay.walk.first_causes`.
        loss_finite: whether the loss of the replay is finite.
        bad_gradients: the names of the gradients that are not finite.
        bad_parameters: the names of the parameters that were not finite before the step.
        bad_updates: the names of the parameters that are not finite after an update by finite gradients.
        labels: a description of what is wrong with the labels; "" if nothing is.
        reproduced: whether a second replay, or the replay of a step known to be bad, went wrong too.
        loss_scale: the loss scale of the gradients.
        unscaled_finite: whether gradients are finite at scale 1.
        norm_overflow: whether the gradients are finite but the plain sum of their squares is not.
        state: descriptions of problems in the optimizer's state, the worst first.
        settings: descriptions of settings of the optimizer that are not numbers.
        other_rank: whether another rank reported the failure.
        differences: descriptions of what differs between the step and a replay that did not reproduce it.
        unjudged: why a step that is known to have failed could not be judged; "" if it was.
        exploded: a description of the earlier step in which the parameters grew out of proportion; "" if none
            is known.
        tried: what came of the safe function on the recorded arguments: "finite", "not finite" or "raises";
            "" if it was not tried.
        left: further places on the way that give NaN or inf of their own, for which nothing was tried.
        only_loss: whether neither the backward pass nor the update gave NaN or inf, and nothing compared a
            NaN with a number.
    """

    framework: str
    findings: tuple[Finding, ...] = ()
    loss_finite: bool | None = None
    bad_gradients: tuple[str, ...] = ()
    bad_parameters: tuple[str, ...] = ()
    bad_updates: tuple[str, ...] = ()
    labels: str = ""
    reproduced: bool | None = None
    loss_scale: float = 1.0
    unscaled_finite: bool | None = None
    norm_overflow: bool = False
    state: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    other_rank: bool = False
    differences: tuple[str, ...] = ()
    unjudged: str = ""
    exploded: str = ""
    tried: str = ""
    left: tuple[str, ...] = ()
    only_loss: bool = False

    @property
    def first(self) -> Finding | None:
        """The first cause."""
        return self.findings[0] if self.findings else None

    @property
    def bad(self) -> bool:
        """Whether the replay itself went wrong."""
        return bool(
            self.findings
            or self.loss_finite is False
            or self.bad_gradients
            or self.bad_parameters
            or self.bad_updates
            or self.labels
            or self.norm_overflow
            or self.unjudged
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The cause, the evidence for it, and what to do.

    Attributes:
        cause: one of :class:`Cause`.
        what: what the cause means.
        evidence: descriptions of the facts.
        remedy: what to do.
        safe_function: the full name of the safe function; "" if there is none.
        code: a line of code that calls the safe function.
        tried: "finite" if the safe function, on the recorded arguments, has a finite value and derivative; ""
            if it was not tried.
        left: further places that give NaN or inf of their own, for which nothing was tried.
    """

    cause: Cause
    what: str
    evidence: tuple[str, ...]
    remedy: str
    safe_function: str = ""
    code: str = ""
    tried: str = ""
    left: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            **asdict(self),
            "cause": self.cause.value,
            "evidence": list(self.evidence),
            "left": list(self.left),
        }


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
        return f"{f.name or f'a {f.operation}'} holds {_kind(f)} before the first operation reads it"

    return signature


def _parameters(e: Evidence) -> str:
    if e.bad_parameters and (e.first is None or e.first.phase == "before"):
        return f"not finite before the step: {_some(e.bad_parameters)}"
    return _before(("parameter", "buffer"))(e)


def _transient(e: Evidence) -> str:
    if e.reproduced is not False:
        return ""
    if e.bad:
        return "of two runs from the same state and seed, one failed and one did not: they disagree"
    return "it did not show in a run from the same state and seed"


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
    before = e.first is not None and e.first.phase != "update" and e.first.operation != "constant"
    return "" if before or not e.settings else e.settings[0]


def _update(e: Evidence) -> str:
    f = e.first
    if f is None or f.phase != "update" or (f.kind == "inf" and f.operation not in BOUNDARIES):
        return ""
    if not f.library and not e.state and f.operation in _ZERO_EDGE and any(map(_has_zero, _divisors(f))):
        return ""  # the user's own line, which is judged like any other
    return f"gradients are finite, but {f.operation} in the optimizer's update gives {_kind(f)}"


def _mask(e: Evidence) -> str:
    f = e.first
    if f is None:
        return ""
    if f.derivative:
        masked = f.placed and f.operation in MASKED
        return (
            f"the derivative of {f.operation} is {_kind(f)} for a row that is masked whole" if masked else ""
        )
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
        fact = f"the value of {f.operation} is discarded afterwards, but its derivative is {_kind(f)}"
        return "" if _is_overflow(f) else fact
    if f.phase != "forward" or f.kind != "inf" or not e.loss_finite:
        return ""
    return (
        f"{f.operation} is inf where its value is discarded afterwards; its derivative multiplies that by 0"
    )


def _boundary(e: Evidence) -> str:
    f = e.first
    if f is None or not f.derivative or _is_overflow(f) or not f.value_finite:
        return ""
    edge = BOUNDARIES.get(f.operation)
    here = [v for s in f.inputs for v in s.values] if f.received and len(f.inputs) == 1 else []
    shown = f", here {min(here, key=abs):.4g}" if here and 0.0 not in here else ""
    return f"the value of {f.operation} is finite; its derivative is {_kind(f)}" + (
        f" at {edge}{shown}" if edge else ""
    )


def _domain(e: Evidence) -> str:
    f = e.first
    if f is None or f.operation not in BOUNDARIES or f.phase == "before" or _is_overflow(f):
        return ""
    return f"{f.operation} was called with {BOUNDARIES[f.operation]}"


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
# Operations whose edge is at 0.
_ZERO_EDGE = (*_QUOTIENTS, "log", "log10", "log2", "sqrt")


def _divisors(f: Finding) -> tuple[TensorStats, ...]:
    """Return the arguments that decide whether an operation is at its edge: of a quotient, the divisor."""
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


_SIGNATURES: tuple[tuple[Cause, Signature], ...] = (
    (Cause.UNKNOWN, lambda e: e.unjudged),
    (Cause.PARAMETERS, _parameters),
    (Cause.OPTIMIZER_STATE, _settings),
    (Cause.BATCH, _before(("input", "constant"))),
    (Cause.LABELS, lambda e: e.labels),
    (Cause.OTHER_RANK, lambda e: "another rank reported the failure" if e.other_rank and not e.bad else ""),
    (Cause.TRANSIENT, _transient),
    (Cause.OVERFLOW, _constant),
    (Cause.LOSS_SCALE, _scale),
    (Cause.EXPLODED, lambda e: e.exploded if e.first is None or e.first.phase != "before" else ""),
    (Cause.OPTIMIZER_STATE, _update),
    (Cause.OPTIMIZER_STATE, _before(("state",))),
    (Cause.MASK, _mask),
    (Cause.LOW_PRECISION_OVERFLOW, _low_precision),
    (Cause.WHERE_TRAP, _where_trap),
    (Cause.BOUNDARY_DERIVATIVE, _boundary),
    (Cause.DOMAIN, _domain),
    (Cause.OVERFLOW, _overflow),
    (
        Cause.NORM_OVERFLOW,
        lambda e: "the plain norm is inf, but every gradient is finite" if e.norm_overflow else "",
    ),
    (
        Cause.OPTIMIZER_STATE,
        lambda e: (
            (e.state[0] if e.state else f"not finite after the update: {_some(e.bad_updates)}")
            if e.bad_updates or e.state
            else ""
        ),
    ),
)


def _verdict(cause: Cause, fact: str, e: Evidence) -> Verdict:
    facts = [fact] if fact else []
    f = e.first
    if f is not None:
        facts += [f"in:  {s}" for s in f.inputs] + [f"out: {s}" for s in f.outputs]
        if f.phase == "before" and f.outputs and f.outputs[0].nan_columns:
            facts.append(_columns(f.outputs[0].nan_columns))
        if f.lost and cause in (Cause.DOMAIN, Cause.BOUNDARY_DERIVATIVE, Cause.OPTIMIZER_STATE):
            facts.insert(1, f.lost)
        if f.squared and cause is Cause.BOUNDARY_DERIVATIVE:
            facts.append(
                "its value is squared after it; at 0 the derivative of the square is 0: 0 x inf is NaN"
            )
        if f.clipped and (f.derivative or f.kind == "inf") and cause is not Cause.EXPLODED:
            facts.append("a clip after it cuts the value but not the derivative: 0 x inf is NaN")
    if e.reproduced:
        facts.append("a second run failed in the same way")
    if cause is Cause.TRANSIENT:
        facts += [f"differs: {difference}" for difference in e.differences]
    if e.bad_gradients:
        facts.append(f"gradients not finite: {_some(e.bad_gradients)}")
    advice = advice_on(cause, f, loss_finite=e.loss_finite, tried=e.tried)
    if cause is Cause.OPTIMIZER_STATE and fact in e.settings:
        advice = Advice(
            "give the optimizer a number: mend the schedule that made this one, perhaps by a division by 0 "
            "warm-up steps"
        )
    if e.unjudged:
        advice = Advice("end the function with `return loss`, as optimizers that call a closure need it")
    safe = advice.safe
    torch = e.framework == "torch"
    words = {"ns": f"stablenum_{e.framework}", "axis": "dim" if torch else "axis"}
    words |= {"nn": "torch" if torch else "jax.nn", "np": "torch" if torch else "jnp"}
    return Verdict(
        cause=cause,
        what=CAUSES[cause].what,
        evidence=tuple(facts),
        remedy=advice.remedy,
        safe_function=f"{words['ns']}.{safe.name}" if safe and safe.name else "",
        code=_code(safe, f, words) if safe else "",
        tried=e.tried if safe else "",
        left=e.left if safe and e.tried else (),
    )


def _columns(columns: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, columns[:6])) + (f" and {len(columns) - 6} more" if len(columns) > 6 else "")
    one = len(columns) == 1
    return f"column{'' if one else 's'} {shown} {'is' if one else 'are'} NaN in every row, and no other is"


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


def _kind(f: Finding) -> str:
    return "NaN" if f.kind == "nan" else "inf"


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
