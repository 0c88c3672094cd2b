"""Keep the arguments of the user's operations, so that a failure in a derivative is shown with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from stablenum.diagnosis.replay.operations import BOUNDARIES, REMEDIES
from stablenum.diagnosis.replay.trace import Step, Trace
from stablenum.diagnosis.replay.trials import Read
from stablenum.diagnosis.replay.values import TensorStats
from stablenum_torch._diagnosis.replay.flags import stats_of

__all__ = ["KeptArguments"]

_KEPT = frozenset(BOUNDARIES) | frozenset(REMEDIES) | {"exp", "expm1", "cosh", "sinh", "sigmoid"}
# Operations whose derivative is infinite at 0, and at 1 and -1.
_ZERO = ("log", "log10", "log2", "reciprocal", "rsqrt", "sqrt")
_ONE = ("acos", "arctanh", "asin")
# Autograd keeps most of these tensors, too; larger ones are not kept a second time.
_MOST_ELEMENTS = 2**24


class KeptArguments:
    """The arguments of steps, by step. One that is overwritten afterwards is no longer known."""

    def __init__(self) -> None:
        self._of: dict[int, list[tuple[int, Tensor, int]]] = {}

    def keep(
        self, step: Step, values: Sequence[int], tensors: Iterable[Tensor], clones: Mapping[int, Tensor]
    ) -> None:
        """Keep the tensors that a forward step read, as they were before it ran."""
        if step.operation not in _KEPT:
            return
        # Not detached: within a dispatch mode, a detached tensor does not see later writes.
        found = [(value, clones.get(id(t), t)) for value, t in zip(values, tensors)]
        if sum(t.numel() for _, t in found) <= _MOST_ELEMENTS:
            self._of[step.index] = [(value, t, _version(t)) for value, t in found]

    def of(self, step: int) -> list[Tensor] | None:
        """Return the tensors that a step read; None if they were not kept, or have changed since."""
        found = self._of.get(step)
        if found is None or any(_version(t) != version for _, t, version in found):
            return None
        return [t for _, t, _ in found]

    def of_operation(self, trace: Trace, step: Step) -> Read | None:
        """Return what the user's operation read, of which ``step`` is the operation or its derivative."""
        users = step if step.forward is None else trace.steps[step.forward]
        tensors = self.of(users.index)
        return None if tensors is None else Read(users.primitive, tensors)

    def at_edge(self, step: Step) -> bool:
        """Return whether the operation of which a step is the derivative has an infinite one for its
        arguments."""
        tensors = None if step.forward is None else self.of(step.forward)
        if not tensors or not tensors[0].is_floating_point():
            return False
        if step.operation in _ZERO:
            return bool((tensors[0] == 0).any())
        if step.operation == "div":
            return len(tensors) > 1 and bool((tensors[-1] == 0).any())
        return step.operation in _ONE and bool((tensors[0].abs() == 1).any())

    def stats(self, trace: Trace, step: int, at: Tensor | None) -> tuple[TensorStats, ...]:
        """Return the statistics of what a step read.

        Args:
            trace: has the names.
            step: a forward step.
            at: positions of the failure, at which values are kept if the shapes are the same.
        """
        tensors = self.of(step)
        if tensors is None:
            return ()
        names = [trace.values[value].name for value, _, _ in self._of[step]]
        return tuple(
            stats_of(
                t, name=name, at=at if at is not None and at.shape[-1] == t.dim() and _within(at, t) else None
            )
            for t, name in zip(tensors, names, strict=True)
        )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _within(at: Tensor, tensor: Tensor) -> bool:
    """Return whether the positions exist in a tensor."""
    if not at.numel():
        return tensor.dim() == 0
    return bool((at < torch.tensor(tensor.shape, device=at.device)).all())
