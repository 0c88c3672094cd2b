"""What made the numbers that an operation reads: an exponential, a subtraction, its line's earlier run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stablenum._support.pickled_fields import pickled_by_name
from stablenum.diagnosis.replay.operations import MOVING, OF_A_DISTRIBUTION, SELECTING
from stablenum.diagnosis.replay.trace import Step, Trace
from stablenum.diagnosis.replay.values import Place

__all__ = ["Upstream", "outlier_before", "upstream_of"]

_EXPONENTIALS = frozenset({"exp", "exp2", "expm1"})
# Functions that underflow to 0 where their logarithms are ordinary numbers.
_UNDERFLOWING = _EXPONENTIALS | OF_A_DISTRIBUTION | {"sigmoid", "softmax"}
_LOGARITHMS = frozenset({"log", "log10", "log2"})
_CARRYING = MOVING - SELECTING | {"cast"}
_LINEAR = _CARRYING | {"add", "div", "matmul", "mean", "mul", "neg", "sub", "sum"}
_LOOPS = ("scan", "while")
# What adds to its earlier result counts or sums, and does not multiply it.
_ADDING = frozenset({"add", "cumsum", "sub", "sum"})
# A line that computes with its own result in fewer turns than this is no loop.
_FEWEST_TURNS = 4
_MOST_STEPS = 10_000


@pickled_by_name
@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """What is known of the operations before another one.

    Attributes:
        turns: how many times its line computed the number from its own earlier result; 0 for less than four.
        exponential: the line of an exponential among whose results, multiplied and added, it reads one; or
            its own, if it is one.
        subtracted: whether its argument came out of a subtraction.
        plain_divisor: whether the divisor is a single number that the code holds or was given: a setting.
        underflowed: whether both parts of a quotient, or what a logarithm was taken of, are functions that
            underflow where their logarithms are ordinary numbers.

    Example:
        >>> Upstream(turns=12).turns
        12
    """

    turns: int = 0
    exponential: Place | None = None
    subtracted: bool = False
    plain_divisor: bool = False
    underflowed: bool = False

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Upstream:
        """Return the object of which ``dataclasses.asdict`` made ``d``."""
        exponential = d["exponential"]
        return cls(**{**d, "exponential": Place(**exponential) if exponential else None})


def upstream_of(trace: Trace, step: Step) -> Upstream:
    """Return what made the numbers that a step reads.

    Example:
        >>> t = Trace()
        >>> x, y, e, z = (t.add_value() for _ in range(4))
        >>> at = Place("a.py", 3)
        >>> _ = t.add_step("exp", inputs=[x], outputs=[e], place=at)
        >>> upstream_of(t, t.add_step("mul", inputs=[e, y], outputs=[z])).exponential
        Place(file='a.py', line=3, function='', code='')
    """
    made_by_exp = next(_back(trace, step, past=_is_linear, found=_is_exponential), None)
    parts = [_origins(trace, [value]) for value in step.inputs] if step.operation == "div" else []
    return Upstream(
        turns=_turns(trace, step),
        exponential=step.place if _is_exponential(step) else made_by_exp.place if made_by_exp else None,
        subtracted=any(s.operation == "sub" for s in _origins(trace, step.inputs[:1])),
        plain_divisor=len(parts) == 2 and not parts[1] and _is_single(trace, step.inputs[1]),
        underflowed=_has_underflowed(trace, step, parts),
    )


def outlier_before(trace: Trace, step: Step) -> str:
    """Return which input of the program, or else of the step, holds entries far from the rest; "" if the step
    reads none."""
    own = [v for v in trace.inputs_of(step) if v.outliers is not None and v.role in ("", "input")]
    if step.phase != "forward" or not own:
        return ""
    before = [step, *_back(trace, step, past=lambda s: True, found=lambda s: True)]
    read = (trace.values[i] for s in before for i in s.inputs)
    given = next((v for v in read if v.role == "input" and v.outliers is not None), None)
    if given is None:
        return f"an input of {step.operation} holds entries far from the rest: {own[0].outliers}"
    return f"{given.name or 'an input'} holds entries far from the rest: {given.outliers}"


def _has_underflowed(trace: Trace, step: Step, parts: Sequence[Sequence[Step]]) -> bool:
    if step.operation in _LOGARITHMS:
        return any(True for _ in _back(trace, step, past=_is_product, found=_underflows))
    return len(parts) == 2 and all(p and all(map(_underflows, p)) for p in parts)


def _is_exponential(step: Step) -> bool:
    return step.operation in _EXPONENTIALS


def _is_product(step: Step) -> bool:
    return step.operation in _LINEAR or step.operation in ("cumprod", "prod")


def _is_linear(step: Step) -> bool:
    return step.operation in _LINEAR


def _underflows(step: Step) -> bool:
    return step.operation in _UNDERFLOWING or step.library.rpartition(".")[2] in OF_A_DISTRIBUTION


def _is_single(trace: Trace, value: int) -> bool:
    """Return whether a value is one number that the code holds or was given.

    Where nothing else was recorded, as of an operation outside of every function, it may have been computed.
    """
    source = trace.values[value]
    while source.producer is not None and _carries(trace.steps[source.producer]):
        read = trace.inputs_of(trace.steps[source.producer])
        if not read:
            break
        source = read[0]
    size = source.stats or trace.values[value].stats
    given = source.role == "constant" or (source.role == "input" and len(trace.steps) > 1)
    return given and size is not None and size.size == 1 and size.shape == ()


def _turns(trace: Trace, step: Step) -> int:
    """Count the earlier runs of a line from whose result it computes."""

    def is_the_same(s: Step) -> bool:
        return s.operation in _LOOPS or (s.place == step.place and s.operation == step.operation)

    if step.place is None or step.operation in _ADDING:
        return 0
    earlier = sum(1 for _ in _back(trace, step, past=lambda s: True, found=is_the_same))
    return earlier + 1 if earlier + 1 >= _FEWEST_TURNS else 0


def _origins(trace: Trace, values: Sequence[int]) -> list[Step]:
    """Return the steps that computed values, past those that only move them."""
    found, todo = [], list(values)
    while todo:
        producer = trace.values[todo.pop()].producer
        if producer is None:
            continue
        made = trace.steps[producer]
        if _carries(made):
            todo += made.inputs
        else:
            found.append(made)
    return found


def _carries(step: Step) -> bool:
    """Return whether a step moves or casts what it reads; a cast inside a function has the function's
    name."""
    return step.operation in _CARRYING or step.primitive == "convert_element_type"


def _back(
    trace: Trace, step: Step, *, past: Callable[[Step], bool], found: Callable[[Step], bool]
) -> Iterator[Step]:
    """Yield the steps before a step that are ``found``, through those that are to be gone ``past``."""
    todo, seen = list(step.inputs), {step.index}
    while todo and len(seen) < _MOST_STEPS:
        producer = trace.values[todo.pop()].producer
        if producer is None or producer in seen:
            continue
        seen.add(producer)
        made = trace.steps[producer]
        if found(made):
            yield made
        if found(made) or past(made):
            todo += made.inputs
