"""Find the forward operation that a backward node differentiates.

Autograd numbers its nodes. A node gets its number just before the operation runs, so the recorder that sees
the operation knows the number of its node. Each thread counts separately. Passes on different threads (CUDA)
may therefore have nodes with the same number, which are told apart by their names.
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
        self._perhaps: dict[int, dict[str, int]] = {}

    def record(self, step: int, aten: str, *, sure: bool = True) -> None:
        """Record that the running operation makes the newest node.

        An operation that makes none finds that node's number already taken, and is ignored.

        Args:
            step: index of the step that records the operation.
            aten: the operation's name.
            sure: whether the arguments require gradients at this level of torch.func; if not, they may at an
                outer one, or belong to a DTensor that does.
        """
        thread, number = threading.get_ident(), torch.autograd._get_sequence_nr() - 1
        if not sure:
            self._perhaps.setdefault(number, {}).setdefault(_letters(aten), step)
            return
        steps = self._steps.setdefault(thread, {})
        if number not in steps:
            steps[number] = (step, _letters(aten))
            bisect.insort(self._numbers.setdefault(thread, []), number)

    def step_of(self, node: Any) -> int | None:
        """Return the step that made a node; None if the node is older than the replay or accumulates."""
        number = node._sequence_nr()
        if number >= _NO_NUMBER:
            return None
        name = _letters(node.name())
        outer = {aten: step for aten, step in self._perhaps.get(number, {}).items() if aten in name}
        # By certainty: whether the name fits, and whether the step made a node of this very number. What ran
        # without gradients after it, such as a teacher's forward pass, has the same newest node.
        best = (True, False, outer[max(outer, key=len)]) if outer else None
        for thread, steps in self._steps.items():
            exact = steps.get(number)
            if exact is not None:
                found = (exact[1] in name, True, exact[0])
            elif number < self._first:
                continue
            else:
                # The node that a write through a view adds to the graph (CopySlices) is numbered after the
                # write; the nodes of torch.func's outer levels are numbered before that of the innermost one.
                numbers = self._numbers[thread]
                at = bisect.bisect_left(numbers, number)
                after = steps[numbers[at]] if at < len(numbers) else None
                if after is not None and after[1] in name:
                    found = (True, False, after[0])
                elif at > 0:
                    found = (False, False, steps[numbers[at - 1]][0])
                else:
                    continue
            best = found if best is None or found > best else best
        return None if best is None else best[2]


def _letters(name: str) -> str:
    """Return the letters of a name, so that ``_softmax`` is found in ``SoftmaxBackward0``."""
    return "".join(c for c in name.lower() if c.isalpha())
