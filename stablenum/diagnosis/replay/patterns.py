"""Functions that the user wrote by hand, out of operations that overflow or underflow on the way."""

from __future__ import annotations

from collections.abc import Iterator

from stablenum.diagnosis.replay.operations import MOVING, SELECTING
from stablenum.diagnosis.replay.trace import Step, Trace

__all__ = ["by_hand"]

_CARRYING = MOVING - SELECTING | {"cast"}


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
    if step.operation in ("log", "log1p"):
        return _of_log(trace, step)
    if step.operation in ("div", "reciprocal"):
        return _of_quotient(trace, step)
    return ""


def _of_exp(trace: Trace, step: Step) -> str:
    if _next(trace, step, "log1p"):
        return "softplus"
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
    for producer in read:
        inner = {s.operation for s in _before(trace, producer)}
        if step.operation == "log1p":
            return "softplus" if producer.operation == "exp" else ""
        if producer.operation in ("softmax", "div"):
            return "log_softmax" if producer.operation == "softmax" or _is_softmax(trace, producer) else ""
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
        s.operation == "exp" for total in sums for s in _before(trace, total)
    )


def _before(trace: Trace, step: Step) -> Iterator[Step]:
    """Return the steps that computed what a step read, past those that only move it."""
    todo, seen = list(step.inputs), set()
    while todo:
        producer = trace.values[todo.pop()].producer
        if producer is None or producer in seen:
            continue
        seen.add(producer)
        if trace.steps[producer].operation in _CARRYING:
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
            if s.operation in _CARRYING:
                reached.update(s.outputs)
    return found
