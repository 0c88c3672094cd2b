"""Tracing of a bad result back to where it began.

Two bits per value are enough: whether it holds NaN, and whether it holds an infinity. A NaN is followed back
through inputs with NaN to the operation that produced one from inputs without NaN. If that operation read
infinities, each of them is followed back too: one that was *computed* (an exponential that overflowed, a
division by zero) is the origin; one that was *placed* (a mask filled with -inf) is legitimate, and the origin
is the operation that could not handle it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from stablenum.diagnosis.replay.constants import infinite_constant, is_constant, is_placed_nan, with_constant
from stablenum.diagnosis.replay.operations import ANSWERING, CLIPPING, MASKED, MOVING, SELECTING
from stablenum.diagnosis.replay.trace import Step, Trace, Value
from stablenum.diagnosis.replay.written import LAYERS, is_written_data

__all__ = ["Origin", "first_causes", "is_clipped", "is_healed", "is_selected", "on_the_way", "reads_data"]

# Operations through which a mask is still a mask, element by element.
_PASSING_ON = MOVING - {"gather", "index", "scatter", "index_put"} | {
    "add", "cast", "div", "mul", "neg", "sub", "tril", "triu",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a bad value began: a step, or a value that came from outside.

    Attributes:
        step: the operation; None if ``value`` came from outside.
        value: the first bad value.
        kind: "nan" or "inf".
        placed: whether the infinities that the step read were put there by a mask or a constant.
        source: the mask or the constant from outside whose infinities the step lets into the result.
    """

    step: Step | None
    value: Value
    kind: str
    placed: bool = False
    source: Value | None = None

    @property
    def order(self) -> int:
        """The sort key of origins: values from outside come first, then steps in order of execution."""
        return -1 if self.step is None else self.step.index


def first_causes(trace: Trace, bad: Iterable[int]) -> list[Origin]:
    """Return the origins of bad values, each once, in order of execution.

    Args:
        trace: a replay.
        bad: indices of the values that should be finite but are not: the loss, gradients or parameters.

    Example:
        >>> t = Trace()
        >>> x = t.add_value(role="input")
        >>> y = t.add_value(flags=(False, False, True))
        >>> step = t.add_step("log", inputs=[x], outputs=[y])
        >>> [o.step.operation for o in first_causes(t, [y])]
        ['log']
    """
    found: dict[int, Origin] = {}
    for index in bad:
        value = trace.values[index]
        origins = _of_nan(trace, value) if value.nan else _of_inf(trace, value)
        # One that was computed reached the result, and a mask beside it may not have been chosen.
        origins = [o for o in origins if not o.placed] or origins
        if value.nan and value.inf:  # in an array of one loss per iteration, the infinity may come first
            origins += [o for o in _of_inf(trace, value) if not o.placed]
        for origin in origins:
            # Each step and each value from outside has its own key: ids are 0 and above, steps get negative
            # numbers.
            key = origin.value.id if origin.step is None else -1 - origin.step.index
            found.setdefault(key, origin)
    return sorted(found.values(), key=lambda o: o.order)


def on_the_way(trace: Trace, bad: Iterable[int], at_edge: Callable[[Step], bool]) -> list[Step]:
    """Return the steps through which bad values came and which would give NaN or an infinity of their own, in
    order: the first causes, and those that they hide.

    Args:
        trace: a replay.
        bad: indices of the values that should be finite but are not.
        at_edge: whether the forward operation of a derivative, which read a NaN, has an infinite derivative.

    Example:
        >>> t = Trace()
        >>> x, inf = t.add_value(role="input"), t.add_value(flags=(False, True, False))
        >>> nan, both = (t.add_value(flags=(True, False, False)) for _ in range(2))
        >>> _ = t.add_step("log", inputs=[x], outputs=[inf])
        >>> _ = t.add_step("div", inputs=[x], outputs=[nan])
        >>> _ = t.add_step("mul", inputs=[inf, nan], outputs=[both])
        >>> [s.operation for s in on_the_way(t, [both], lambda step: False)]
        ['log', 'div']
    """
    found, todo, seen = set(), list(bad), set(bad)
    while todo:
        producer = trace.values[todo.pop()].producer
        if producer is None:
            continue
        step = trace.steps[producer]
        read = [v for v in trace.inputs_of(step) if not v.finite]
        new = [v.id for v in read if v.id not in seen]
        seen.update(new)
        todo += new
        computed = not read and step.operation not in MOVING and not trace.places_infinity(step)
        if computed or (step.forward is not None and any(v.nan for v in read) and at_edge(step)):
            found.add(producer)
    return [trace.steps[i] for i in sorted(found)]


