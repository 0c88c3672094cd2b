"""How a program uses each of its parameters: in which order, and in what kind of operation."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from stablenum.diagnosis.diff.sides.fingerprints import Fingerprint, distance
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.diff.weights.origins import Piece
from stablenum.diagnosis.diff.weights.parameter_functions import ParameterFunctions
from stablenum.diagnosis.replay.operations import SELECTING
from stablenum.diagnosis.replay.trace import Step, Trace

__all__ = ["Use", "first_uses", "hands_on", "uses_of"]

# Primitives that hand a parameter on.
_CARRIED = frozenset({
    "broadcast", "broadcast_in_dim", "cast", "cat", "clone", "copy", "expand", "flip", "index", "reshape",
    "rev", "slice", "squeeze", "stack", "to", "transpose",
})  # fmt: skip
_KINDS = {
    "matmul": "matmul", "conv": "conv", "convolution": "conv", "gather": "gather", "embedding": "gather",
    "index": "gather", "mul": "mul", "add": "add", "sub": "add", "div": "mul",
}  # fmt: skip
_MULTIPLIED = frozenset({"matmul", "conv", "gather"})
_PUT_TOGETHER = frozenset({"cat", "concatenate"})
# Fingerprints of what depends on no parameter differ by less than this if the values are the same: float32,
# in which arguments are given, rounds by 6e-8, and inputs may have been scaled in it.
_SAME = 1e-6
_EMPTY = Fingerprint(0)
_LOOP = "of scan"
_SYNONYMS = {
    "kernel": "weight", "scale": "weight", "embedding": "weight", "gamma": "weight", "w": "weight",
    "b": "bias", "beta": "bias", "query": "q", "key": "k", "value": "v", "out": "o", "output": "o",
    "wq": "q", "wk": "k", "wv": "v", "wo": "o",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Use:
    """A parameter, or a piece of one, and its first use.

    Attributes:
        name: of the parameter; of a piece, a name of its own.
        shape: of the parameter or the piece.
        kind: "matmul", "conv", "gather", "mul", "add" or "other".
        at: orders the uses, in which a team stands together.
        team: matrices that multiply one value, and their biases.
        group: the matrices of a team, or its biases.
        words: the parts of the name, without those that all names have.
        piece: which part of which parameter this is.
        data: the fingerprint of the value that is multiplied, if no parameter has a part in it; else None.
        layers: how many there are, if a loop over layers takes one row after another; else 0.
        columns: the widths of the values that were put together into the one that is multiplied.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    at: tuple[int, ...]
    team: tuple[int, ...]
    group: tuple[int, ...]
    words: tuple[str, ...]
    piece: Piece
    data: Fingerprint | None = None
    layers: int = 0
    columns: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def unlike(self, other: Use) -> float:
        """Return how little the values resemble each other that two parameters multiply, from 0 to 1.

        A state that is zero at first tells the weights of the state from those of the input.
        """
        a, b = self.data, other.data
        if a is None or b is None:
            # What is not known tells less than what is zero at first. Chosen, not measured.
            return 0.0 if a is b else 0.5 if (a or b or _EMPTY).entries else 1.0
        if bool(a.entries) != bool(b.entries):
            return 1.0
        # Where programs differ before, what corresponds has other values. Chosen, not measured.
        return 0.0 if distance(a, b) <= _SAME else 0.25


def uses_of(side: Side) -> list[Use]:
    """Return the parameters that a program uses, in the order of their first uses in the forward pass."""
    trace = side.trace
    shapes = {name: tuple(x.shape) for name, x in side.program.parameters().items()}
    reads = _reads(trace)
    found, functions = list[_Found](), ParameterFunctions(side)
    for known in trace.values:
        if known.role != "parameter" or known.producer is not None or known.name not in shapes:
            continue
        first = _first_use(known.id, reads, functions)
        if first is not None and all(f.use.name != known.name for f in found):
            found.append(_found(side, known.name, shapes[known.name], *first))
    return _in_order(trace, sorted(found, key=lambda f: f.use.at))


