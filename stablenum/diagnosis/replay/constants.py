"""Constants that are not finite, in arithmetic.

An infinity that is added to scores or selected by a ``where`` is a mask. A constant of +inf that multiplies,
or a plain number of +inf that is added, is none: it is a number beyond the range of its format, such as a
loss scale of 65536 in float16.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from stablenum.diagnosis.replay.operations import MOVING, SELECTING
from stablenum.diagnosis.replay.trace import Step, Trace, Value
from stablenum.formats import FORMATS

__all__ = [
    "InfiniteConstant",
    "constant_of",
    "infinite_constant",
    "infinite_in",
    "is_constant",
    "is_placed_nan",
    "with_constant",
    "writes_infinity",
]

_MULTIPLYING = ("div", "matmul", "mul")
_ADDING = ("add", "sub")
_SPREADING = MOVING - SELECTING | {"cast"}
# What joins all that it reads, and what writes into the first array that it reads.
_JOINING = ("cat", "copy", "stack")
_WRITING = ("index_put", "pad", "scatter")


class InfiniteConstant(NamedTuple):
    """A constant of +inf that a step reads.

    Attributes:
        value: the constant; None for a plain number among the arguments.
        dtype: its format; "" if that is not known.
    """

    value: Value | None
    dtype: str

    def __str__(self) -> str:
        return infinite_in(self.dtype)


def infinite_in(dtype: str) -> str:
    """Describe an infinity in a format.

    Example:
        >>> infinite_in("float16")
        'inf in float16, whose largest number is 65504'
    """
    known = FORMATS.get(dtype)
    return "inf" if known is None else f"inf in {dtype}, whose largest number is {known.max:.5g}"


def infinite_constant(trace: Trace, step: Step) -> InfiniteConstant | None:
    """Return the constant of +inf with which a step computes; None if there is none.

    Example:
        >>> t = Trace()
        >>> x, scale = t.add_value(), t.add_value(flags=(False, True, False), role="constant")
        >>> y = t.add_value(flags=(False, True, False))
        >>> infinite_constant(t, t.add_step("mul", inputs=[x, scale], outputs=[y])) is not None
        True
        >>> infinite_constant(t, t.add_step("where", inputs=[x, scale], outputs=[])) is None
        True
    """
    if step.operation not in (*_MULTIPLYING, *_ADDING):
        return None
    if step.operation in _ADDING and not any(v.posinf for v in trace.outputs_of(step)):
        return None  # x - inf is a mask
    read = trace.inputs_of(step)
    for value in read[:1] if step.operation == "div" else read:
        whole = value.posinf and not value.neginf and not value.nan
        source = constant_of(trace, value) if whole else None
        single = source is not None and source.stats is not None and source.stats.size == 1
        if source is not None and (single or step.operation in _MULTIPLYING):
            return InfiniteConstant(value, source.stats.dtype if source.stats else _named_dtype(source.name))
    stats = next((v.stats for v in trace.outputs_of(step) if v.stats), None)
    dtype = stats.dtype if stats else ""
    largest = FORMATS[dtype].max if dtype in FORMATS else math.inf
    written = any(s > largest or s == math.inf for s in step.scalars) and not any(v.posinf for v in read)
    return InfiniteConstant(None, dtype) if written and step.operation in ("mul", *_ADDING) else None


def with_constant(trace: Trace, step: Step) -> Step:
    """Return the forward step that reads the same constant as its derivative ``step``; else ``step``."""
    forward = None if step.forward is None else trace.steps[step.forward]
    if forward is not None and infinite_constant(trace, forward) is not None:
        return forward
    return step


def is_constant(trace: Trace, value: Value) -> bool:
    """Return whether a value is a number or an array from outside, possibly broadcast."""
    if value.producer is None:
        return True
    step = trace.steps[value.producer]
    moved = step.operation in MOVING - SELECTING
    return moved and all(is_constant(trace, v) for v in trace.inputs_of(step))


def is_placed_nan(trace: Trace, value: Value) -> bool:
    """Return whether a NaN is a constant, possibly broadcast; its origin is the step that lets it into a
    result.

    Libraries return such a NaN where no result is defined (the sample variance of one item). An array into
    which a NaN was written is no constant, but data.
    """
    if value.producer is None:
        return value.role == "constant"
    step = trace.steps[value.producer]
    read = [v for v in trace.inputs_of(step) if v.nan]
    spread = step.operation in MOVING - SELECTING and bool(read) and not _writes_into_data(trace, step)
    return spread and all(is_placed_nan(trace, v) for v in read)


def _writes_into_data(trace: Trace, step: Step) -> bool:
    """Return whether a step puts what it reads among other numbers, which it reads, too."""
    read = trace.inputs_of(step)
    whole = read if step.operation in _JOINING else read[:1] if step.operation in _WRITING else ()
    return any(not v.nan for v in whole)


def writes_infinity(trace: Trace, step: Step) -> bool:
    """Return whether a step puts infinities among other numbers of an array, which it reads, too."""
    read = trace.inputs_of(step)
    among = step.operation in ("copy", "index_put", "scatter") and bool(read) and not read[0].inf
    return among and any(v.inf for v in read)


def constant_of(trace: Trace, value: Value) -> Value | None:
    """Return the constant of which a value is the same numbers, moved or cast; None for another value."""
    while value.producer is not None:
        step = trace.steps[value.producer]
        read = [v for v in trace.inputs_of(step) if v.inf]
        if step.operation not in _SPREADING or writes_infinity(trace, step):
            return None
        if not read:
            return value if trace.places_infinity(step) else None
        value = read[0]
    return value if value.role == "constant" else None


def _named_dtype(name: str) -> str:
    """Return the format in the name of a captured array, such as "captured float32[4]"."""
    return name.removeprefix("captured ").partition("[")[0]