def _of_nan(trace: Trace, bad: Value) -> list[Origin]:
    """Follow NaN back to the values whose producer read no NaN."""
    origins, todo, seen = [], [bad], {bad.id}
    while todo:
        value = todo.pop()
        step = None if value.producer is None else trace.steps[value.producer]
        if step is None:
            origins.append(Origin(step=None, value=value, kind="nan"))
            continue
        inputs = trace.inputs_of(step)
        # A constant that is NaN does no harm by itself; the step that lets it into a result does.
        before = [v for v in inputs if v.nan and not is_placed_nan(trace, v)]
        if before:
            new = [v for v in before if v.id not in seen]
            seen.update(v.id for v in new)
            todo += new
            continue
        # This step made the NaN. If it read an infinity that was computed, the failure began there.
        infinite = [o for v in inputs if v.inf for o in _of_inf(trace, v)]
        computed = [o for o in infinite if not o.placed]
        # An infinity that is a plain number (x * inf) was placed, too.
        placed = bool(infinite) or trace.places_infinity(step)
        origins += computed or [Origin(step=step, value=value, kind="nan", placed=placed)]
    return origins


def _of_inf(trace: Trace, bad: Value) -> list[Origin]:
    """Follow infinities back to the steps that computed one, or to where one was placed.

    A function that returns an infinity itself (``ANSWERING``) is named in place of the mask or the constant
    that it read; so is the arithmetic that reads a constant of +inf, which is no mask.
    """
    origins, todo, seen = [], [bad], {bad.id}
    # For each value, the function in ANSWERING that turned it into the bad value.
    answers: dict[int, Origin] = {}
    # For each value, the step that picked infinities of a mask, on the way from it to the bad value.
    readers: dict[int, Step] = {}
    while todo:
        value = todo.pop()
        step = None if value.producer is None else trace.steps[value.producer]
        answer = answers.get(value.id)
        if answer is None and step is not None and step.operation in ANSWERING:
            answer = Origin(step=step, value=value, kind="inf", placed=step.operation in MASKED)
        if step is None:
            # A value of -inf from outside is a mask, wherever it came from; +inf is bad data.
            masking = value.role == "constant" or (value.neginf and not value.posinf)
            origin = Origin(step=None, value=value, kind="inf", placed=masking)
            if masking:
                origin = answer or _read(trace, readers.get(value.id), value) or origin
            origins.append(origin)
            continue
        if is_written_data(trace, step):
            origins.append(Origin(step=step, value=value, kind="inf"))
            continue
        # If infinities went in, the failure began before this step. If none did, look through the parts of
        # the function to which the step belongs.
        before = [v for v in trace.inputs_of(step) if v.inf] or _into_function(trace, step)
        constant = infinite_constant(trace, step)
        if constant is not None:
            origins.append(Origin(step=with_constant(trace, step), value=value, kind="inf"))
            before = [v for v in before if v is not constant.value]
            if not before:
                continue
        if before:
            new = [v for v in before if v.id not in seen]
            seen.update(v.id for v in new)
            todo += new
            answers.update({v.id: answer for v in new} if answer else {})  # the function named so far stays
            readers.update({v.id: r for v in new if (r := _reader(trace, step, v) or readers.get(value.id))})
            continue
        nans = [v for v in trace.inputs_of(step) if v.nan]
        if nans:  # this step turned an earlier NaN into an infinity
            origins += [o for v in nans for o in _of_nan(trace, v)]
            continue
        # Only finite numbers went in: the step computed the infinity, or moved or wrote one that was placed.
        placed = trace.places_infinity(step) or step.operation in MOVING
        origin = Origin(step=step, value=value, kind="inf", placed=placed)
        if placed and step.operation in ("constant", "full"):
            origin = answer or _read(trace, readers.get(value.id), value) or origin
        origins.append(answer if answer and placed else origin)
    return origins


def _reader(trace: Trace, step: Step, value: Value) -> Step | None:
    """Return the step if it picks from a mask (by an index, a sum, a selection), rather than passing it on
    whole."""
    if step.operation in ("where", "masked_fill"):
        # The user's own mask, unless it selects from a masked array.
        return step if is_constant(trace, value) else None
    loop = step.operation == "index" and step.primitive == "index"  # the rows of a loop, one by one
    return None if loop or step.operation in _PASSING_ON else step