def first_uses(side: Side, names: Collection[str]) -> dict[str, Step]:
    """Return the step of the forward pass in which each of some parameters is first used."""
    reads, functions = _reads(side.trace), ParameterFunctions(side)
    found: dict[str, Step] = {}
    for known in side.trace.values:
        if known.role == "parameter" and known.producer is None and known.name in names:
            first = _first_use(known.id, reads, functions)
            if first is not None:
                found.setdefault(known.name, first[0])
    return found


def _reads(trace: Trace) -> dict[int, list[Step]]:
    """Return the steps of the forward pass that read each value."""
    found: dict[int, list[Step]] = {}
    for step in trace.steps:
        if step.phase == "forward":
            for value in step.inputs:
                found.setdefault(value, []).append(step)
    return found


@dataclass(frozen=True, slots=True)
class _Found:
    """A use, its step, and the value that the parameter meets there, before it was moved."""

    use: Use
    step: Step
    meets: int | None


def _found(
    side: Side, name: str, shape: tuple[int, ...], step: Step, places: tuple[int, ...], at: int
) -> _Found:
    trace, kind = side.trace, _KINDS.get(_plain(step), "other")
    others = [_root(trace, i) for i in step.inputs if i != at]
    meets = next((i for i in others if trace.values[i].role != "parameter"), None)
    use = Use(name, shape, kind, (step.index, *places), (), (), words_of(name), Piece(name))
    if _LOOP in step.where and shape and _is_row_after_row(side, at, shape):
        use = replace(use, layers=shape[0])
    if meets is not None and kind in _MULTIPLIED:
        read = meets if side.shapes[meets] else next(i for i in step.inputs if _root(trace, i) == meets)
        data = None if side.trained[meets] else side.prints[read]
        use = replace(use, data=data, columns=_columns(side, meets))
    return _Found(use, step, meets)


def _is_row_after_row(side: Side, value: int, shape: tuple[int, ...]) -> bool:
    """Return whether a value was moved from a row of a parameter of this shape, as in a loop over layers."""
    while True:
        if math.prod(side.shapes[value]) * shape[0] == math.prod(shape):
            return True
        producer = side.trace.values[value].producer
        if producer is None or not hands_on(side.trace.steps[producer]):
            return False
        value = side.trace.steps[producer].inputs[0]


def _root(trace: Trace, value: int) -> int:
    """Return the value from which another one was moved, without computing."""
    while True:
        producer = trace.values[value].producer
        if producer is None:
            return value
        step = trace.steps[producer]
        if len(step.inputs) != 1 or not hands_on(step):
            return value
        value = step.inputs[0]


def _columns(side: Side, value: int) -> tuple[int, ...]:
    """Return the last sizes of the values that a concatenation put together; none for another value."""
    producer = side.trace.values[value].producer
    if producer is None or side.trace.steps[producer].operation not in _PUT_TOGETHER:
        return ()
    shapes = [side.shapes[i] for i in side.trace.steps[producer].inputs]
    return tuple(shape[-1] for shape in shapes if shape)


def _in_order(trace: Trace, found: Sequence[_Found]) -> list[Use]:
    """Sort the uses: matrices that multiply one value together, then what is done to the products."""
    first: dict[object, int] = {}
    places: dict[int, tuple[int, int]] = {}
    keys = []
    for f in found:
        if f.use.kind in ("matmul", "conv") and len(f.use.shape) > 1:
            place = (first.setdefault(_group(f), f.step.index), 0)
        else:
            producer = f.step.index if f.meets is None else trace.values[f.meets].producer
            before = places.get(f.step.index) or (None if producer is None else places.get(producer))
            place = (before[0], before[1] + 1) if before is not None else (f.step.index, 0)
        places.setdefault(f.step.index, place)
        keys.append(place)
    ordered = sorted(zip(keys, found, strict=True), key=lambda item: (item[0], item[1].use.at))
    uses = [replace(f.use, at=(*key, *f.use.at), team=key[:1], group=key) for key, f in ordered]
    return _states_last(uses, _behind(trace, found))


