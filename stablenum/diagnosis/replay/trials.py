"""Try the safe function that a report recommends, on the arguments of the operation that failed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from stablenum.diagnosis.replay.findings import Finding
from stablenum.diagnosis.replay.judge import Evidence, judge
from stablenum.diagnosis.replay.remedies import options_of

__all__ = ["Read", "Trial", "trial_of", "with_trial"]


class Read(NamedTuple):
    """What the user's operation read: its framework's name, and the arrays."""

    primitive: str
    arrays: Sequence[Any]


class Trial(NamedTuple):
    """A call to try.

    Attributes:
        name: the function, such as "numerics.log".
        arrays: how many of the arrays that the operation read are its arguments, from the first.
        numbers: plain numbers after the arrays.
        options: keyword arguments; "axis" and "keepdims" stand for the framework's words.
    """

    name: str
    arrays: int
    numbers: tuple[float, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012  (never changed)


def with_trial(
    evidence: Evidence,
    read: Read | None,
    *,
    package: str,
    floating: Callable[[Sequence[Any]], list[Any]],
    finite: Callable[[Any], bool],
    evaluate: Callable[[Callable[..., Any], list[Any], Trial], Iterable[Any]],
    exp: Callable[[Any], Any],
) -> Evidence:
    """Return the evidence with what came of the safe function, in value and derivative; with the reason, if
    the function cannot be tried.

    Args:
        evidence: what a replay found.
        read: what the first finding's operation read; None if it was not kept.
        package: the adapter, which has the safe function.
        floating: returns those of the arrays that have floating-point numbers.
        finite: whether all numbers in an array are finite.
        evaluate: returns the value and the derivatives of the function for these arrays.
        exp: the framework's exponential.
    """
    verdict = judge(evidence)
    if not verdict.safe_function or evidence.first is None:
        return replace(evidence, untried="it is not a change of one expression")
    if read is None:
        return replace(evidence, untried="what the operation read is no longer known")
    arrays = floating(read.arrays)
    part, name = verdict.safe_function.split(".")[-2:]
    trial = trial_of(f"{part}.{name}", evidence.first, read.primitive, [tuple(x.shape) for x in arrays])
    if trial is None:
        return replace(evidence, untried="the operation is only a part of what the function would replace")
    # What is not finite already (a mask) has no finite derivative to look for.
    if not all(map(finite, arrays[: trial.arrays])):
        return replace(evidence, untried="what the operation read is already non-finite")
    function = getattr(importlib.import_module(f"{package}.{part}"), name)
    if trial.name == POWER_OF_ARRAYS:
        function = _power_of_arrays(function, exp)
    try:
        found = list(evaluate(function, arrays[: trial.arrays], trial))
    except (TypeError, ValueError, RuntimeError):
        return replace(evidence, tried="raises")
    return replace(evidence, tried="finite" if all(map(finite, found)) else "not finite")


def _power_of_arrays(log: Callable[[Any], Any], exp: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: exp(y * log(x))


# Stands for the function that is recommended for a power of two arrays.
POWER_OF_ARRAYS = "a power of arrays"

_ONE = (
    "numerics.arccos", "numerics.arctanh", "numerics.log", "numerics.log_sigmoid", "numerics.reciprocal",
    "numerics.rsqrt", "numerics.softplus", "numerics.sqrt",
)  # fmt: skip
_TWO = ("numerics.arctan2", "numerics.logaddexp", "numerics.xlogy")
_ROWS = (
    "numerics.log_softmax", "numerics.logsumexp", "numerics.norm", "numerics.normalize", "numerics.rms_norm",
    "numerics.softmax", "numerics.std", "numerics.variance",
)  # fmt: skip
# The operation that reads the argument of a function that was written by hand.
_FIRST_OF = {
    "softplus": "exp", "logsumexp": "exp", "softmax": "exp", "log_softmax": "softmax",
    "log_sigmoid": "sigmoid", "normalize": "div", "rms_norm": "div",
}  # fmt: skip


# Operations whose names are not in those of the frameworks' primitives.
_PRIMITIVES = {
    "arctanh": ("atanh",), "normalize": ("div", "normalize"), "pow": ("pow", "square"), "var": ("var",),
    "reciprocal": ("reciprocal", "integer_pow"),
}  # fmt: skip


def trial_of(name: str, finding: Finding, primitive: str, shapes: Sequence[tuple[int, ...]]) -> Trial | None:
    """Return how to call a safe function on what the operation read; None if that is not known.

    Args:
        name: the function, such as "numerics.log".
        finding: the operation.
        primitive: the framework's name for the operation; a part of a larger function has another name.
        shapes: the shapes of the floating-point arrays that it read.

    Example:
        >>> f = Finding(operation="pow", phase="forward", kind="nan", scalars=(0.5,))
        >>> trial_of("numerics.power", f, "aten.pow.Tensor_Scalar", [(3,)])
        Trial(name='numerics.power', arrays=1, numbers=(0.5,), options={})
    """
    expected = _FIRST_OF.get(finding.by_hand, "") if finding.by_hand else finding.operation
    if finding.by_hand and finding.operation != expected:
        return None  # what it read is not the function's argument
    if not any(known in primitive for known in _PRIMITIVES.get(expected, (expected,))):
        return None
    if finding.operation == "pow" and name == "numerics.log":  # in a form for two arrays
        return Trial(POWER_OF_ARRAYS, 2) if len(shapes) == 2 else None
    if name in _ONE and len(shapes) == 1:
        return Trial(name, 1)
    if name in _TWO and len(shapes) == 2:
        return Trial(name, 2)
    if name == "numerics.power" and len(finding.scalars) == 1 and len(shapes) >= 1:
        return Trial(name, 1, finding.scalars)
    if name == "numerics.divide" and len(shapes) == 2:
        return Trial(name, 2)
    if name == "numerics.divide" and len(shapes) == 1 and len(finding.scalars) == 1:
        return Trial(name, 1, finding.scalars)
    if name in _ROWS and len(shapes) >= 1 and shapes[0]:
        return Trial(name, 1, (), options_of(name, finding) or {"axis": -1})
    return None
