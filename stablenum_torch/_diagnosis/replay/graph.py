"""The graph that autograd has recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

__all__ = ["nodes_below"]


def nodes_below(roots: Iterable[Tensor]) -> Iterator[Any]:
    """Give each node of the graph that a backward pass from these tensors reaches, once."""
    todo, seen = [t.grad_fn for t in roots], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        todo += [following for following, _ in node.next_functions]