def _behind(trace: Trace, found: Sequence[_Found]) -> dict[str, set[str]]:
    """Return the parameters on which what each parameter meets depends."""
    masks = {v.id: 1 << v.id for v in trace.values if v.role == "parameter" and v.producer is None}
    for step in trace.steps:
        if step.phase == "forward":
            mask = 0
            for i in step.inputs:
                mask |= masks.get(i, 0)
            masks.update(dict.fromkeys(step.outputs, mask))
    named = {v.name: 1 << v.id for v in trace.values if v.role == "parameter" and v.producer is None}
    met = {f.use.name: masks.get(f.meets, 0) for f in found if f.meets is not None}
    return {name: {other for other, bit in named.items() if bit & mask} for name, mask in met.items()}


def _states_last(uses: Sequence[Use], behind: Mapping[str, set[str]]) -> list[Use]:
    """Put what multiplies a state that is zero at first after what multiplies the input, unless that input
    follows from the state."""
    teams = [list(team) for _, team in itertools.groupby(uses, key=lambda u: u.team)]
    for i in range(len(teams) - 1):
        first, second = teams[i][0], teams[i + 1][0]
        if first.name in behind.get(second.name, ()):
            continue
        if _of_state(first) and second.kind == "matmul" and not _of_state(second):
            teams[i], teams[i + 1] = teams[i + 1], teams[i]
    return [use for team in teams for use in team]


def _of_state(use: Use) -> bool:
    return use.data is not None and not use.data.entries


def _group(found: _Found) -> object:
    """Return what the matrices that multiply one value have in common; names that number layers tell them
    apart where that value is a constant or goes into each layer."""
    return found.meets, tuple(w for w in found.use.words if w.isdigit())


def _first_use(
    value: int, reads: dict[int, list[Step]], functions: ParameterFunctions
) -> tuple[Step, tuple[int, ...], int] | None:
    """Return the first step that computes with a value or with what it was moved to, the places that it had
    when it was put together with others on the way, and what it was moved to.

    What is computed from parameters alone, such as a moving average of them, is used where it meets something
    else; a use of the parameter itself comes first.
    """
    todo: list[tuple[int, tuple[int, ...], bool]] = [(value, (), False)]
    uses, seen = list[tuple[bool, int, tuple[int, ...], Step, int]](), set[int]()
    while todo:
        at, places, changed = todo.pop()
        for step in reads.get(at, ()):
            if step.index in seen:
                continue
            seen.add(step.index)
            if hands_on(step) or (_plain(step) in SELECTING and len(step.inputs) == 1):
                here = (step.inputs.index(at),) if len(step.inputs) > 1 else ()
                todo += [(o, (*places, *here), changed) for o in step.outputs]
            elif functions.has(step, at) and step.outputs[0] in reads:
                todo.append((step.outputs[0], places, True))
            else:
                uses.append((changed, step.index, places, step, at))
    if not uses:
        return None
    _, _, places, step, at = min(uses, key=lambda u: u[:3])
    return step, places, at


def hands_on(step: Step) -> bool:
    """Return whether a step only hands a value on; a product with 1 does, too."""
    if step.primitive == "mul":
        return len(step.inputs) == 1 and set(step.scalars) == {1.0}
    return _plain(step) in _CARRIED


def _plain(step: Step) -> str:
    name = step.primitive
    if name.startswith("aten."):
        return step.operation
    return name


def words_of(name: str) -> tuple[str, ...]:
    """Return the parts of a name: "blocks.0.attn.q_proj.weight" gives blocks, 0, attn, q, proj, weight."""
    parts = [p for p in re.split(r"[^A-Za-z0-9]+|(?<=[a-z])(?=[0-9])", name.lower()) if p]
    return tuple(_SYNONYMS.get(p, p) for p in parts)
