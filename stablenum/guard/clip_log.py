"""Log messages about other code that clips gradients before the guard sees them.

Clipping by norm shows in the norms that the guard records anyway. Clipping by value shows in the largest
elements, which an adapter measures if it knows that the gradients were changed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from stablenum.guard.decide import GuardState
from stablenum.guard.recorder import CAPACITY, Row, read_rows
from stablenum.rules.clipping.autoclip import AutoClipState
from stablenum.rules.clipping.zclip import ZClipState
from stablenum.rules.spikes import SpikeState

__all__ = ["Ceiling", "ClipLog", "ceiling"]

_TIES = 16  # norms that are equal and that none exceeds
_EQUAL = 1e-5  # clip_grad_norm_ leaves norms that differ by 1e-6, and by the rounding of float32
_FAR_BELOW = 0.01  # what is left of a bound of scaled gradients after they are divided by the scale

_logger = logging.getLogger("stablenum")


class Ceiling(NamedTuple):
    """A norm of the gradients as the guard found them that many steps reach and none exceeds.

    Attributes:
        norm: the norm, of gradients that are still multiplied by the loss scale.
        reached: how many steps have reached it.
        steps: of how many steps.
        loss_scale: the largest loss scale of the steps that have reached it.
        last: the number of the last of these steps.
    """

    norm: float
    reached: int
    steps: int
    loss_scale: float
    last: int


def ceiling(rows: Sequence[Row]) -> Ceiling | None:
    """Return the bound to which other code must have clipped the gradients of these steps, if there is one.

    It takes at least 16 steps and a quarter of all. Norms may be equal for other reasons, so it must show
    in one of two ways that they are not:

    - the norm is the same under two loss scales, although it should be proportional to them;
    - the norm is a number of two digits at most, as bounds are (1, 0.5, 2.5), and not of the same bits in
      each step, as those of constant gradients are (a linear loss, signs, a frozen model at one batch).
      Under a loss scale, the unscaled norm is also below 0.01, so that it is not the gradients themselves
      that the model normalizes.

    Args:
        rows: recorded steps. Those that were not applied, and norms of 0, are passed by.
    """
    norms = [(row.grad_norm * row.loss_scale, row) for row in rows if row.applied and row.grad_norm > 0]
    top = max((norm for norm, _ in norms), default=0.0)
    ties = [(norm, row) for norm, row in norms if norm >= top * (1 - _EQUAL)]
    if len(ties) < max(_TIES, len(norms) / 4):
        return None
    scales = {row.loss_scale for _, row in ties}
    if len(scales) == 1:
        (scale,) = scales
        if not _is_short(top) or len({norm for norm, _ in ties}) == 1:
            return None
        if scale != 1 and top / scale > _FAR_BELOW:
            return None
    return Ceiling(top, len(ties), len(norms), max(scales), ties[-1][1].step)


def _is_short(norm: float) -> bool:
    """Return whether a norm is a number of two decimal digits at most."""
    return abs(norm - float(f"{norm:.2g}")) <= _EQUAL * norm


class ClipLog:
    """Logs a warning if other code clips the gradients first, and again when the run is 10 times as long."""

    def __init__(self) -> None:
        self._look = self._quiet_until = _TIES
        self._step = 0

    def after_step(self, step: int, state: GuardState) -> None:
        """Log a warning if one is due.

        Without a loss scale, such clipping matters only to rules that compare norms: without such rules
        nothing is logged.

        Args:
            step: the number of steps so far.
            state: the guard's state. Only the recorder is read, and only where it may hold something new.
        """
        if step < self._step:  # another run, with a new state
            self._look = self._quiet_until = _TIES
        # In JAX one log is for all states, so that this may be another one of as many steps.
        other = step == self._step
        self._step = step
        if step < self._quiet_until or (step < self._look and not other):
            return
        self._look = step + min(step, CAPACITY)
        found = ceiling(read_rows(state.recorder))
        message = None if found is None else _message(found, _comparing(state))
        if message is not None:
            self._quiet_until = 10 * step
            _logger.warning(message)

    def after_change(self, largest: float, reached: int, loss_scale: float) -> None:
        """Log a warning if a change of scaled gradients by other code was clipping by value.

        It was if at least two elements have the largest size, which is a number of two digits at most and
        far smaller than the loss scale. Averaging, masking or reducing gradients leaves no such elements.

        Args:
            largest: the largest size of an element of the gradients, still multiplied by the loss scale.
            reached: how many elements have this size.
            loss_scale: the loss scale.
        """
        far_below = 0 < largest <= _FAR_BELOW * loss_scale
        if reached < 2 or not far_below or not _is_short(largest):
            return
        bound = float(f"{largest:.2g}")
        _logger.warning(
            f"{reached} elements of the gradients came to the guard with the size {bound:g}, and none with a "
            "larger one: other code clips them by value between the backward pass and the step, while they "
            f"are still multiplied by the loss scale {loss_scale:g}. Divided by it, none is above "
            f"{largest / loss_scale:.2e}, which hardly moves the weights; and an inf becomes a finite "
            "number, so that its step is not skipped. Leave the other clipping out and give the guard "
            f"clip=ClipByValue({bound:g}); or call opt.unscale_() first."
        )


def _comparing(state: GuardState) -> list[str]:
    """Return the names of the rules that compare the joint norm with those of earlier steps."""
    kinds = {SpikeState: "SpikeGuard", AutoClipState: "AutoClip", ZClipState: "ZClip"}
    return [kinds[type(part)] for part in (state.spike, *state.clip) if type(part) in kinds]


def _message(found: Ceiling, rules: Sequence[str]) -> str | None:
    bound = float(f"{found.norm:.3g}")
    seen = (
        f"In {found.reached} of {found.steps} steps up to step {found.last}, the gradients came to the guard "
        f"with the joint norm {bound:g}, and in none with a larger one: other code clips or normalizes them "
        "first"
    )
    if found.loss_scale > 1:
        return (
            f"{seen}, while they are still multiplied by the loss scale {found.loss_scale:g}. Divided by it, "
            f"the norm is {found.norm / found.loss_scale:.2e}, which hardly moves the weights. Leave the "
            f"other clipping out and give the guard clip={bound:g}; or clip unscaled gradients: in PyTorch "
            "call opt.unscale_() first, in JAX put the clipping after the guard in the chain."
        )
    if not rules:
        return None
    return (
        f"{seen}. {' and '.join(rules)} can notice no gradient that is larger than usual. Leave the other "
        f"clipping out (max_grad_norm=0, gradient_clip_val=None), and give the guard clip={bound:g}."
    )
