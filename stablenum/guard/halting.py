"""The exception that ends a halted run."""

from __future__ import annotations

import math

from stablenum.errors import NonFiniteError
from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import GuardState
from stablenum.guard.faults import BadSetting
from stablenum.guard.readout import Names, StepRecord, history, loss_was_given, metrics
from stablenum.guard.reasons import SPIKES, Reason, explain_reason

__all__ = ["check_halted", "first_bad_parameter"]


def check_halted(
    state: GuardState,
    names: Names | None = None,
    *,
    config: GuardConfig | None = None,
    setting: BadSetting | None = None,
) -> None:
    """Raise if the guard has halted. ``setting`` is the optimizer's that was not finite, if one was not.

    Raises:
        NonFiniteError: ``state.halted`` is set. The message names the first bad parameter, the
            recent loss scales, the likely cause and the remedy.
    """
    if not state.halted.tolist():
        return
    last, rows = metrics(state, names), history(state, names)
    skipped = state.nonfinite_in_a_row.tolist()
    # Spikes were skipped too, but are not the reason for stopping.
    streak = [row for row in rows[-last["skipped_in_a_row"] :] if row["reason"] not in SPIKES] or [last]
    first = streak[0]
    scales = [f"{row['loss_scale']:g}" for row in streak[-8:]]
    limit = ""
    if config is not None and config.skip_limit is not None:
        raises = config.on_nonfinite == "raise"
        limit = ' (on_nonfinite="raise")' if raises else f" (the limit is {config.skip_limit})"
    raise NonFiniteError(
        f"Training stopped: {skipped} step(s) in a row could not be applied{limit}, "
        f"from step {last['step'] - skipped + 1} on. "
        f"{first_bad_parameter(first)} "
        f"At step {first['step']}{'' if len(streak) == skipped else ', the first still recorded,'} "
        f"{explain_reason(first['reason'])} "
        f"{'' if setting is None else f'The setting: {setting} '}"
        f"Loss scale over these steps: {', '.join(scales)}. "
        "No skipped step was applied: parameters and optimizer state are those from before these steps.",
        metrics=last,
        history=rows,
    )


def first_bad_parameter(row: StepRecord) -> str:
    """Return text with the gradient norm and the loss of a skipped step, and its first bad parameter if a
    gradient was bad."""
    loss = f", loss {row['loss']:g}" if loss_was_given(row) else ""
    numbers = f"gradient norm {row['grad_norm']:g}{loss}"
    worst = row["worst"]
    where = "" if row["worst_rank"] is None else f" on rank {row['worst_rank']}"
    parameter = f"{worst.name or f'parameter {worst.index}'}{where}"
    if row["reason"] == Reason.NONFINITE_UPDATE:
        return f"First non-finite parameter: {parameter} ({numbers})."
    if math.isfinite(row["grad_norm"]):
        bad_loss = where and row["reason"] == Reason.NONFINITE_LOSS
        return f"All gradients were finite ({numbers}{f'; first bad loss{where}' if bad_loss else ''})."
    if loss and not math.isfinite(row["loss"]):  # then every gradient is NaN, and the first one says nothing
        return f"The loss{where} was not finite, nor were the gradients ({numbers})."
    return f"First bad parameter: {parameter} ({numbers})."
