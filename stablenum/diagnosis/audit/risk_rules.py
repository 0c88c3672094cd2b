"""Risk rules: thresholds on the row of an audit, and what to do. All thresholds are in this file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from stablenum.diagnosis.audit.rows import Row
from stablenum.diagnosis.replay.causes import Cause
from stablenum.formats import FORMATS

__all__ = ["Risk", "Severity", "eps_is_lost", "risks_of"]

# An RMS of g / sqrt(v) above 2.3 precedes loss spikes (Wortsman et al. 2023, arXiv 2304.13013, "RMS spikes").
# The RMS of few elements is noisy, so parameters with fewer than 64 elements have a higher threshold.
_STALE, _STALE_SMALL, _SMALL = 2.3, 10.0, 64
_MOSTLY = 0.5


class Severity(IntEnum):
    """How serious a risk is.

    Example:
        >>> Severity.POISONED > Severity.WARNING
        True
    """

    WARNING = 1  # training is worse than it looks
    DANGER = 2  # the next update may be wrong
    POISONED = 3  # the state is already wrong, and stays wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """One thing that is wrong with one parameter.

    Attributes:
        name: the parameter's name.
        severity: how serious the risk is.
        part: the fraction of the parameter's elements that are affected.
        cause: the cause, as in a verdict.
        what: a description of the risk.
        remedy: what to do about it.

    Example:
        >>> from stablenum.diagnosis.audit import Severity
        >>> risk = Risk(name="w", severity=Severity.DANGER, cause=Cause.STALL, what="w: no", remedy="yes")
        >>> str(risk)
        'w: no'
    """

    name: str
    severity: Severity
    cause: Cause
    what: str
    remedy: str
    part: float = 0.0

    @property
    def weight(self) -> tuple[int, float]:
        """The key by which risks are sorted."""
        return int(self.severity), self.part

    @property
    def breaks_update(self) -> bool:
        """Whether the optimizer's state can make the next update wrong."""
        return self.severity >= Severity.DANGER and self.cause is Cause.OPTIMIZER_STATE

    def __str__(self) -> str:
        return self.what

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "severity": self.severity.name.lower(), "cause": self.cause.value}


def eps_is_lost(eps: float | None, dtype: str | None, *, wide: bool = False) -> bool | None:
    """Return whether eps rounds to 0 in the format of the denominator; None if eps or the format is not
    known.

    Args:
        eps: the configured value.
        dtype: the second moment's format, in which the denominator is computed.
        wide: whether the denominator is computed in float32 regardless of that format (torch's fused
            kernels).

    Example:
        >>> eps_is_lost(1e-8, "float16"), eps_is_lost(1e-8, "float32"), eps_is_lost(None, "float32")
        (True, False, None)
    """
    known = FORMATS.get("float32" if wide else dtype or "")
    if eps is None or known is None:
        return None
    # Rounding to nearest, ties to even, turns numbers of up to half the smallest subnormal into 0.
    return eps <= known.smallest_subnormal / 2


def risks_of(row: Row) -> list[Risk]:
    """Return the risks of a row, one for each rule that applies.

    Example:
        >>> risks_of(Row(name="w", shape=(2,), dtype="float32"))
        []
    """
    return [risk for rule in _RULES for risk in (rule(row),) if risk is not None]


def _parameters(row: Row) -> Risk | None:
    bad = row.measured.parameter_bad
    if not bad:
        return None
    return Risk(
        name=row.name,
        severity=Severity.POISONED,
        part=bad / row.measured.size,
        cause=Cause.PARAMETERS,
        what=f"{row.name}: {bad} of {row.measured.size} parameters are not finite",
        remedy="return to an earlier checkpoint: repairing the state does not restore the parameters",
    )


def _poisoned(row: Row) -> Risk | None:
    m = row.measured
    if not m.poisoned:
        return None
    kinds = {
        "NaN": m.moment_nan,
        "an infinite second moment (their updates are permanently 0)": m.second_inf,
        "a negative second moment (its root is NaN)": m.second_negative,
        "an infinite first moment": m.first_inf,
    }
    listed = ", ".join(f"{n} with {kind}" for kind, n in kinds.items() if n)
    return Risk(
        name=row.name,
        severity=Severity.POISONED,
        part=m.poisoned / m.size,
        cause=Cause.OPTIMIZER_STATE,
        what=f"{row.name}: state of {m.poisoned} of {m.size} elements is poisoned: {listed}",
        remedy="repair these elements (stablenum_torch.repair(optimizer, audit), "
        "stablenum_jax.repair(opt_state, audit)); "
        "guard the optimizer to keep such gradients out of its state",
    )


def _others(row: Row) -> Risk | None:
    bad = {name: n for name, n in row.others.items() if n}
    if not bad:
        return None
    listed = ", ".join(f"{name} ({n})" for name, n in bad.items())
    return Risk(
        name=row.name,
        severity=Severity.DANGER,
        cause=Cause.OPTIMIZER_STATE,
        what=f"{row.name}: state entries of unknown meaning are not finite: {listed}",
        remedy="reset them by hand, or return to a checkpoint: a repair does not touch them",
    )


