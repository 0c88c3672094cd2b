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
from stablenum_torch._devices.waits import capturing

__all__ = ["DeviceGuard", "Kernel", "Seen"]


class Seen(NamedTuple):
    """What a decision is made of, as tensors on the device.

    Attributes:
        norms: (n,) float64; None if the kernel reads the gradients, which :meth:`DeviceGuard.reads` has seen.
        loss, found_inf, amax, tiny: () as in :class:`stablenum.Observation`, in any format; None if unknown.
        rows: (ranks, 4) float64, what the ranks measured that decide together; None for a process alone.
    """

    norms: Tensor | None = None
    loss: Tensor | None = None
    found_inf: Tensor | None = None
    amax: Tensor | None = None
    tiny: Tensor | None = None
    rows: Tensor | None = None


class Kernel:
    """A kernel of a guard.

    Attributes:
        kinds: what it is printed for.
        trusted: whether it has decided as torch's operations do; None before it was tried.
    """

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self.trusted: bool | None = None
        self._launch: Callable[..., None] | None = None

    def made(self) -> Callable[..., None]:
        """Return what launches it.

        Raises:
            UnprintableError: there is no such kernel.
        """
        if self._launch is None:
            self._launch = decide_kernel(self.kinds)
        return self._launch


# Those whose work has been captured in a graph, which goes on with their memory when it is replayed.
_captured: list[DeviceGuard] = []


class DeviceGuard:
    """Decides by kernels, which write the next state into the memory of the present one.

    The state of before is kept until the next decision: :meth:`undo` takes a decision back.

    Args:
        config: the guard's settings.
        state: the tensors, all on one device.
        n: the number of parameters.
        table: where the gradients are; None for a new one.

    Attributes:
        config, state, n: as above.
        divisor, skip, applied: () float32, what fused kernels take: 1 / multiplier (0 if each parameter has a
            multiplier of its own), 1 for a skipped step, and 1 for one that is not skipped.
        factor: the multiplier, () float32, or (n,) if each parameter has its own.
        decided: whether a decision has been made that may still be taken back.
    """

    def __init__(
        self, config: GuardConfig, state: GuardState, n: int, table: GradientTable | None = None
    ) -> None:
        self.config, self.state, self.n = config, state, n
        self._device = device = state.step.device
        self._leaves: list[Tensor] = leaves(state)
        self._before = [torch.empty_like(leaf) for leaf in self._leaves]
        self._memory = [leaf.data_ptr() for leaf in self._leaves]
        before = [leaf.data_ptr() for leaf in self._before]
        both = torch.tensor([self._memory, before], dtype=torch.int64, device="cpu").to(device)
        self._addresses, self._addresses_before = both[0], both[1]
        self._tag = torch.zeros((), dtype=torch.int32, device=device)
        self._sequence = 0
        # In place of what is not given, in the same format: a kernel is compiled for formats.
        self._no_norms = torch.zeros(1, dtype=torch.float64, device=device)
        self._out = out = torch.zeros(4, dtype=torch.float32, device=device)
        self.divisor, self.skip, self.applied = out[DIVISOR], out[SKIP], out[APPLIED]
        self.factor, self._factors = out[FACTOR], out
        if config.per_tensor:
            self._factors = self.factor = torch.ones(n, dtype=torch.float32, device=device)
        self._table = GradientTable(device) if table is None else table
        self._kernels: dict[Any, Kernel] = {}
        self.decided = False

    def is_for(self, config: GuardConfig, state: GuardState, n: int) -> bool:
        """Return whether this object was made for these settings, this state in its present memory, and the
        number of parameters."""
        same = config is self.config and state is self.state and n == self.n
        return same and self._memory == [leaf.data_ptr() for leaf in self._leaves]

    def on_another_state(self, state: GuardState) -> DeviceGuard:
        """Return one like this for another state and the same gradients."""
        return DeviceGuard(self.config, state, self.n, self._table)

    def reads(self, grads: Sequence[Tensor | None]) -> bool:
        """Return whether the kernel can measure these gradients itself."""
        return self._table.follow(grads)

    def kernel(self, *, still: bool, measured: tuple[str, ...], ranks: int) -> Kernel:
        """Return the kernel for decisions of this kind, see :class:`Kinds`.

        It is looked up by what may change from step to step: to compare all settings takes longer than a
        launch.
        """
        key = still, measured, ranks
        found = self._kernels.get(key)
        if found is None:
            kinds = Kinds(self.config, self.n, still, frozenset(measured), ranks)
            found = self._kernels[key] = Kernel(kinds)
        return found

    def decide(self, kernel: Kernel, seen: Seen) -> None:
        """Decide, and write the next state. The host waits for nothing.

        Args:
            kernel: of this guard or of one like it.
            seen: what was measured.

        Raises:
            UnprintableError: there is no kernel for it. Nothing is changed.
        """
        launch, out, table = kernel.made(), self._out, self._table
        if capturing():
            _captured.append(self)
        # Taken back only if the kernel has written this number; see `undo`.
        self._sequence = self._sequence % (2**31 - 1) + 1
        self.decided = True
        with on(self._device):
            norms: tuple[Any, ...] = (seen.norms, self._no_norms, self._tag, self._tag, 0)
            if seen.norms is None:
                if table.pieces:
                    squares_kernel()(table.pieces, table.addresses, table.table, table.squares)
                norms = (self._no_norms, table.squares, table.first, table.count, table.most)
            measured = [out if part is None else part for part in seen[1:]]
            launch(
                *norms, self._addresses, self._addresses_before, self._tag, self._sequence,
                *measured, out, self._factors,
            )  # fmt: skip

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
