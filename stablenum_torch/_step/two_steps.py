"""Optimizers that take a step in two parts, such as SAM: the parameters climb, then come back and move.

``first_step`` moves the parameters to where the loss is larger; there the gradient is computed again, and
``second_step`` goes back and steps with it. Between the two parts the parameters are not those of the
training, so a step that is skipped has to put them back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum._support.interrupts import finish
from stablenum_torch._devices.waits import wait_for_bool
from stablenum_torch._step.measure.norms import gradient_norms_without_wait

__all__ = ["PARTS", "TwoSteps", "parts_of"]

# The methods of the protocol, which PyTorch's implementations of "Sharpness-Aware Minimization" (Foret et
# al., arXiv 2010.01412) have: SAM, LookSAM, WSAM and others.
PARTS = ("first_step", "second_step")
# Further methods that move the parameters, or compute the gradients themselves: BSAM, GSAM, extragradient.
_OTHERS = ("third_step", "ascent_step", "descent_step", "extrapolation", "perturb_weights", "set_closure")


def parts_of(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the methods by which an optimizer steps besides ``step``; () for an ordinary one."""
    return tuple(name for name in (*PARTS, *_OTHERS) if callable(getattr(optimizer, name, None)))


class TwoSteps:
    """Stands for an optimizer of two parts: its ``step`` is the second part.

    The parameters and the entries of the state are kept while the first part has been taken.

    Args:
        optimizer: the optimizer inside.

    Attributes:
        bad: () bool, whether the first gradient was not finite, so that the first part was left out; None
            before it.
        bad_loss: () the loss of the first part if it was not finite, otherwise None.
        second: takes the second part.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.bad: Tensor | None = None
        self.bad_loss: Tensor | None = None
        self.second: Callable[[], Any] = optimizer.second_step
        self._before: list[tuple[Tensor, Tensor, dict[str, Any] | None]] = []

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:
        return self._optimizer.state

    def climb(self, loss: Tensor | None, found_inf: Tensor | None, first: Callable[[], Any]) -> Any:
        """Take the first part, unless a gradient or the loss is not finite. The host waits for the device.

        Args:
            loss, found_inf: as in the inputs of a step.
            first: takes the first part.
        """
        self.go_back()  # from a first part whose second one never came
        params = [p for group in self.param_groups for p in group["params"]]
        device = params[0].device
        bad = ~gradient_norms_without_wait(params, device).isfinite().all()
        bad_loss = None if loss is None else ~loss.to(device).isfinite()
        if bad_loss is not None:
            bad |= bad_loss
        if found_inf is not None:
            bad |= found_inf.to(device)
        self._before = [(p, p.detach().clone(), self._entries(p)) for p in params if p.grad is not None]
        self.bad = bad
        if not wait_for_bool(bad):
            return first()
        if bad_loss is not None and wait_for_bool(bad_loss):
            self.bad_loss = loss
        return None

    def _entries(self, p: Tensor) -> dict[str, Any] | None:
        return dict(self.state[p]) if p in self.state else None

    def step(self) -> None:
        """Take the second part."""
        self.second()

    def after_step(self, *, applied: bool) -> None:
        """Forget the first part, after putting the parameters back if the step was skipped."""
        if not applied:
            self.go_back()
        self.bad, self.bad_loss, self._before = None, None, []

    @property
    def climbed(self) -> bool:
        """Whether a first part waits for its second one."""
        return self.bad is not None

    def go_back(self) -> None:
        """Put the parameters and the state back to what they were before the first part."""
        finish(functools.partial(_restore, self.state, self._before))
        self.bad, self.bad_loss, self._before = None, None, []


@torch.no_grad()
def _restore(state: Any, before: list[tuple[Tensor, Tensor, dict[str, Any] | None]]) -> None:
    for p, value, entries in before:
        p.copy_(value)
        if entries is not None:
            state[p] = entries
        else:
            state.pop(p, None)
