"""The algorithm of PaDiff, which compares Paddle with PyTorch, applied to two programs of PyTorch.

Written after its documentation (``docs/Tutorial.md`` and ``docs/Interfaces.md`` of PaddlePaddle/PaDiff) and
none of its code, since it requires Paddle on one side. Modules are compared from the top down: a module whose
output differs is opened, and its submodules are compared in their order. Modules without parameters of their
own are passed over. Then come the loss, the gradients from the top down, the gradients of the parameters, and
the parameters after the step. Its check of single functions, which translates names of Paddle, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.peers.answers import Answer
from benchmarks.peers.runs import Call, Run

__all__ = ["DEFAULT", "README", "padiff"]

Settings = dict[str, Any]
DEFAULT: Settings = {"compare_mode": "mean", "rtol": 1e-7, "atol": 0.0}
README: Settings = {"compare_mode": "strict", "rtol": 0.0, "atol": 1e-4}  # the settings of its first example


def padiff(left: Run, right: Run, *, compare_mode: str, rtol: float, atol: float) -> Answer:
    """Name the first pair of modules that differ.

    Args:
        compare_mode: "mean" compares the means of two tensors, "strict" all elements.
    """

    def same(a: Any, b: Any) -> bool:
        if a is None or b is None:
            return a is b
        if compare_mode == "mean":
            return bool(np.allclose(np.mean(b), np.mean(a), rtol=rtol, atol=atol))
        return np.shape(a) == np.shape(b) and bool(np.allclose(b, a, rtol=rtol, atol=atol))

    tops = (_opened(left.calls), _opened(right.calls))
    found = _first(*tops, lambda a, b: _all_same(a.outputs, b.outputs, same), "forward")
    if found or not same(left.loss, right.loss):
        return found or Answer(True, "forward")
    found = _first(
        *(_turned(calls) for calls in tops),
        lambda a, b: _all_same(a.gradients, b.gradients, same),
        "backward",
    )
    if found:
        return found
    if [x.shape for x in left.gradients.values()] != [x.shape for x in right.gradients.values()]:
        return Answer(False)  # the parameters, which correspond in their order, cannot be compared
    for phase, of in (("backward", "gradients"), ("update", "updated")):
        for (a, x), (b, y) in zip(getattr(left, of).items(), getattr(right, of).items(), strict=True):
            if not same(x, y):
                return Answer(True, phase, a.rpartition(".")[0], b.rpartition(".")[0])
    return Answer(False)


def _opened(calls: Sequence[Call]) -> list[Call]:
    """The calls of the models, around those of all modules that have parameters of their own."""

    def with_parameters(call: Call) -> Iterator[Call]:
        inner = [c for child in call.children for c in with_parameters(child)]
        if call.own or not call.module:
            yield Call(call.module, call.kind, call.own, inner, call.outputs, call.gradients)
        else:
            yield from inner

    return [c for call in calls for c in with_parameters(call)]


def _turned(calls: Sequence[Call]) -> list[Call]:
    return [
        Call(c.module, c.kind, c.own, _turned(c.children), c.outputs, c.gradients) for c in reversed(calls)
    ]


def _first(
    left: Sequence[Call], right: Sequence[Call], same: Callable[[Call, Call], bool], phase: str
) -> Answer | None:
    for a, b in zip(left, right, strict=False):
        if same(a, b):
            continue
        here = Answer(True, phase, a.module, b.module)
        if len(a.children) != len(b.children):  # they cannot be matched
            return here
        return _first(a.children, b.children, same, phase) or here
    return None


def _all_same(left: Sequence[Any], right: Sequence[Any], same: Callable[[Any, Any], bool]) -> bool:
    return all(same(a, b) for a, b in zip(left, right, strict=False))
