"""Decide on the host, on a guard's state in CPU memory, with the core's ``decide`` but not its overhead."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stablenum.arrays import leaves, map_leaves
from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import Decision, GuardState, Observation, decide
from stablenum.guard.ranks import Ranks
from stablenum_torch._devices.generated_decide import written_function
from stablenum_torch._devices.recorded_operations import Recording
from stablenum_torch._devices.scalar_namespace import scalars

__all__ = ["HostGuard"]

# The measurements that are single numbers or arrays, in the order of a generated function's arguments.
_MEASURED = ("norms", "loss", "found_inf", "amax", "tiny")


class HostGuard:
    """Decides in NumPy, on views of a state in CPU tensors, to avoid the dispatch of tensor operations.

    Args:
        config: the guard's settings.
        state: the tensors; new values are written into their memory.

    Attributes:
        state: the tensors.
        unit_rule, update_rule, needs, one_factor: properties of the settings, looked up once.
    """

    def __init__(self, config: GuardConfig, state: GuardState) -> None:
        self.config, self.state = config, state
        self.unit_rule, self.update_rule, self.needs = config.unit_rule, config.update_rule, config.needs
        self.one_factor = config.one_factor
        self._views = map_leaves(Tensor.numpy, state)
        self._flat: list[np.ndarray] = leaves(self._views)
        self._tensors: list[Tensor] = leaves(state)
        self._memory = [tensor.data_ptr() for tensor in self._tensors]
        # The tensor is kept, because creating one takes nearly as long as deciding.
        self._divisor = torch.ones((), dtype=torch.float32, device="cpu")
        self._divisor_view = self._divisor.numpy()
        self._written: dict[tuple[Any, ...], Callable[..., tuple[Any, ...]]] = {}

    def is_for(self, config: GuardConfig, state: GuardState) -> bool:
        """Return whether this object was made for ``config`` and ``state`` in its present memory.

        The memory of a tensor can change: sharing it with another process copies it and frees the old memory.
        """
        same = config is self.config and state is self.state
        return same and self._memory == [tensor.data_ptr() for tensor in self._tensors]

    def read(self) -> list[Any]:
        """Return the state's leaves: scalars, and arrays that share memory with the tensors."""
        return [view[()] for view in self._flat]

    def write(self, values: list[Any]) -> None:
        """Write a state's leaves into the tensors."""
        for view, value in zip(self._flat, values, strict=True):
            view[...] = value

    def divisor(self, multiplier: np.float32) -> Tensor:
        """Return ``1 / multiplier``, () float32, as fused kernels take it; the next call overwrites it."""
        self._divisor_view[()] = 1 / multiplier
        return self._divisor

    def decide(self, seen: Observation) -> tuple[Decision, list[Any]]:
        """Return the decision, and the leaves of the next state, which is not written yet."""
        usual = seen.units is None and seen.exponents is None and seen.total is None and seen.fault is None
        if not usual:
            decision, after = decide(self.config, map_leaves(lambda v: v[()], self._views), seen, xp=scalars)
            return decision, leaves(after)
        measured = [getattr(seen, name) for name in _MEASURED]
        if seen.ranks is not None:
            measured += seen.ranks[:_RANK_FIELDS]
        kinds = (measured[0].shape[0], *(part is None for part in measured))  # and the number of ranks
        function = self._written.get(kinds)
        if function is None:
            function = self._written[kinds] = self._write_out(seen)
        found = function(*(part for part in measured if part is not None), *self.read())
        return Decision(*found[:_FIELDS]), list(found[_FIELDS:])

    def saturates(self, seen: Observation, decision: Decision) -> bool:
        """Return whether a decision without exponents may depend on a number outside float32's range."""
        norm = float(decision.grad_norm)
        if seen.exponents is not None or not math.isfinite(norm):
            return False
        scale, factor = float(self._views.loss_scale.scale), float(decision.clip_coefficient)
        if seen.ranks is not None and not self.one_factor:
            factor = 1.0  # ranks may have different ones, and have to go the same way
        # Many norms below 2**100 may join to one above it, but not to one above 2**128.
        return max(norm, norm * scale) >= _TOP or min(factor, factor / scale) <= 1 / _TOP

    def _write_out(self, seen: Observation) -> Callable[..., tuple[Any, ...]]:
        """Generate ``decide`` for observations like ``seen``: a function of their parts and of the state's
        leaves."""
        recording = Recording()
        parts = {name: getattr(seen, name) for name in _MEASURED}
        inputs: dict[str, Any] = {
            name: recording.input(part) for name, part in parts.items() if part is not None
        }
        if seen.ranks is not None:
            inputs["ranks"] = Ranks(*map(recording.input, seen.ranks[:_RANK_FIELDS]))
        state = map_leaves(lambda view: recording.input(view[()].copy()), self._views)
        decision, after = decide(self.config, state, Observation(**inputs), xp=recording)
        return written_function(recording, [*decision[:_FIELDS], *leaves(after)])


_TOP = 2.0**100

# The fields of a decision before those about units, which are arrays of different lengths.
_FIELDS = Decision._fields.index("unit_multipliers")
_RANK_FIELDS = Ranks._fields.index("exponents")
