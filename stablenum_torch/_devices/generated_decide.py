"""Generate ``decide`` for one configuration: a Python function without the calls inside ``decide``.

The promise is that, on a model of 10 k parameters on a CPU, the guard adds less to a step than ``GradScaler``
and clipping do. ``make bench`` measures this in the row ``torch adamw fused 10k/10 float32`` and fails when
the promise is broken (``benchmarks/steps/promises.py``).

``decide`` consists of about a hundred calls of small functions, which take most of its time on a CPU. The
generated function consists of the recorded operations alone: unused results are dropped, and ``where`` on a
single number becomes a branch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stablenum_torch._devices.recorded_operations import (
    Operation,
    Recording,
    Value,
    has_value,
    sample_of,
)

__all__ = ["written_function"]

_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "and": "&", "or": "|", "xor": "^", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
# The Python expression for each operation on single numbers; it gives the same result as in `scalars`.
_OF_SCALARS = {
    "minimum": "{0} if {0} <= {1} or {0} != {0} else {1}",
    "maximum": "{0} if {0} >= {1} or {0} != {0} else {1}",
    "isfinite": "isfinite({0})",
    "isnan": "isnan({0})",
    "logical_not": "not {0}",
}
_OF_ANY = {"getitem": "{0}[{1}]", "neg": "-{0}", "abs": "abs({0})", "invert": "~{0}"}


def written_function(recording: Recording, results: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
    """Return a function of all inputs of a recording that returns ``results`` (values and constants) as a
    tuple.

    Example:
        >>> xp = Recording()
        >>> x = xp.input(np.float32(2.0))
        >>> function = written_function(xp, [xp.where(x > 1, x * 2, x)])
        >>> float(function(np.float32(3.0))[0]), float(function(np.float32(0.5))[0])
        (6.0, 0.5)
    """
    names = _Names()
    body = [f"    {op.result.name} = {_expression(op, names)}" for op in recording.needed(results)]
    returned = ", ".join(map(names.of, results))
    source = [f"def written({', '.join(recording.inputs)}):", *body, f"    return ({returned},)"]
    scope = names.constants
    exec("\n".join(source), scope)  # the text is generated above, from the core's own operations only
    made: Callable[..., tuple[Any, ...]] = scope["written"]
    return made


class _Names:
    """The names of values and constants in the text.

    Attributes:
        constants: name -> constant.
    """

    def __init__(self) -> None:
        self.constants: dict[str, Any] = {"isfinite": math.isfinite, "isnan": math.isnan}
        self._known: dict[int, str] = {}

    def of(self, arg: Any) -> str:
        if isinstance(arg, Value):
            return arg.name
        if isinstance(arg, (list, tuple)) and has_value(arg):
            return f"[{', '.join(map(self.of, arg))}]"
        if id(arg) not in self._known:
            self._known[id(arg)] = f"c{len(self._known)}"
            self.constants[self._known[id(arg)]] = arg  # keeps the object alive, so its id stays unique
        return self._known[id(arg)]


def _expression(op: Operation, names: _Names) -> str:
    args, samples = list(map(names.of, op.args)), list(map(sample_of, op.args))
    if op.name in _SIGNS:
        return f"{args[0]} {_SIGNS[op.name]} {args[1]}"
    if op.name in _OF_ANY:
        return _OF_ANY[op.name].format(*args)
    if op.name == "where":
        alike = np.shape(samples[1]) == np.shape(samples[2])
        if isinstance(samples[0], (bool, np.bool_)) and alike:
            return f"{args[1]} if {args[0]} else {args[2]}"
    elif op.name in _OF_SCALARS and not op.kwargs and not any(isinstance(s, np.ndarray) for s in samples):
        return _OF_SCALARS[op.name].format(*args)
    keywords = "".join(f", {key}={names.of(value)}" for key, value in op.kwargs.items())
    return f"{names.of(op.function)}({', '.join(args)}{keywords})"
