"""Why a step was applied or refused: integer codes, and one table that explains them.

The code is an array in the state, so it costs no wait to write; the words are looked up when
somebody reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["EXPLANATIONS", "Explanation", "Reason", "explain_reason"]


class Reason(IntEnum):
    """What happened to a step. ``OK`` and ``CLIPPED`` were applied, the others were not.

    Example:
        >>> Reason(3).name
        'INF_GRADIENT'
    """

    OK = 0
    CLIPPED = 1
    NAN_GRADIENT = 2
    INF_GRADIENT = 3
    NONFINITE_LOSS = 4
    FOUND_INF = 5
    NO_STEP_YET = 6


@dataclass(frozen=True, slots=True)
class Explanation:
    """One row of the table: what happened, the likely cause, and what to do."""

    what: str
    cause: str
    remedy: str


EXPLANATIONS: dict[Reason, Explanation] = {
    Reason.OK: Explanation("the step was applied", "-", "nothing to do"),
    Reason.CLIPPED: Explanation(
        "the step was applied with clipped gradients",
        "the gradient norm was above the clip threshold",
        "nothing to do; if most steps are clipped, lower the learning rate or raise the threshold",
    ),
    Reason.NAN_GRADIENT: Explanation(
        "the step was skipped: a gradient holds NaN",
        "0/0, inf - inf, 0 x inf, log or sqrt at the edge of its domain, "
        "or NaN in the batch or the parameters",
        "look at the parameter named and at the batch; use the safe form of the function that feeds it; "
        "lowering the loss scale does not cure a NaN",
    ),
    Reason.INF_GRADIENT: Explanation(
        "the step was skipped: a gradient holds inf",
        "overflow: with dynamic loss scaling in half precision this is expected about once in "
        "growth_interval steps; without it, an activation or a loss left the format's range",
        "nothing to do if the next step is good; if it persists at min_scale or without scaling, compute the "
        "parameter's layer in float32 or bfloat16",
    ),
    Reason.NONFINITE_LOSS: Explanation(
        "the step was skipped: the unscaled loss is NaN or inf",
        "a bad batch, a loss evaluated at the edge of its domain, or parameters that have already diverged",
        "check the batch and the loss function (cross entropy from logits instead of log of a probability); "
        "the loss scale is not the cause and was left alone",
    ),
    Reason.FOUND_INF: Explanation(
        "the step was skipped: another rank, an outer wrapper or an unguarded leaf "
        "reported a non-finite value",
        "the trouble lies outside the gradients that this guard measures",
        "look at the reporting rank or wrapper",
    ),
    Reason.NO_STEP_YET: Explanation("no step has been taken", "-", "nothing to do"),
}


def explain_reason(reason: int) -> str:
    """One sentence for people: what happened, the likely cause, the remedy.

    Raises:
        ValueError: ``reason`` is not a :class:`Reason`.

    Example:
        >>> explain_reason(1)
        'the step was applied with clipped gradients. Likely cause: the gradient norm was above ...'
    """
    row = EXPLANATIONS[Reason(reason)]
    if row.cause == "-":
        return f"{row.what}."
    return f"{row.what}. Likely cause: {row.cause}. Remedy: {row.remedy}."
