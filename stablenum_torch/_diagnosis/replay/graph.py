"""The graph that autograd has recorded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

__all__ = ["nodes_below"]


def nodes_below(roots: Iterable[Tensor]) -> list[Any]:
    """Return each node of the graph that a backward pass from these tensors reaches, once."""
    seen = dict.fromkeys(t.grad_fn for t in roots if t.grad_fn is not None)
    found = list(seen)
    for node in found:  # which grows meanwhile
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen[following] = None
                found.append(following)
    return found