def _bad_update(row: Row) -> Risk | None:
    bad = row.measured.update_bad
    if not bad:
        return None
    return Risk(
        name=row.name,
        severity=Severity.POISONED,
        part=bad / row.measured.size,
        cause=Cause.OPTIMIZER_STATE,
        what=f"{row.name}: the update of {bad} of {row.measured.size} elements is not finite, "
        "but their state is",
        remedy="keep the state in float32, with an eps that its format does not round to 0",
    )


def _lost_eps(row: Row) -> Risk | None:
    if not row.eps_lost:
        return None
    eps, dtype = row.law.eps, row.second_dtype
    return Risk(
        name=row.name,
        severity=Severity.DANGER,
        cause=Cause.OPTIMIZER_STATE,
        what=f"{row.name}: eps={eps:g}"
        + (f" is 0 in {dtype}" if eps else "")
        + ": where v is 0 the update is 0/0 or x/0",
        remedy="keep the state in float32, or use eps >= "
        + (f"{FORMATS[dtype].smallest_subnormal:.2g}" if dtype in FORMATS else "1e-8"),
    )


def _vanished(row: Row) -> Risk | None:
    m, eps = row.measured, row.law.eps
    if not m.vanished:
        return None
    dangerous = row.eps_lost or (eps is not None and (m.largest_vanished or 0.0) > eps)
    return Risk(
        name=row.name,
        severity=Severity.DANGER if dangerous else Severity.WARNING,
        part=m.vanished / m.size,
        cause=Cause.OPTIMIZER_STATE if dangerous else Cause.UNDERFLOW,
        what=f"{row.name}: v is 0 but m is not, in {m.vanished} of {m.size} elements (m up to "
        f"{m.largest_vanished:.2g}): "
        + ("they are divided by eps alone" if dangerous or eps is None else "their updates are far below lr"),
        remedy=f"keep the second moment in float32 (it is {row.second_dtype or 'of unknown format'}); "
        "raise the loss scale if gradients underflow",
    )


def _stale(row: Row) -> Risk | None:
    ratio, size = row.measured.gradient_ratio, row.measured.size
    if ratio is None or ratio <= (_STALE if size >= _SMALL else _STALE_SMALL):
        return None
    return Risk(
        name=row.name,
        severity=Severity.WARNING,
        part=1.0 - 1.0 / ratio,
        cause=Cause.STALE_SECOND_MOMENT,
        what=f"{row.name}: gradients are {ratio:.3g} times (RMS) what the second moment implies",
        remedy="lower beta2 (0.95 to 0.99), or clip the update's RMS: clip=ClipUpdateRMS(1.0)",
    )


def _stuck_average(row: Row) -> Risk | None:
    beta2, known = row.law.beta2, FORMATS.get(row.second_dtype or "")
    # If 1 - beta2 is below a quarter of eps, v beta2 rounds back to v for every significand.
    if beta2 is None or known is None or known.bits > 16 or not 0.0 < 1.0 - beta2 < known.eps / 4:
        return None
    return Risk(
        name=row.name,
        severity=Severity.WARNING,
        cause=Cause.STALE_SECOND_MOMENT,
        what=f"{row.name}: {known.name} cannot hold a second moment with beta2={beta2:g}: "
        f"a decay of {1 - beta2:.2g} per step is below half an ulp, so it never decreases",
        remedy="keep the second moment in float32, or lower beta2",
    )


def _narrow(row: Row) -> Risk | None:
    if row.second_dtype != "float16":
        return None
    return Risk(
        name=row.name,
        severity=Severity.WARNING,
        cause=Cause.OPTIMIZER_STATE,
        what=f"{row.name}: float16 holds second moments only from 6e-8 to 65504; "
        "squared gradients leave that range",
        remedy="keep parameters and state in float32 and compute in float16 (autocast, stablenum.Policy)",
    )


def _below_eps(row: Row) -> Risk | None:
    part = row.below_eps
    if part is None or part <= _MOSTLY:
        return None
    return Risk(
        name=row.name,
        severity=Severity.WARNING,
        part=part,
        cause=Cause.UNDERFLOW,
        what=f"{row.name}: sqrt(v) is below eps={row.law.eps:g} in {part:.0%} of the elements: eps "
        "determines their update, which is smaller than lr",
        remedy="lower eps well below sqrt(v), with a float32 state; "
        "raise the loss scale if gradients underflow. A parameter whose gradient is 0 by construction, "
        "as a bias in front of a batch norm, is harmless and may be left out",
    )


def _stall(row: Row) -> Risk | None:
    part = row.stalled
    if part is None or part <= _MOSTLY:
        return None
    return Risk(
        name=row.name,
        severity=Severity.WARNING,
        part=part,
        cause=Cause.STALL,
        what=f"{row.name}: w + dw == w in {row.dtype} for {part:.0%} of the elements with a nonzero update",
        remedy="keep master weights in float32, or use compensated (Kahan) or stochastically rounded updates",
    )


_RULES: tuple[Callable[[Row], Risk | None], ...] = (
    _parameters, _poisoned, _others, _bad_update, _lost_eps, _vanished, _stale, _stuck_average, _narrow,
    _below_eps, _stall,
)  # fmt: skip
