"""Steps that are taken more carefully for a while: a lower learning rate, a tighter clip, a wider format."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor

from stablenum.guard.config import GuardConfig
from stablenum.recovery.hooks import Easing
from stablenum.recovery.settings import Response
from stablenum.rules.clipping import ClipByGlobalNorm
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["Eased"]

_logger = logging.getLogger("stablenum")


class Eased:
    """What is different while steps are taken more carefully.

    Args:
        opt: the guarded optimizer.
    """

    def __init__(self, opt: GuardedOptimizer) -> None:
        self._opt = opt
        self._rate: _LowerRate | None = None
        self._format: _WiderFormat | None = None
        self._configs: tuple[GuardConfig, GuardConfig] | None = None  # before, and now
        self._told = False

    def possible(self, response: Response) -> Response:
        """Return a response without a wider format if the guard has none; that is logged, once."""
        if not response.wider or self._opt.config.escalate is not None:
            return response
        if not self._told:
            self._told = True
            _logger.warning(
                "Response.wider has no effect: the guard has no other format to compute in. Give "
                "stablenum_torch.wrap escalate=EscalatePrecision(...)."
            )
        return dataclasses.replace(response, wider=False)

    def ease(self, easing: Easing | None) -> None:
        """Take the next steps as ``easing`` says, or as usual again."""
        self._end()
        if easing is None:
            return
        if easing.rate != 1.0:
            self._rate = _LowerRate(self._opt, easing.rate)
        if easing.clip_at is not None:
            before = self._opt.config
            self._opt.config = clipped_at(before, easing.clip_at)
            self._configs = before, self._opt.config
        if easing.wider:
            self._format = _WiderFormat(self._opt)

    def _end(self) -> None:
        if self._rate is not None:
            self._rate.end()
        if self._format is not None:
            self._format.end()
        if self._configs is not None and self._opt.config == self._configs[1]:
            self._opt.config = self._configs[0]
        self._rate = self._format = self._configs = None


def clipped_at(config: GuardConfig, norm: float) -> GuardConfig:
    """Return settings that clip the joint norm at ``norm``, or lower if they do so already."""
    rules = list(config.clip_rules)
    for i, rule in enumerate(rules):
        if isinstance(rule, ClipByGlobalNorm):
            rules[i] = dataclasses.replace(rule, max_norm=min(rule.max_norm, norm))
            return dataclasses.replace(config, clip=tuple(rules))
    # In front, where it is allowed for every layout of ranks.
    return dataclasses.replace(config, clip=(ClipByGlobalNorm(norm), *rules))


class _LowerRate:
    """Multiplies the learning rates while the optimizer steps; schedulers never see it.

    Args:
        opt: the guarded optimizer.
        rate: the factor.
    """

    def __init__(self, opt: GuardedOptimizer, rate: float) -> None:
        self._opt, self._factor = opt, rate
        self._before: list[tuple[dict[str, Any], Any]] = []
        # The inner optimizer's, which has no exception to expect after a step.
        self._hooks = [
            opt.inner.register_step_pre_hook(self._lower),
            opt.inner.register_step_post_hook(self._put_back),
        ]

    def end(self) -> None:
        self._put_back()
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _lower(self, *_: Any) -> None:
        self._put_back()  # after a step that an exception ended
        for group in self._opt.param_groups:
            rate = group.get("lr")
            if isinstance(rate, Tensor):
                self._before.append((group, rate.clone()))
                rate.mul_(self._factor)
            elif rate is not None:
                self._before.append((group, rate))
                group["lr"] = rate * self._factor

    @torch.no_grad()
    def _put_back(self, *_: Any) -> None:
        for group, rate in self._before:
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._before.clear()


class _WiderFormat:
    """Holds the guard's precision level one format above that of its policy, or higher.

    Args:
        opt: the guarded optimizer, with ``escalate``.
    """

    def __init__(self, opt: GuardedOptimizer) -> None:
        self._opt = opt
        self._hold()
        self._hook = opt.register_step_post_hook(self._hold)

    @torch.no_grad()
    def _hold(self, *_: Any) -> None:
        self._opt.guard_state.escalation.level.clamp_(min=1)

    @torch.no_grad()
    def end(self) -> None:
        """Go back to the format of the policy, unless the guard has gone on to a still wider one."""
        self._hook.remove()
        level = self._opt.guard_state.escalation.level
        level.masked_fill_(level == 1, 0)
