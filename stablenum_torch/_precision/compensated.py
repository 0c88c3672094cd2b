"""Pure 16-bit training without master weights: compensated and stochastically rounded updates.

For a sharded parameter, each rank updates its local part, which is a plain tensor, because bit shifts of a
DTensor silently do nothing in torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import array_api_compat.torch as torch_namespace
import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum._support.settings_checks import check_int
from stablenum.precision.rounding import compensated_value, kahan_add, round_stochastically
from stablenum_torch._devices.ranks import is_sharded, local_part
from stablenum_torch._precision.float32_copies import Float32CopyOptimizer, is_narrow

__all__ = ["KahanUpdate", "StochasticRounding"]


class _Passing(Float32CopyOptimizer):
    """Keeps values in the float32 copies only during a step."""

    def _release(self, params: Sequence[Tensor]) -> None:
        for p in params:
            if is_narrow(p):
                self._copies[p].data = torch.empty(0, device=p.device)

    def wide_value(self, p: Tensor) -> Tensor:
        """Return the parameter in float32: the value from which the next step starts."""
        return p.detach().float()


class KahanUpdate(_Passing):
    """Compensated updates: the part of an update that rounding to 16 bits loses is added to the next one.

    The update is ``y = c + u; w' = round(w + y); c' = round(y - (w' - w))``, see
    :func:`stablenum.precision.kahan_add`. During a step the inner optimizer runs in float32 on
    ``w + c``. ``c`` takes 2 bytes per parameter, as int16, in units of 2^-16 of the parameter's spacing. It
    is saved as ``"compensation"`` (int32 if sharded, because collectives do not support int16). The parameter
    and its compensation together are as exact as a float32 master weight; :meth:`wide_value` adds the two, as
    :func:`stablenum.precision.compensated_value` does.

    NaN and inf pass through, finite values saturate. Under ``wrap`` a skipped step leaves parameters and
    compensation unchanged; on an accelerator the host waits once per step for the decision.

    Args:
        params: parameters, (name, parameter) pairs or groups; bfloat16 or float16. Float32 parameters are
            updated as usual.
        make: makes the inner optimizer from groups, such as ``lambda p: torch.optim.AdamW(p, lr=1e-3)``.

    Raises:
        TypeError: ``make`` is not a function, or does not return an optimizer.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> opt = KahanUpdate([w], lambda p: torch.optim.SGD(p, lr=1.0))
        >>> for _ in range(1000):
        ...     w.grad = torch.full_like(w, 1e-4)
        ...     opt.step()
        >>> w.item(), round(opt.wide_value(w).item(), 3), opt.state[w]["compensation"].dtype
        (0.8984375, 0.9, torch.int16)
    """

    _kept_name = "compensation"

    def _new_kept(self, p: Tensor) -> Tensor:
        return torch.zeros_like(p.detach(), dtype=torch.int16)

    def _fill(self, p: Tensor, wide: Tensor) -> None:
        wide.data = self.wide_value(p)

    def _write_back(self, p: Tensor, wide: Tensor) -> None:
        w, c, whole = (local_part(part) for part in (p.detach(), self._compensation(p), wide))
        start = compensated_value(w, c, xp=torch_namespace)
        update = torch.where(torch.isfinite(start), whole - start, whole)  # inf - inf is NaN
        moved, rest = kahan_add(w, c, update, xp=torch_namespace)
        w.copy_(moved)
        c.copy_(rest)

    @torch.no_grad()
    def wide_value(self, p: Tensor) -> Tensor:
        """Return the parameter plus its compensation in float32, from which the next step starts."""
        found = super().wide_value(p)
        if is_narrow(p):
            parts = (local_part(part) for part in (p.detach(), self._compensation(p)))
            local_part(found).copy_(compensated_value(*parts, xp=torch_namespace))
        return found

    def _saved_kept(self, p: Tensor) -> Tensor | None:
        # Checkpoints gather sharded tensors, and neither NCCL nor gloo supports int16.
        c = self._compensation(p)
        return c.to(torch.int32) if is_sharded(p) else c

    def _compensation(self, p: Tensor) -> Tensor:
        c = self._kept[p]
        assert c is not None  # for the type checker: a narrow parameter always has a compensation
        return c


class StochasticRounding(_Passing):
    """Updates of bfloat16 parameters rounded up or down at random, so that on average nothing is lost.

    The update is ``w' = round_stochastically(w + u)``, see :func:`stablenum.precision.round_stochastically`.
    The inner optimizer runs in float32 during a step; nothing is stored per parameter. The generator's state
    is saved under ``"rounding"`` (torch.distributed.checkpoint leaves it out, so it does not restore the
    random stream).

    NaN and inf pass through, finite values saturate. Under ``wrap`` a skipped step leaves parameters and
    generator unchanged; on an accelerator the host waits once per step for the decision.

    Args:
        params: parameters, (name, parameter) pairs or groups; bfloat16. Float32 parameters are updated as
            usual.
        make: makes the inner optimizer from groups, such as ``lambda p: torch.optim.AdamW(p, lr=1e-3)``.
        seed: the seed of the random bits; each device has its own stream. Ranks with the same parameters
            need the same seed.

    Raises:
        TypeError: ``make`` is not a function, or does not return an optimizer.
        ValueError: a parameter is float16, or ``seed`` is not a whole number of 0 or more.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
        >>> opt = StochasticRounding([w], lambda p: torch.optim.SGD(p, lr=1.0), seed=1)
        >>> for _ in range(100):
        ...     w.grad = torch.full_like(w, 1e-4)
        ...     opt.step()
        >>> round(w.float().mean().item(), 3)
        0.99
    """

    _allowed = (torch.bfloat16,)

    def __init__(
        self,
        params: Iterable[Any] | Mapping[str, Tensor],
        make: Callable[[list[dict[str, Any]]], Optimizer],
        *,
        seed: int = 0,
    ) -> None:
        self._seed = check_int("seed", seed, at_least=0)
        self._generators: dict[str, torch.Generator] = {}
        super().__init__(params, make)

    def _fill(self, p: Tensor, wide: Tensor) -> None:
        wide.data = self.wide_value(p)

    def _write_back(self, p: Tensor, wide: Tensor) -> None:
        w, whole = local_part(p.detach()), local_part(wide)
        bits = torch.randint(
            2**16, w.shape, dtype=torch.int32, device=w.device, generator=self._generator(w.device)
        )
        w.copy_(round_stochastically(whole, bits, xp=torch_namespace))

    def _generator(self, device: torch.device) -> torch.Generator:
        name = str(device)
        if name not in self._generators:
            self._generators[name] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[name]

    def _saved_more(self) -> dict[str, Any]:
        streams = {name: g.get_state() for name, g in self._generators.items()}
        return {"rounding": {"seed": self._seed, "streams": streams}}

    def _load_more(self, state: Mapping[str, Any]) -> None:
        saved = state.get("rounding")
        if saved is None:
            return
        self._seed, self._generators = saved["seed"], {}
        for name, stream in saved["streams"].items():
            device = torch.device(name)
            if device.type == "cpu" or torch.cuda.is_available():
                self._generator(device).set_state(stream.cpu())

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | self._saved_more()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({name: value for name, value in state.items() if name != "rounding"})
        self._load_more(state)
