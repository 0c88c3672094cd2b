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
from stablenum_torch._precision.float32_twins import TwinOptimizer

__all__ = ["MasterWeights"]


class MasterWeights(TwinOptimizer):
    """Keeps a float32 master of each bfloat16 or float16 parameter, and steps on the masters.

    After a step each parameter is its master rounded to nearest, saturating (Micikevicius et al. 2018, arXiv
    1710.03740). It takes 4 bytes per parameter more than the narrow parameters alone; widened gradients exist
    only during a step.

    It is an optimizer of the model's own parameters: schedulers, :func:`stablenum_torch.wrap` and checkpoints
    work as with any other. The masters are saved next to the moments, as ``"master"``. The state dict of a
    plain optimizer can be loaded too: the masters then start from the parameters. If a parameter is changed
    from outside (a loaded model), its master follows.

    A factor on the gradients, such as the inverse of a loss scale, is applied in float32. NaN and inf in a
    step pass through to the parameters, unless ``wrap`` skips it: a skipped step leaves masters and
    parameters unchanged, bit for bit.

    Args:
        params: parameters, (name, parameter) pairs or groups. Float32 parameters are updated as usual.
        make: makes the optimizer from groups, ``lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)``.

    Raises:
        TypeError: ``make`` is not a function, or makes no optimizer.

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
        """Return the float32 tensors that are optimized, in the order of the parameters: for EMAs and
        exports."""
        return [self._twins[p] for group in self.param_groups for p in group["params"]]

    def _new_kept(self, p: Tensor) -> Tensor:
        return self._twins[p]

    def _fill(self, p: Tensor, twin: Tensor) -> None:
        # A parameter that differs from its rounded master was changed from outside: the change counts.
        twin.copy_(torch.where(p == narrowed(twin, p.dtype), twin, p.float()))

    def _write_back(self, p: Tensor, twin: Tensor) -> None:
        p.copy_(narrowed(twin, p.dtype))

    def _load_kept(self, p: Tensor, found: Tensor | None) -> None:
        twin = self._twins[p]
        twin.copy_(p if found is None else found)
        p.copy_(narrowed(twin, p.dtype))

    def _step_inner(self) -> None:
        divisor, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if divisor is None and found_inf is None:
            self.inner.step()
            return
        if found_inf is not None and not can_skip_on_device(self.inner):
            if wait_for_bool(found_inf):
                return
            found_inf = None
        step_folded(self.inner, divisor=divisor, found_inf=found_inf)
