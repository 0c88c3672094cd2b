"""What is seen of an operation in the steps around it: the function that it is a part of, written by hand; a
small number added before it that is lost; a square after it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from stablenum.diagnosis.replay.operations import MOVING, SELECTING
from stablenum.diagnosis.replay.trace import Step, Trace
from stablenum.diagnosis.replay.values import TensorStats
from stablenum.formats import FORMATS

__all__ = ["by_hand", "is_squared", "lost_number", "rows_of"]

_CARRYING = MOVING - SELECTING | {"cast"}
# Those that keep all elements and add none.
_KEEPING = {"broadcast", "cast", "clone", "copy", "reshape", "transpose"}


def by_hand(trace: Trace, step: Step) -> str:
    """Return the name of the function of which a forward step is a part; "" if it is not known.

    Example:
        >>> t = Trace()
        >>> x, e, s, y = (t.add_value() for _ in range(4))
        >>> exp = t.add_step("exp", inputs=[x], outputs=[e])
        >>> _ = t.add_step("add", inputs=[e], outputs=[s], scalars=[1.0])
        >>> _ = t.add_step("log", inputs=[s], outputs=[y])
        >>> by_hand(t, exp)
        'softplus'
    """
    if step.operation == "exp":
        return _of_exp(trace, step)
    if step.operation == "expm1":
        return _INVERSE if _next(trace, step, "log") else ""
    if step.operation in ("log", "log1p"):
        return _of_log(trace, step)
    if step.operation in ("div", "reciprocal"):
        return _of_quotient(trace, step) or _of_length(trace, step)
    if step.operation == "sqrt":
        return next((name for q in _next(trace, step, "div") if (name := _of_length(trace, q))), "")
    return ""


def rows_of(trace: Trace, step: Step) -> Mapping[str, Any]:
    """Return the axis of a function over rows that was written by hand: that of its sum or mean."""
    after = _next(trace, step, "sum") if step.operation == "exp" else []
    among = [step, *(_next(trace, step, "div") if step.operation == "exp" else [])]
    through = ("div", "exp", "log", "sqrt")
    before = [s for a in among for s in _before(trace, a, through=through) if s.operation in _TOTALS]
    totals = [*after, *before, *(part for s in before for part in _before(trace, s))]
    return next(({"axis": s.options["axis"]} for s in totals if "axis" in s.options), {})


_INVERSE = "inverse softplus"
_TOTALS = ("mean", "norm", "softmax", "sum")


def _of_length(trace: Trace, step: Step) -> str:
    """Return the name of the function that divides a vector by its length or its root mean square."""
    if len(step.inputs) != 2:
        return ""
    whole = _moved_from(trace, step.inputs[0])
    for divisor in _before(trace, step, of=step.inputs[1:]):
        if divisor.operation == "norm" and whole in _read_by_parts(trace, divisor):
            return "normalize"
        if divisor.operation != "sqrt":
            continue
        for total in _before(trace, divisor):
            squares = _before(trace, total, through=("mean", "sum"))
            square = next((s for s in squares if s.operation in ("mul", "pow")), None)
            if square is not None and {_moved_from(trace, i) for i in square.inputs[:1]} == {whole}:
                return {"mean": "rms_norm", "sum": "normalize"}.get(total.operation, "")
    return ""


def _read_by_parts(trace: Trace, step: Step) -> set[int]:
    """Return what a function of several steps read, of which ``step`` is the last."""
    todo, read = list(step.inputs), set()
    while todo:
        value = _moved_from(trace, todo.pop())
        producer = trace.values[value].producer
        if producer is not None and trace.steps[producer].operation == step.operation:
            todo += trace.steps[producer].inputs
        else:
            read.add(value)
    return read


def _moved_from(trace: Trace, value: int) -> int:
    """Return the value of which another one is the same elements, all of them, moved."""
    producer = trace.values[value].producer
    while (
        producer is not None and trace.steps[producer].operation in _KEEPING and trace.steps[producer].inputs
    ):
        value = trace.steps[producer].inputs[0]
        producer = trace.values[value].producer
    return value


def _of_exp(trace: Trace, step: Step) -> str:
    if _next(trace, step, "log1p"):
        return "softplus"
    if any(1.0 in less.scalars and _next(trace, less, "log") for less in _next(trace, step, "sub")):
        return _INVERSE
    for one_more in _next(trace, step, "add"):
        if 1.0 in one_more.scalars:
            if _next(trace, one_more, "log"):
                return "softplus"
            if _next(trace, one_more, "reciprocal") or _next(trace, one_more, "div"):
                return "sigmoid"
    totals = _next(trace, step, "sum")
    if any(_next(trace, total, "log") for total in totals):
        return "logsumexp"
    quotients = [q for s in (step, *totals) for q in _next(trace, s, "div") if _is_softmax(trace, q)]
    return _of_quotient(trace, quotients[0]) if quotients else ""


def _of_log(trace: Trace, step: Step) -> str:
    read = list(_before(trace, step))
    if any(s.operation == "det" for s in _before(trace, step, through=("abs",))):
        return "logdet"
    for producer in read:
        inner = {s.operation for s in _before(trace, producer, through=("sum",))}
        if step.operation == "log1p":
            return "softplus" if producer.operation == "exp" else ""
        if producer.operation in ("softmax", "div") and not producer.library:
            return "log_softmax" if producer.operation == "softmax" or _is_softmax(trace, producer) else ""
        if producer.operation == "sub" and inner == {"exp"} and 1.0 in producer.scalars:
            return _INVERSE
        if producer.operation == "sigmoid" or (producer.operation == "sub" and inner == {"sigmoid"}):
            return "log_sigmoid"
        if producer.operation == "sum" and inner == {"exp"}:
            return "logsumexp"
        if producer.operation == "add" and inner == {"exp"} and 1.0 in producer.scalars:
            return "softplus"
    return ""


def _of_quotient(trace: Trace, step: Step) -> str:
    if _is_softmax(trace, step):
        return "log_softmax" if _next(trace, step, "log") else "softmax"
    for producer in _before(trace, step):
        if producer.operation == "add" and 1.0 in producer.scalars:
            return "sigmoid" if {s.operation for s in _before(trace, producer)} == {"exp"} else ""
    return ""


def _is_softmax(trace: Trace, step: Step) -> bool:
    """Return whether a quotient is of an exponential and a sum of exponentials."""
    read = list(_before(trace, step))
    sums = [s for s in read if s.operation == "sum"]
    return any(s.operation == "exp" for s in read) and any(
        s.operation == "exp" for total in sums for s in _before(trace, total, through=("sum",))
    )


def _before(
    trace: Trace, step: Step, *, of: Iterable[int] | None = None, through: Collection[str] = ()
) -> Iterator[Step]:
    """Return the steps that computed what a step read, past those that only move it.

    Args:
        trace, step: the step.
        of: which of the values that it read; by default all.
        through: further operations to go past.
    """
    todo, seen = list(step.inputs if of is None else of), set()
    while todo:
        producer = trace.values[todo.pop()].producer
        if producer is None or producer in seen:
            continue
        seen.add(producer)
        if trace.steps[producer].operation in _CARRYING or trace.steps[producer].operation in through:
            todo += trace.steps[producer].inputs
        else:
            yield trace.steps[producer]


def _next(trace: Trace, step: Step, operation: str) -> list[Step]:
    """Return the forward steps of this name that read what a step computed, past those that only move it."""
    reached, found = set(step.outputs), []
    for s in trace.steps[step.index + 1 :]:
        if s.phase == "forward" and reached.intersection(s.inputs):
            if s.operation == operation:
                found.append(s)
            if s.operation in _CARRYING or s.operation == operation:  # a function may be several steps
                reached.update(s.outputs)
    return found


# Operations that keep an argument of 0 away from the edge, given a small number.
_KEEPING_AWAY = ("add", "clamp", "maximum")


def lost_number(trace: Trace, step: Step, stats: Sequence[TensorStats]) -> str:
    """Describe the small number (eps) that the user gave to keep a forward step from its edge, and that is 0
    in the format of what the step reads; "" if there is none.

    Args:
        trace: has the step.
        step: a forward step.
        stats: what it read.

    Example:
        >>> t = Trace()
        >>> x, s, y = (t.add_value() for _ in range(3))
        >>> _ = t.add_step("add", inputs=[x], outputs=[s], scalars=[1e-8])
        >>> half = TensorStats(dtype="float16", shape=(2,), size=2)
        >>> lost_number(t, t.add_step("rsqrt", inputs=[s], outputs=[y]), [half])
        'the 1e-08 before it is 0 in float16, whose smallest number is 6e-08'
    """
    at = 0 if step.operation == "pow" else -1  # a base, a divisor, the only argument
    dtype = stats[at].dtype if stats else ""
    known = FORMATS.get(dtype)
    if known is None or not step.inputs:
        return ""
    for producer in _before(trace, step, of=[step.inputs[at]], through=("sqrt", "neg")):
        if producer.operation not in _KEEPING_AWAY:
            continue
        small = [s for s in producer.scalars if abs(s) <= known.smallest_subnormal / 2]
        given = [s for s in small if s != 0.0]
        # JAX rounds a number to the format before it can be seen. A clamp at 0 may be meant, but not one of a
        # sum of squares.
        meant = producer.operation != "add" and not _is_sum_of_squares(trace, producer)
        if given or (small and not meant and known.bits <= 16):
            number = f"the {given[0]:g}" if given else "the small number (eps)"
            smallest = f"{known.smallest_subnormal:.0e}"
            return f"{number} before it is 0 in {dtype}, whose smallest number is {smallest}"
    return ""


def _is_sum_of_squares(trace: Trace, clamp: Step) -> bool:
    """Return whether what a step clamps is a sum, or a mean, of squares or magnitudes."""
    for producer in _before(trace, clamp, through=("mean", "sum")):
        twice = producer.operation == "mul" and len(set(producer.inputs)) == 1
        if twice or producer.operation in ("abs", "norm", "pow"):
            return True
    return False


def is_squared(trace: Trace, step: Step) -> bool:
    """Return whether the result of a forward step is squared before anything selects from it: the derivative
    of a square at 0 is 0, whether the square is selected or not."""
    reached = set(step.outputs)
    for s in trace.steps[step.index + 1 :]:
        if s.phase != "forward" or not reached.intersection(s.inputs):
            continue
        twice = s.operation == "mul" and len(s.inputs) == 2 and s.inputs[0] == s.inputs[1]
        if twice or (s.operation == "pow" and any(x > 1.0 for x in s.scalars)):
            return True
        if s.operation in _CARRYING | {"add", "mul", "sub"}:
            reached.update(s.outputs)
    return False
