"""Which forward operation a backward node differentiates.

Autograd numbers its nodes. The number is drawn just before the operation runs, so the recorder that sees
the operation knows the number of its node. Each thread draws its own; passes that run on threads of their
own (CUDA) are told apart by the node's name.
"""

from __future__ import annotations

import bisect
import threading
from typing import Any

import torch

__all__ = ["NodeMap"]

_NO_NUMBER = 2**62


class NodeMap:
    """Node number -> index of the step that made the node."""

    def __init__(self) -> None:
        self._first = torch.autograd._get_sequence_nr()
        self._numbers: dict[int, list[int]] = {}
        self._steps: dict[int, dict[int, tuple[int, str]]] = {}

    def record(self, step: int, aten: str) -> None:
        """The running operation makes a node (if it does not, the number is known already)."""
        thread, number = threading.get_ident(), torch.autograd._get_sequence_nr() - 1
        steps = self._steps.setdefault(thread, {})
        if number not in steps:
            steps[number] = (step, _letters(aten))
            bisect.insort(self._numbers.setdefault(thread, []), number)

    def step_of(self, node: Any) -> int | None:
        """The step that made a node; None if that was before the replay, or for an accumulation."""
        number = node._sequence_nr()
        if number >= _NO_NUMBER:
            return None
        name = _letters(node.name())
        best: tuple[bool, int] | None = None
        for thread, steps in self._steps.items():
            exact = steps.get(number)
            if exact is not None:
                found = (exact[1] in name, exact[0])
            elif number < self._first:
                continue
            else:
                # What a write through a view adds to the graph (CopySlices) is numbered after the write.
                numbers = self._numbers[thread]
                at = bisect.bisect_left(numbers, number) - 1
                if at < 0:
                    continue
                found = (False, steps[numbers[at]][0])
            best = found if best is None or found > best else best
        return None if best is None else best[1]


def _letters(name: str) -> str:
    """``_softmax`` and ``SoftmaxBackward0`` alike."""
    return "".join(c for c in name.lower() if c.isalpha())
