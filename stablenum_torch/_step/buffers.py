"""The buffers of a model, such as batch norm's running statistics: a skipped step keeps them too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stablenum_torch._devices.finiteness import which_are_finite
from stablenum_torch._devices.ranks import local_part
from stablenum_torch._devices.state import to_device

__all__ = ["KeptBuffers"]


class KeptBuffers:
    """The buffers of a model, for one of its optimizers: restored if that skips a step.

    They become what they were before the step's first forward pass. The optimizers of one model, as those of
    a GAN, share the copies: the forward passes since the last step of any of them belong to the next step.
    With copies of its own, each would restore what was before the steps of the others. Several may step after
    the same forward pass: a skip of any of them then restores what was before it.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._waiting = False  # there was a forward pass since this optimizer's last step
        self._copies = _Copies.of(module)
        self._copies.kept.append(self)

    def before_forward(self) -> None:
        """Wait for the step to which a forward pass belongs."""
        self._waiting = True

    def poisoned(self, device: torch.device) -> Tensor | None:
        """Return whether a forward pass of this step has made a buffer non-finite that was finite before.

        Returns:
            () bool on ``device``; None if there was no forward pass, or the model has no buffer of numbers.
        """
        return self._copies.poisoned(device) if self._waiting else None

    def after_step(self, applied: Tensor) -> None:
        """Restore the buffers if the step was skipped.

        Args:
            applied: () bool. Its value is read only if it is in the host's memory.
        """
        if self._waiting and not (applied.is_cpu and applied):
            self._copies.restore(applied)
        self._waiting = self._copies.current = False


class _Copies:
    """Copies of a model's buffers from before a step's first forward pass.

    A forward pass in training mode, of the whole model or of a part that has buffers, begins with the copies.
    (Not every program calls the whole: Lightning's ``training_step`` calls parts.)

    Attributes:
        kept: who restores from the copies, one for each optimizer.
        current: whether they belong to the next step; otherwise the next forward pass makes new ones.
        found: () bool, whether a buffer was found non-finite since they were made; None if nobody has looked.
            One optimizer restores the buffers, and the others still have to know.
    """

    @classmethod
    def of(cls, module: nn.Module) -> _Copies:
        """Return the copies of a module, made at the first call."""
        for hook in module._forward_pre_hooks.values():
            found = getattr(hook, "__self__", None)
            if isinstance(found, cls) and found.module is module:
                found.current = False  # copies from a training that has ended
                return found
        return cls(module)

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kept: list[KeptBuffers] = []
        self.current = False
        self.found: Tensor | None = None
        self._before: list[tuple[Tensor, Tensor]] = []
        for part in module.modules():
            if part is module or part._buffers:
                part.register_forward_pre_hook(self._before_forward)

    @torch.no_grad()
    def poisoned(self, device: torch.device) -> Tensor | None:
        """Return () bool, whether a buffer that was finite is not so any more; None without such buffers."""
        alike: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for pair in self._before:
            buffer, before = map(local_part, pair)
            if buffer.is_floating_point() and buffer.numel():
                alike.setdefault((buffer.device, buffer.dtype), []).append((buffer, before))
        for pairs in alike.values():
            now, then = (which_are_finite(tensors) for tensors in zip(*pairs, strict=True))
            bad = to_device((then & ~now).any(), device)
            self.found = bad if self.found is None else self.found | bad
        return self.found

    @torch.no_grad()
    def restore(self, applied: Tensor) -> None:
        """Restore the buffers, unless ``applied``, a () bool on a device, is true.

        They are written through ``data``, which leaves their version as it is: a graph that another optimizer
        has yet to differentiate, as the generator's of a GAN, holds running statistics, but only the forward
        pass reads them.
        """
        for buffer, before in self._before:
            if applied.is_cpu:
                buffer.data.copy_(before)
            else:
                buffer.data.copy_(torch.where(to_device(applied, buffer.device), buffer, before))

    @torch.no_grad()
    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self.current or not module.training:
            return
        now = list(self.module.buffers())
        known = [buffer for buffer, _ in self._before]
        if len(known) != len(now) or any(a is not b for a, b in zip(known, now, strict=True)):
            self._before = [(buffer, torch.empty_like(buffer)) for buffer in now]
        for buffer, before in self._before:
            before.copy_(buffer)
        self.current, self.found = True, None
        for kept in self.kept:
            kept.before_forward()
