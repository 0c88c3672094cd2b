"""Master weights: 16-bit parameters, updated in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum_torch._devices.fused_optimizers import can_skip_on_device, is_fused, step_folded
from stablenum_torch._devices.waits import wait_for_bool
from stablenum_torch._precision.casts import narrowed
from stablenum_torch._precision.float32_copies import Float32CopyOptimizer

__all__ = ["MasterWeights"]


class MasterWeights(Float32CopyOptimizer):
    """Keeps a float32 master of each bfloat16 or float16 parameter, and steps on the masters.

    After a step each parameter is its master rounded to nearest, saturating (Micikevicius et al. 2018, arXiv
    1710.03740). The masters take 4 bytes per parameter in addition to the narrow parameters; the widened
    gradients exist only during a step.

    This is an optimizer of the model's own parameters, so schedulers, :func:`stablenum_torch.wrap` and
    checkpoints work as with any other optimizer. The masters are saved next to the moments, as ``"master"``.
    The state dict of a plain optimizer can be loaded too: the masters then start from the parameters. If a
    parameter is changed from outside (by loading a model), its master takes the new value.

    A factor on the gradients, such as the inverse of a loss scale, is applied in float32. NaN and inf in a
    step pass through to the parameters, unless ``wrap`` skips the step: a skipped step leaves masters and
    parameters unchanged, bit for bit.

    Args:
        params: parameters, (name, parameter) pairs or groups. Float32 parameters are updated as usual.
        make: makes the inner optimizer from groups, such as
            ``lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)``.

    Raises:
        TypeError: ``make`` is not a function, or does not return an optimizer.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> opt = MasterWeights([w], lambda p: torch.optim.SGD(p, lr=1.0))
        >>> for _ in range(1000):
        ...     w.grad = torch.full_like(w, 1e-4)
        ...     opt.step()
        >>> round(opt.state[w]["master"].item(), 3), w.item()
        (0.9, 0.8984375)
    """

    _kept_name = "master"

    def __init__(
        self, params: Iterable[Any] | Mapping[str, Tensor], make: Callable[[list[dict[str, Any]]], Optimizer]
    ) -> None:
        super().__init__(params, make)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # The divisor and the skip flag are passed on to a kernel that takes them.
        return "inner" in self.__dict__ and is_fused(self.inner)

    def masters(self) -> list[Tensor]:
        """Return the float32 tensors that are optimized, in the order of the parameters, for EMAs and
        exports."""
        return [self._copies[p] for group in self.param_groups for p in group["params"]]

    def _new_kept(self, p: Tensor) -> Tensor:
        return self._copies[p]

    def _fill(self, p: Tensor, wide: Tensor) -> None:
        # A parameter that differs from its rounded master was changed from outside; its new value is used.
        wide.copy_(torch.where(p == narrowed(wide, p.dtype), wide, p.float()))

    def _write_back(self, p: Tensor, wide: Tensor) -> None:
        p.copy_(narrowed(wide, p.dtype))

    def _load_kept(self, p: Tensor, found: Tensor | None) -> None:
        wide = self._copies[p]
        wide.copy_(p if found is None else found)
        p.copy_(narrowed(wide, p.dtype))

    def _step_inner(self, then: Callable[[], None]) -> None:
        divisor, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and not can_skip_on_device(self.inner):
            if wait_for_bool(found_inf):
                then()
                return
            found_inf = None
        step_folded(self.inner, divisor=divisor, found_inf=found_inf, then=then)