def _read(trace: Trace, reader: Step | None, source: Value) -> Origin | None:
    """Return as the origin the step that lets a mask into the result; the mask itself is legitimate.

    A parameter is no mask: an infinity in it is blamed on the parameter. A number with which memory is filled
    may be a start (of a maximum) that was never replaced: only an index into it is to blame in its place.
    """
    if reader is None or source.role in ("parameter", "state"):
        return None
    filled = source.producer is not None or (source.role == "constant" and not source.name.endswith("]"))
    if filled and reader.operation not in ("gather", "index"):
        return None
    value = next((v for v in trace.outputs_of(reader) if not v.finite), source)
    kind = "nan" if value.nan else "inf"
    return Origin(step=reader, value=value, kind=kind, placed=True, source=source)


def _into_function(trace: Trace, step: Step) -> list[Value]:
    """Return the infinities that went into a function over rows, through its own parts on the same line.

    In a fully masked row the infinities become a sum of 0, and the last part of the function returns log(0)
    without having read them.
    """
    if step.operation not in MASKED:
        return []
    names = MOVING - SELECTING | {step.operation}
    infinite, todo, seen = [], [step], {step.index}
    while todo:
        for value in trace.inputs_of(todo.pop()):
            # Another part of the function is searched in turn; a value from before the function ends the
            # search.
            part = None if value.producer is None else trace.steps[value.producer]
            if part is not None and part.place == step.place and part.operation in names:
                if part.index not in seen:
                    seen.add(part.index)
                    todo.append(part)
            elif value.inf:
                infinite.append(value)
    return infinite


# Through a layer, and what follows it, data are still data.
_CARRYING = MOVING - SELECTING | CLIPPING | LAYERS | {"cast"}


def reads_data(trace: Trace, step: Step) -> bool:
    """Return whether the infinities that a layer reads came from outside with its data."""
    infinite = [v for v in trace.inputs_of(step) if v.inf]
    return step.operation in LAYERS and bool(infinite) and all(_is_input(trace, v) for v in infinite)


def _is_input(trace: Trace, value: Value) -> bool:
    """Return whether a value is an input, or was moved or computed from one by layers."""
    if value.producer is None:
        return value.role == "input"
    step = trace.steps[value.producer]
    read = [v for v in trace.inputs_of(step) if v.inf]
    carried = step.operation in _CARRYING and bool(read) and not trace.places_infinity(step)
    return carried and all(_is_input(trace, v) for v in read)


def is_selected(trace: Trace, step: Step, *, within: int = 12) -> bool:
    """Return whether a later ``where`` or mask discards part of the result of a forward step.

    The derivative of the step then receives a gradient of 0 for that part, and 0 x inf is NaN (the
    where-trap).

    Args:
        trace: the replay.
        step: a forward step.
        within: how many steps the value may pass through on its way.
    """
    return _reaches(trace, step, SELECTING - CLIPPING, within)


def is_healed(trace: Trace, step: Step, *, within: int = 12) -> bool:
    """Return whether the selection that discards a part of the result leaves nothing bad in the forward pass,
    so that what is bad came back through the derivative."""
    selecting = _selections(trace, step, SELECTING - CLIPPING, within)
    return bool(selecting) and all(v.finite for s in selecting for v in trace.outputs_of(s))


def is_clipped(trace: Trace, step: Step, *, within: int = 12) -> bool:
    """Return whether a later clip cuts the result of a forward step; its gradient of 0 is no different from
    that of a ``where``, but the remedy is to clip before the step. What has become NaN on its way is not cut.
    """
    return _reaches(trace, step, CLIPPING, within, through_nan=False)


def _reaches(
    trace: Trace, step: Step, operations: Set[str], within: int, *, through_nan: bool = True
) -> bool:
    """Return whether a value passes into one of these operations in the forward pass."""
    return bool(_selections(trace, step, operations, within, through_nan=through_nan))


def _selections(
    trace: Trace, step: Step, operations: Set[str], within: int, *, through_nan: bool = True
) -> list[Step]:
    """Return the first of these operations that a value passes into in the forward pass."""
    reached, frontier = set(step.outputs), set(step.outputs)
    for _ in range(within):
        following = [s for s in trace.steps[step.index + 1 :] if frontier.intersection(s.inputs)]
        following = [s for s in following if s.phase == "forward"]
        selecting = [s for s in following if s.operation in operations]
        if selecting:
            return selecting
        further = [(o, v) for s in following for o, v in zip(s.outputs, trace.outputs_of(s), strict=True)]
        frontier = {o for o, v in further if through_nan or not v.nan} - reached
        reached |= frontier
        if not frontier:
            break
    return []
