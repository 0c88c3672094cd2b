"""How a program uses each of its parameters: in which order, and in what kind of operation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from stablenum.diagnosis.diff.sides import Side
from stablenum.diagnosis.replay.operations import SELECTING
from stablenum.diagnosis.replay.trace import Step

__all__ = ["Use", "uses_of"]

# Primitives that hand a parameter on.
_CARRIED = frozenset({
    "broadcast", "broadcast_in_dim", "cast", "cat", "clone", "copy", "expand", "index", "reshape", "slice",
    "squeeze", "stack", "to", "transpose",
})  # fmt: skip
_KINDS = {
    "matmul": "matmul", "conv": "conv", "convolution": "conv", "gather": "gather", "embedding": "gather",
    "index": "gather", "mul": "mul", "add": "add", "sub": "add", "div": "mul",
}  # fmt: skip
_SYNONYMS = {
    "kernel": "weight", "scale": "weight", "embedding": "weight", "gamma": "weight", "w": "weight",
    "b": "bias", "beta": "bias", "query": "q", "key": "k", "value": "v", "out": "o", "output": "o",
    "wq": "q", "wk": "k", "wv": "v", "wo": "o",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Use:
    """A parameter and its first use.

    Attributes:
        name, shape: of the parameter.
        array: its values.
        kind: "matmul", "conv", "gather", "mul", "add" or "other".
        at: the index of the step that first computes with it, and its place among others that go in there.
        words: the parts of the name, without those that all names have.
    """

    name: str
    shape: tuple[int, ...]
    array: Any
    kind: str
    at: tuple[int, ...]
    words: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(self.array.size)


def uses_of(side: Side) -> list[Use]:
    """Return the parameters that a program uses, in the order of their first uses in the forward pass."""
    trace = side.trace
    arrays = side.program.parameters()
    reads: dict[int, list[Step]] = {}
    for step in trace.steps:
        if step.phase == "forward":
            for value in step.inputs:
                reads.setdefault(value, []).append(step)
    found: list[Use] = []
    for known in trace.values:
        if known.role != "parameter" or known.producer is not None or known.name not in arrays:
            continue
        first = _first_use(known.id, reads)
        if first is not None and all(u.name != known.name for u in found):
            step, positions = first
            array = arrays[known.name]
            kind = _KINDS.get(_plain(step), "other")
            at = (step.index, *positions)
            found.append(Use(known.name, tuple(array.shape), array, kind, at, words_of(known.name)))
    return sorted(found, key=lambda u: u.at)


def _first_use(value: int, reads: dict[int, list[Step]]) -> tuple[Step, tuple[int, ...]] | None:
    """Return the first step that computes with a value or with what it was moved to, and the places that it
    had when it was put together with others on the way."""
    todo: list[tuple[int, tuple[int, ...]]] = [(value, ())]
    uses, seen = list[tuple[int, tuple[int, ...], Step]](), set[int]()
    while todo:
        at, places = todo.pop()
        for step in reads.get(at, ()):
            if step.index in seen:
                continue
            seen.add(step.index)
            if _plain(step) in _CARRIED or (_plain(step) in SELECTING and len(step.inputs) == 1):
                here = (step.inputs.index(at),) if len(step.inputs) > 1 else ()
                todo += [(o, (*places, *here)) for o in step.outputs]
            else:
                uses.append((step.index, places, step))
    if not uses:
        return None
    _, places, step = min(uses, key=lambda u: u[:2])
    return step, places


def _plain(step: Step) -> str:
    name = step.primitive
    if name.startswith("aten."):
        return step.operation
    return name


def words_of(name: str) -> tuple[str, ...]:
    """Return the parts of a name: "blocks.0.attn.q_proj.weight" gives blocks, 0, attn, q, proj, weight."""
    parts = [p for p in re.split(r"[^A-Za-z0-9]+|(?<=[a-z])(?=[0-9])", name.lower()) if p]
    return tuple(_SYNONYMS.get(p, p) for p in parts)
