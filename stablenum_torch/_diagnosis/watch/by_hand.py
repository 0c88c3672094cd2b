"""Gradients that a script computes without an optimizer: printed, asserted, or applied by hand.

No step shows whether they matter. They are doubted when they are not finite, and the doubt is settled if the
script is seen to cope with them.
"""

from __future__ import annotations

import cmath
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stablenum_torch._diagnosis.replay.collectives import local_of
from stablenum_torch._diagnosis.replay.graph import nodes_below
from stablenum_torch._diagnosis.replay.tensor_memory import is_freed

__all__ = ["REPAIRS", "Gradients", "Graph", "finite", "graph_of", "item", "tensors_of", "unwrapped"]

# Functions of Tensor with which a script replaces values that are not finite.
REPAIRS = ("nan_to_num", "nan_to_num_", "where", "masked_fill", "masked_fill_", "__setitem__")
_isfinite, item = torch.isfinite, torch.Tensor.item  # the originals, not the watched ones


@dataclass(slots=True)
class Graph:
    """What a backward pass reaches: the parameters and inputs, and the numbers of the nodes."""

    leaves: list[Tensor]
    numbers: set[int]


@dataclass(slots=True)
class Gradients:
    """Gradients that are not finite.

    Attributes:
        tensors: the gradients.
        leaves: what they are gradients of, each with a copy of its value at that time.
        differentiable: whether a later backward pass may go through them.
        repaired, tested: whether the script has replaced values in them, or asked whether they are finite.
        good_since: whether later gradients were finite.
    """

    tensors: list[Tensor]
    leaves: list[tuple[Tensor, Tensor]]
    differentiable: bool = False
    repaired: bool = False
    tested: bool = False
    good_since: bool = False

    def hold(self, thing: Any) -> bool:
        """Return whether ``thing`` is one of the gradients."""
        if isinstance(thing, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(thing):
            thing = local_of(thing)
        return any(thing is t for t in self.tensors)

    def coped_with(self, stepped: Callable[[Tensor], bool]) -> bool:
        """Return whether the script coped with them.

        ``stepped`` says whether an optimizer has taken a step with a parameter.
        """
        if self.repaired or (self.good_since and (self.tested or self.differentiable)):
            return True
        return bool(self.leaves) and all(
            stepped(leaf) or (finite(leaf) and not torch.equal(unwrapped(leaf), unwrapped(before)))
            for leaf, before in self.leaves
        )


def graph_of(roots: Iterable[Tensor]) -> Graph:
    """Return what a backward pass from these tensors reaches; the checkup asks for the same as the watch."""
    global _last
    roots = [t for t in roots if not torch._C._functorch.is_functorch_wrapped_tensor(t)]
    known, found = _last
    begins = [(t, t.grad_fn._sequence_nr()) for t in roots if t.grad_fn is not None]
    if len(known) == len(begins) and all(k[0]() is b[0] and k[1] == b[1] for k, b in zip(known, begins)):
        return found
    found = Graph([], set())
    for node in nodes_below(roots):
        found.numbers.add(node._sequence_nr())
        if type(node) is torch._C._functions.AccumulateGrad:
            found.leaves.append(node.variable)
    _last = [(weakref.ref(t), number) for t, number in begins], found
    return found


# The roots of the last graph, each with the number of its node, which another graph would not have.
_last: tuple[list[tuple[weakref.ref[Tensor], int]], Graph] = ([], Graph([], set()))


def tensors_of(given: Any) -> list[Tensor]:
    """Return the tensors in an argument that is one tensor or several, below the levels of torch.func."""
    given = [given] if isinstance(given, Tensor) else given if isinstance(given, Sequence) else ()
    return [unwrapped(t) for t in given if isinstance(t, Tensor)]


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor that holds the numbers, below ``vmap`` and ``grad`` of torch.func; of a DTensor, this
    rank's part."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return local_of(tensor)


def finite(tensor: Tensor) -> bool:
    """Return whether no number in a tensor is NaN or inf; True if the numbers cannot be read here."""
    tensor = unwrapped(tensor).detach()
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or is_freed(tensor):
        return True
    try:
        if tensor.layout is not torch.strided:
            tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
        return cmath.isfinite(item(tensor)) if tensor.numel() == 1 else bool(_isfinite(tensor).all())
    except (RuntimeError, NotImplementedError):  # traced, without storage: a check must not end the script
        return True
