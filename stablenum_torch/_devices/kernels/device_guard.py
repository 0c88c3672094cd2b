"""Decide on a device in two launches: one reads the gradients, one decides and writes the next state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stablenum.arrays import leaves
from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import GuardState
from stablenum_torch._devices.kernels.gradient_table import GradientTable
from stablenum_torch._devices.kernels.launches import decide_kernel, on, squares_kernel
from stablenum_torch._devices.kernels.printed_decide import APPLIED, DIVISOR, FACTOR, SKIP, Kinds

__all__ = ["DeviceGuard", "Seen"]


class Seen(NamedTuple):
    """What a decision is made of, as tensors on the device.

    Attributes:
        grads: the gradients, whose norms the kernel measures; None if ``norms`` are given.
        norms: (n,) float64; None if ``grads`` are given.
        loss, found_inf, amax, tiny: () as in :class:`stablenum.Observation`, in any format; None if unknown.
        rows: (ranks, 4) float64, what the ranks measured that decide together; None for a process alone.
    """

    grads: Sequence[Tensor | None] | None
    norms: Tensor | None = None
    loss: Tensor | None = None
    found_inf: Tensor | None = None
    amax: Tensor | None = None
    tiny: Tensor | None = None
    rows: Tensor | None = None


_MEASURED = ("loss", "found_inf", "amax", "tiny")
_FIRST_MEASURED = Seen._fields.index("loss")


class DeviceGuard:
    """Decides by kernels, which write the next state into the memory of the present one.

    The state of before is kept until the next decision: :meth:`undo` takes a decision back.

    Args:
        config: the guard's settings.
        state: the tensors, all on one device.
        n: the number of parameters.
        table: where the gradients are; None for a new one.

    Attributes:
        config, state: as above.
        divisor, skip, applied: () float32, what fused kernels take: 1 / multiplier, and 1 for a skipped step;
            and 1 for one that is not skipped.
        factor: the multiplier, () float32, or (n,) if each parameter has its own.
        decided: whether a decision has been made that may still be taken back.
        trusted: by ``key``, whether the kernel of such decisions is to be used.
    """

    def __init__(
        self, config: GuardConfig, state: GuardState, n: int, table: GradientTable | None = None
    ) -> None:
        self.config, self.state, self._n = config, state, n
        self._device = state.step.device
        self._leaves: list[Tensor] = leaves(state)
        self._before = [torch.empty_like(leaf) for leaf in self._leaves]
        self._memory = [leaf.data_ptr() for leaf in self._leaves]
        self._addresses = torch.tensor(self._memory, dtype=torch.int64).to(self._device)
        self._addresses_before = torch.tensor([leaf.data_ptr() for leaf in self._before]).to(self._device)
        self._tag = torch.zeros((), dtype=torch.int32, device=self._device)
        self._sequence = 0
        out = torch.zeros(4, dtype=torch.float32, device=self._device)
        self._out = out
        self.divisor, self.skip, self.applied = out[DIVISOR], out[SKIP], out[APPLIED]
        self.factor = out[FACTOR]
        self._factors = out
        if config.per_tensor:
            self._factors = self.factor = torch.ones(n, dtype=torch.float32, device=self._device)
        self._table = GradientTable(self._device) if table is None else table
        self._kernels: dict[Any, Callable[..., None]] = {}
        self.trusted: dict[Any, bool] = {}
        self.decided = False

    def is_for(self, config: GuardConfig, state: GuardState, n: int) -> bool:
        """Return whether this object was made for these settings, this state in its present memory, and the
        number of parameters."""
        same = config is self.config and state is self.state and n == self._n
        return same and self._memory == [leaf.data_ptr() for leaf in self._leaves]

    def on_another_state(self, state: GuardState) -> DeviceGuard:
        """Return one like this for another state and the same gradients."""
        return DeviceGuard(self.config, state, self._n, self._table)

    def reads(self, grads: Sequence[Tensor | None]) -> bool:
        """Return whether the kernel can measure these gradients itself."""
        return self._table.follow(grads)

    def key(self, seen: Seen, *, still: bool) -> tuple[Any, ...]:
        """Return what tells kinds of decisions of this guard apart.

        ``still``: whether the step moves nothing, see ``moves_nothing``.
        """
        return (still, 0 if seen.rows is None else len(seen.rows), *[part is None for part in seen])

    def kinds(self, seen: Seen, *, still: bool) -> Kinds:
        """Return what kernel is needed. To look at all settings takes longer than to launch it."""
        measured = frozenset(name for name in _MEASURED if getattr(seen, name) is not None)
        ranks = 0 if seen.rows is None else len(seen.rows)
        return Kinds(self.config, self._n, still, seen.grads is not None, measured, ranks)

    def decide(self, seen: Seen, *, still: bool) -> None:
        """Decide, and write the next state. The host waits for nothing.

        Args:
            seen: what was measured. Of gradients, :meth:`reads` must have returned True for them.
            still: as in :meth:`kinds`.

        Raises:
            UnprintableError: there is no kernel for it. Nothing is changed.
        """
        kernel, out, table = self._kernel(seen, still), self._out, self._table
        # Taken back only if the kernel has written this number; see `undo`.
        self._sequence = self._sequence % (2**31 - 1) + 1
        self.decided = True
        with on(self._device):
            norms: tuple[Any, ...] = (seen.norms, out, out, 0)
            if seen.grads is not None:
                if table.pieces:
                    squares_kernel()(table.pieces, table.table, table.squares)
                norms = (table.squares, table.first, table.count, table.most)
            measured = [out if part is None else part for part in seen[_FIRST_MEASURED:]]
            kernel(
                *norms, self._addresses, self._addresses_before, self._tag, self._sequence,
                *measured, out, self._factors,
            )  # fmt: skip

    def _kernel(self, seen: Seen, still: bool) -> Callable[..., None]:
        key = self.key(seen, still=still)
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = decide_kernel(self.kinds(seen, still=still))
        return found

    def keep(self) -> None:
        """Keep the state that was decided."""
        self.decided = False

    def undo(self) -> None:
        """Take the last decision back, unless it is to be kept.

        The exception that stopped a step may have come before the kernel was launched. Whether it was, the
        device knows: the kernel has written the number of the decision.
        """
        if not self.decided:
            return
        launched = self._tag == self._sequence
        old = [torch.where(launched, b, leaf) for b, leaf in zip(self._before, self._leaves, strict=True)]
        for leaf, value in zip(self._leaves, old, strict=True):
            leaf.copy_(value)
        self._tag.zero_()  # so that a second call changes nothing
        self.decided = False
