"""Why a step went wrong: a table of the causes, with what each one means and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["CAUSES", "NOTHING_TO_TRY", "Cause", "Explanation"]


class Cause(StrEnum):
    """The causes that a replay, an audit or the guard's recorder can distinguish.

    Example:
        >>> Cause.DOMAIN.value
        'domain'
    """

    NOTHING_WRONG = "nothing_wrong"
    NOT_REPLAYED = "not_replayed"
    BATCH = "batch"
    LABELS = "labels"
    PARAMETERS = "parameters"
    EXPLODED = "exploded"
    TRANSIENT = "transient"
    OTHER_RANK = "other_rank"
    LOW_PRECISION_OVERFLOW = "low_precision_overflow"
    DOMAIN = "domain"
    MASK = "mask"
    WHERE_TRAP = "where_trap"
    BOUNDARY_DERIVATIVE = "boundary_derivative"
    LOSS_SCALE = "loss_scale"
    OVERFLOW = "overflow"
    UNDERFLOW = "underflow"
    NORM_OVERFLOW = "norm_overflow"
    OPTIMIZER_STATE = "optimizer_state"
    STALE_SECOND_MOMENT = "stale_second_moment"
    STALL = "stall"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a cause means, and what to do about it."""

    what: str
    remedy: str


CAUSES: dict[Cause, Explanation] = {
    Cause.NOTHING_WRONG: Explanation(
        "loss, gradients and parameters are finite; any infinities inside were masked as intended",
        "nothing to do",
    ),
    Cause.NOT_REPLAYED: Explanation(
        "the step could not be replayed, so nothing is known of its cause",
        "please report the error above, which is one of stablenum's, if possible with the script",
    ),
    Cause.BATCH: Explanation(
        "an input of the step is not finite: the batch, or a constant in the code",
        "drop the batch, log which one it was, and check the pipeline that made it",
    ),
    Cause.LABELS: Explanation(
        "a label or an index lies outside its range, or no item of the batch has a valid label",
        "check labels against the number of classes and indices against the size of the table; divide a "
        "masked mean by max(count, 1)",
    ),
    Cause.PARAMETERS: Explanation(
        "parameters or buffers were not finite before the forward pass: an earlier update went wrong",
        "return to an earlier checkpoint; audit the optimizer's state; guard the optimizer, so that "
        "such an update is never applied",
    ),
    Cause.EXPLODED: Explanation(
        "the parameters grew out of proportion in an earlier step; the operation only shows it",
        "look at that earlier step: its batch, its gradient, its learning rate; lower the learning rate, or "
        "clip the gradient to a norm (`wrap(optimizer, clip=1.0)`)",
    ),
    Cause.TRANSIENT: Explanation(
        "not reproduced: the step went wrong, but not when it was run again",
        "make the run and the replay alike (seed every generator, set aside what differs, replay all batches "
        "whose gradients were added up) and run again; run the step on a second device; suspect the first "
        "device only if the two disagree",
    ),
    Cause.OTHER_RANK: Explanation(
        "another rank reported the failure before the gradients were reduced: "
        "a bad batch or silent corruption there",
        "replay the step on the rank that reported it",
    ),
    Cause.LOW_PRECISION_OVERFLOW: Explanation(
        "the result overflows the format it is computed in, but is finite in float32",
        "compute this operation in float32, use bfloat16, or cap its inputs",
    ),
    Cause.DOMAIN: Explanation(
        "the function was called at or beyond the edge of its domain", "use its safe form"
    ),
    Cause.MASK: Explanation(
        "a whole row is masked, or masked values are used",
        "give fully masked rows a defined result (zero), and leave them out of the loss; or put a large "
        "finite negative number (-1e9) in place of -inf",
    ),
    Cause.WHERE_TRAP: Explanation(
        "a mask or `where` discards the value but not its derivative: 0 x inf is NaN",
        "select before the function as well as after it (a double where): give the function a safe argument "
        "where its result is not used",
    ),
    Cause.BOUNDARY_DERIVATIVE: Explanation(
        "the value is finite, but its derivative is not",
        "use the safe form, whose derivative is finite",
    ),
    Cause.LOSS_SCALE: Explanation(
        "the scaled gradients overflow but the unscaled ones are finite: the loss scale is too high",
        "nothing to do: dynamic scaling backs off (about once in 2,000 steps); lower a fixed scale",
    ),
    Cause.OVERFLOW: Explanation(
        "the result exceeds the largest number of its format",
        "bound its inputs: a lower learning rate, clipping, normalisation, a soft cap, or a form that stays "
        "in range (logsumexp for log(sum(exp)))",
    ),
    Cause.UNDERFLOW: Explanation(
        "values that matter are flushed to zero", "raise the loss scale, or compute this part in float32"
    ),
    Cause.NORM_OVERFLOW: Explanation(
        "the gradients are finite, but the plain sum of their squares is not",
        "compute the norm by a scaled sum, as stablenum's guard does",
    ),
    Cause.OPTIMIZER_STATE: Explanation(
        "the gradients are finite but the update is not: the optimizer's state is poisoned or overflowed, "
        "eps is 0 in its format, or another setting is at fault",
        "keep the state in float32; repair the poisoned entries (`audit(...)` lists them)",
    ),
    Cause.STALE_SECOND_MOMENT: Explanation(
        "gradients are far larger than the second moment implies", "lower beta2, or clip the update's RMS"
    ),
    Cause.STALL: Explanation(
        "updates are below half an ulp of the weights, which do not change",
        "keep master weights in float32, or use compensated or stochastically rounded updates",
    ),
    Cause.UNKNOWN: Explanation(
        "the first bad operation is known, but its cause is not",
        "inspect the operation's inputs",
    ),
}

# Causes whose remedy is no change to the program.
NOTHING_TO_TRY = (
    Cause.LOSS_SCALE,
    Cause.NOTHING_WRONG,
    Cause.NOT_REPLAYED,
    Cause.OTHER_RANK,
    Cause.TRANSIENT,
    Cause.UNKNOWN,
)
