"""The buffers of a model, such as batch norm's running statistics: a skipped step keeps them too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stablenum_torch._devices.state import to_device

__all__ = ["KeptBuffers"]


class KeptBuffers:
    """Copies of a model's buffers from before a step's first forward pass, restored if the step is skipped.

    Args:
        module: the model. A forward pass in training mode, of the whole or of a part that has buffers, begins
            with the copies. (Not every program calls the whole: Lightning's ``training_step`` calls parts.)
    """

    @classmethod
    def of(cls, module: nn.Module) -> KeptBuffers:
        """Return what keeps the buffers of a module, made at the first call.

        The optimizers of one model share it, as those of a GAN do: the forward passes since the last step of
        any of them then belong to the next step. Each with its own copies would restore those from before the
        steps of the others.
        """
        for hook in module._forward_pre_hooks.values():
            kept = getattr(hook, "__self__", None)
            if isinstance(kept, cls) and kept.module is module:
                kept._begun = False  # copies from a training that has ended
                return kept
        return cls(module)

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._before: list[tuple[Tensor, Tensor]] = []
        self._begun = False
        for part in module.modules():
            if part is module or part._buffers:
                part.register_forward_pre_hook(self._before_forward)

    @torch.no_grad()
    def after_step(self, applied: Tensor) -> None:
        """Restore the buffers if the step was skipped.

        Args:
            applied: () bool. Its value is read only if it is in the host's memory.
        """
        if self._begun and not (applied.is_cpu and applied):
            for buffer, before in self._before:
                kept = (
                    before
                    if applied.is_cpu
                    else torch.where(to_device(applied, buffer.device), buffer, before)
                )
                buffer.copy_(kept)
        self._begun = False

    @torch.no_grad()
    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._begun or not module.training:
            return
        now = list(self.module.buffers())
        known = [buffer for buffer, _ in self._before]
        if len(known) != len(now) or any(a is not b for a, b in zip(known, now, strict=True)):
            self._before = [(buffer, torch.empty_like(buffer)) for buffer in now]
        for buffer, before in self._before:
            before.copy_(buffer)
        self._begun = True
