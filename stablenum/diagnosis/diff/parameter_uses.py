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
_CARRIED = frozenset(
    "reshape transpose broadcast clone cast to copy slice index squeeze expand stack cat broadcast_in_dim"
    .split()
)  # fmt: skip
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
        at: the index of the step that first computes with it.
        words: the parts of the name, without those that all names have.
    """

    name: str
    shape: tuple[int, ...]
    array: Any
    kind: str
    at: int
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
    found = []
    for value in trace.values:
        if value.role != "parameter" or value.producer is not None or value.name not in arrays:
            continue
        step = _first_use(value.id, reads)
        if step is not None and all(u.name != value.name for u in found):
            array = arrays[value.name]
            kind = _KINDS.get(_plain(step), "other")
            found.append(Use(value.name, tuple(array.shape), array, kind, step.index, words_of(value.name)))
    return sorted(found, key=lambda u: u.at)


def _first_use(value: int, reads: dict[int, list[Step]]) -> Step | None:
    """Return the first step that computes with a value or with what it was moved to."""
    todo, uses, seen = [value], list[Step](), set[int]()
    while todo:
        at = todo.pop()
        for step in reads.get(at, ()):
            if step.index in seen:
                continue
            seen.add(step.index)
            if _plain(step) in _CARRIED or (_plain(step) in SELECTING and len(step.inputs) == 1):
                todo += step.outputs
            else:
                uses.append(step)
    return min(uses, key=lambda s: s.index, default=None)


def _plain(step: Step) -> str:
    name = step.primitive
    if name.startswith("aten."):
        return step.operation
    return name


def words_of(name: str) -> tuple[str, ...]:
    """Return the parts of a name: "blocks.0.attn.q_proj.weight" gives blocks, 0, attn, q, proj, weight."""
    parts = [p for p in re.split(r"[^A-Za-z0-9]+|(?<=[a-z])(?=[0-9])", name.lower()) if p]
    return tuple(_SYNONYMS.get(p, p) for p in parts)
