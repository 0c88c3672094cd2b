"""Why a step was applied or skipped: integer codes, and a table that explains them.

The code is an array in the state, so writing it does not make the host wait. The explanation is
looked up when the code is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "APPLIED",
    "EXPLANATIONS",
    "MAY_SPOIL_PARAMETERS",
    "NO_PARAMETER",
    "SPIKES",
    "Explanation",
    "Reason",
    "explain_reason",
]


_NUMBERS = tuple("bcdeEfFgGnoxX%")  # the formats of numbers, by their last letter


class Reason(IntEnum):
    """What happened to a step. ``OK``, ``CLIPPED`` and ``SPIKE_CLIPPED`` were applied, the others were not.

    A reason is a whole number, and JSON has it as one; it is printed by its name.

    Example:
        >>> str(Reason(3)), Reason(3) == 3
        ('INF_GRADIENT', True)
    """

    OK = 0
    CLIPPED = 1
    NAN_GRADIENT = 2
    INF_GRADIENT = 3
    NONFINITE_LOSS = 4
    FOUND_INF = 5
    NO_STEP_YET = 6
    SPIKE_LOSS = 7
    SPIKE_GRAD_NORM = 8
    SPIKE_CLIPPED = 9
    NOT_A_SCALE_PROBLEM = 10
    NONFINITE_SETTING = 11
    NONFINITE_UPDATE = 12

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        return format(int(self) if spec[-1:] in _NUMBERS else self.name, spec)


APPLIED = (Reason.OK, Reason.CLIPPED, Reason.SPIKE_CLIPPED)
# Skipped though everything is finite.
SPIKES = (Reason.SPIKE_LOSS, Reason.SPIKE_GRAD_NORM)
# After a step with one of these, a parameter that is not finite was made so by the optimizer, if by the step.
MAY_SPOIL_PARAMETERS = (*APPLIED, Reason.NONFINITE_UPDATE)
# The worst parameter of these skips is only the one with the largest gradient.
NO_PARAMETER = (Reason.NONFINITE_LOSS, Reason.FOUND_INF, Reason.SPIKE_LOSS, Reason.NONFINITE_SETTING)


@dataclass(frozen=True, slots=True)
class Explanation:
    """One row of the table: what happened, the likely cause and the remedy."""

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
        "or NaN in the batch or the parameters; with a loss scale also an overflow in the backward pass, in "
        "which inf soon becomes NaN",
        "with dynamic loss scaling, nothing to do if the next steps are good at a lower scale; otherwise "
        "find the line with `stablenum explain --strict SCRIPT`, or look at the parameter named and the "
        "batch, and use the safe form of the function that feeds it",
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
        "a bad batch, a loss evaluated at the edge of its domain, or parameters that have diverged or are "
        "NaN or inf themselves",
        "find the line with `stablenum explain --strict SCRIPT`, or check the batch and the loss function "
        "(cross entropy from logits instead of log of a probability); "
        "check the parameters: `stablenum verify` a checkpoint, and in float16 see that eps is not 0 "
        "(EpsTooSmallWarning); "
        "the loss scale is not the cause and was left alone",
    ),
    Reason.FOUND_INF: Explanation(
        "the step was skipped: another rank, an outer wrapper, an unguarded leaf or a kept buffer "
        "had a non-finite value",
        "the non-finite value is outside the gradients that this guard measures; for a buffer, this batch "
        "made running statistics NaN or inf, or one before it that was dropped without a step; or, in the "
        "first step after a state with a loss scale was restored into a guard without one, the gradients may "
        "be multiplied by that scale",
        "look at the rank, the wrapper or the batch; after such a restore, nothing to do",
    ),
    Reason.NO_STEP_YET: Explanation("no step has been taken", "-", "nothing to do"),
    Reason.SPIKE_LOSS: Explanation(
        "the step was skipped: its loss is far above that of the last steps",
        "an unusual batch, or parameters at a point where this batch gives a large loss",
        "nothing to do if it stays rare; if the same batches cause it again, look at them; if they are good, "
        "raise threshold or min_spread, or use action='clip', which still learns from them; if spikes follow "
        "one another, lower the learning rate, clip, or go back to an older checkpoint and leave these "
        "batches out",
    ),
    Reason.SPIKE_GRAD_NORM: Explanation(
        "the step was skipped: its gradient norm is far above that of the last steps",
        "an unusual batch, a stale second moment, or one layer that has begun to diverge",
        "nothing to do if it stays rare; look at the parameter named; if spikes follow one another, lower "
        "the learning rate, clip each tensor (AdaGC), or lower Adam's beta2",
    ),
    Reason.SPIKE_CLIPPED: Explanation(
        "the step was applied with its gradients shrunk to the usual norm",
        "its loss or its gradient norm is far above that of the last steps",
        "nothing to do if it stays rare; spike='skip' skips such steps instead",
    ),
    Reason.NOT_A_SCALE_PROBLEM: Explanation(
        "the step was skipped: gradients are still not finite at the smallest loss scale",
        "a genuine overflow or NaN in the model, the loss or the parameters; no scale that min_scale allows "
        "avoids it, so the scale is not lowered further",
        "find the first non-finite operation (`stablenum explain --strict SCRIPT` does), in the layer of "
        "the parameter named; compute it in float32 or bfloat16; check that the parameters themselves are "
        "finite",
    ),
    Reason.NONFINITE_SETTING: Explanation(
        "the step was skipped: a setting of the optimizer, such as its learning rate, is NaN or inf",
        "a schedule that divides by zero or leaves its range, a number that was parsed or computed wrongly, "
        "or a state dict with such a number",
        "look at the optimizer's settings and at what sets them; the gradients are not the cause",
    ),
    Reason.NONFINITE_UPDATE: Explanation(
        "the step was skipped: the optimizer makes NaN or inf of finite gradients, or made its parameters so "
        "in the step before",
        "eps of 0, or one that rounds to 0 in the parameters' format, where a gradient is zero; a square of "
        "a gradient beyond the format's range; a learning rate that is too large or not finite; or other "
        "code that wrote to the parameters",
        "if the parameter named is NaN or inf itself, go back to a checkpoint from before (Recovery does); "
        "give the optimizer an eps above 0 and float32 parameters, and look at its learning rate",
    ),
}


def explain_reason(reason: int) -> str:
    """Return a readable explanation: what happened, the likely cause and the remedy.

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
