"""What to do about an optimizer whose update goes wrong: more often a setting than its state is at fault."""

from __future__ import annotations

from collections.abc import Sequence

from stablenum.diagnosis.replay.findings import Finding

__all__ = ["centred", "of_settings", "on_update"]

_ROOTS = ("rsqrt", "sqrt")
_QUOTIENTS = ("div", "reciprocal", "rsqrt")
_CENTRED = (
    "make the optimizer with centered=False, or take Adam: where the gradient hardly changes between steps "
    "(full batches, a loss of absolute errors), rounding makes E[g^2] - E[g]^2 negative; {eps}"
)
_EPS = (
    "the divisor is 0, because eps is 0 or is lost in its format: give the optimizer an eps above 0 (1e-8 in "
    "float32, 1e-4 in float16)"
)
_NO_EPS = (
    "the gradient is all zeros, and {library} divides it by its length without an eps: leave such a step "
    "out, or divide by the length plus a small number yourself"
)
_DECAY = "a decay rate (beta, alpha, rho) outside 0 to 1 makes the average negative: set it below 1"
_TOO_LARGE = (
    "the update itself overflows: lower the learning rate, keep momentum below 1, and clip the gradient to a "
    "norm (`wrap(optimizer, clip=1.0)`)"
)
_SETTING = (
    "give the optimizer a finite number: mend the schedule that made this one, perhaps by a division by 0 "
    "warm-up steps, or by a power of what is below 0 after the last step"
)
_RATE_OF_DECAY = "set the decay rate below 1: the bias correction divides by 1 minus its power, which is 0"


def centred(f: Finding | None, state: Sequence[str]) -> bool:
    """Return whether an optimizer takes the root of a centred second moment that cancelled below 0."""
    if f is None or f.phase != "update" or f.operation not in _ROOTS or _is_poisoned(state):
        return False
    name = f.library.rpartition(".")[2].lower()
    return name in ("rmsprop", "scale_by_stddev") and any(s.min < 0.0 for s in f.inputs)


def on_update(f: Finding, state: Sequence[str]) -> str:
    """Return what to do about an operation in an optimizer's update; "" if its state is at fault, or nothing
    is known.

    Args:
        f: the operation.
        state: what is wrong with the optimizer's state.
    """
    if centred(f, state):
        inside = f.library.startswith("optax.")
        return _CENTRED.format(
            eps="or make eps larger, which is added inside the root"
            if inside
            else "a larger eps does not help, because it is added after the root"
        )
    if _is_poisoned(state) or not f.library:
        return ""
    if f.operation == "sqrt" and any(s.min < 0.0 for s in f.inputs):
        return _DECAY
    if f.library.rpartition(".")[2].startswith("normalize"):
        return _NO_EPS.format(library=f.library)
    if f.operation in _QUOTIENTS and any(s.zero or s.subnormal for s in f.inputs[-1:]):
        return _EPS
    return _TOO_LARGE if f.kind == "inf" and f.operation not in _QUOTIENTS else ""


def of_settings(fact: str) -> str:
    """Return what to do about a setting that is not what its optimizer can use."""
    return _RATE_OF_DECAY if "not below 1" in fact else _SETTING


def _is_poisoned(state: Sequence[str]) -> bool:
    return any("is poisoned" in problem or "of unknown meaning" in problem for problem in state)
