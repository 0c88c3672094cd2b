"""How a safe function is called on the arguments of the operation in whose place it is recommended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from stablenum.diagnosis.replay.findings import Finding

__all__ = ["Read", "Trial", "trial_of"]


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
        options: keyword arguments; "axis" is the framework's word for an axis.
    """

    name: str
    arrays: int
    numbers: tuple[float, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012  (never changed)


_ONE = (
    "numerics.arccos", "numerics.arctanh", "numerics.log", "numerics.log_sigmoid", "numerics.reciprocal",
    "numerics.rsqrt", "numerics.softplus", "numerics.sqrt",
)  # fmt: skip
_TWO = ("numerics.arctan2", "numerics.logaddexp", "numerics.xlogy")
_ROWS = (
    "numerics.log_softmax", "numerics.logsumexp", "numerics.norm", "numerics.normalize", "numerics.softmax",
    "numerics.std", "numerics.variance",
)  # fmt: skip
# The operation that reads the argument of a function that was written by hand.
_FIRST_OF = {
    "softplus": "exp", "logsumexp": "exp", "softmax": "exp", "log_softmax": "softmax",
    "log_sigmoid": "sigmoid",
}  # fmt: skip


# Operations whose names are not in those of the frameworks' primitives.
_PRIMITIVES = {"arctanh": "atanh", "normalize": "div"}


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
    if _PRIMITIVES.get(expected, expected) not in primitive:
        return None
    if finding.operation == "pow" and name == "numerics.log":  # in a form for two arrays
        return None
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
        return Trial(name, 1, (), {"axis": -1})
    return None
