"""The text of an operation on single elements in Triton's language, rounded as IEEE 754 and NumPy do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from stablenum_torch._devices.recorded_operations import Operation

__all__ = [
    "ELEMENTWISE", "MAXIMUM", "MINIMUM", "Template", "UnprintableError",
    "as_tensor", "constant", "operands", "type_of",
]  # fmt: skip

# Of an operation and the texts of its operands.
Template: TypeAlias = Callable[[Operation, list[str]], str]


class UnprintableError(Exception):
    """The decision has an operation that a kernel cannot carry out bit for bit."""


MINIMUM = "tl.where(({0} <= {1}) | ({0} != {0}), {0}, {1})"
MAXIMUM = "tl.where(({0} >= {1}) | ({0} != {0}), {0}, {1})"


def operands(op: Operation) -> tuple[Any, ...]:
    """Return the arguments that have elements."""
    return op.args[:1] if op.name == "astype" else op.args  # the other one is a type


def type_of(sample: Any) -> str:
    """Return Triton's name of the format of a number."""
    kind = np.asarray(sample).dtype
    names = {"float32": "tl.float32", "int32": "tl.int32", "int64": "tl.int64", "bool": "tl.int1"}
    if kind.name not in names:
        raise UnprintableError(f"a number of the format {kind.name}")
    return names[kind.name]


def constant(value: Any) -> str:
    """Return the text of a constant, in float32 if it has a fraction; of an array, that of its one value."""
    if isinstance(value, np.ndarray) and value.ndim:
        if not value.size or not (value == value.flat[0]).all():
            raise UnprintableError("an array of different constants")
        value = value.flat[0]
    if isinstance(value, (bool, np.bool_)):
        return "True" if value else "False"
    if isinstance(value, (int, np.integer)):
        return repr(int(value))
    if not isinstance(value, (float, np.floating, np.ndarray)):
        raise UnprintableError(f"a constant {value!r}")
    rounded = float(np.float32(value))
    return repr(rounded) if np.isfinite(rounded) else f"float('{rounded}')"


def as_tensor(text: str) -> str:
    """Return the text of a number that may be a constant as that of a tensor, which some functions want."""
    is_constant = text.startswith("float(") or text.lstrip("-")[:1].isdigit()
    return f"tl.full([], {text}, tl.float32)" if is_constant else text


def _infix(sign: str) -> Template:
    def text(op: Operation, args: list[str]) -> str:
        return f"({args[0]} {sign} {args[1]})"

    return text


def _logical(sign: str) -> Template:
    def text(op: Operation, args: list[str]) -> str:
        if "True" in args or "False" in args:
            other = args[1] if args[0] in ("True", "False") else args[0]
            known = "True" in args
            return other if known == (sign == "&") else str(known)
        return f"({args[0]} {sign} {args[1]})"

    return text


def _divided(op: Operation, args: list[str]) -> str:
    if np.asarray(op.result.sample).dtype != np.float32:
        raise UnprintableError("a quotient of whole numbers")
    return f"tl.div_rn({as_tensor(args[0])}, {as_tensor(args[1])})"


def _chosen(op: Operation, args: list[str]) -> str:
    condition, a, b = args
    if condition in ("True", "False"):
        condition = f"tl.full([], {condition}, tl.int1)"
    return f"tl.cast(tl.where({condition}, {a}, {b}), {type_of(op.result.sample)})"


def _cast(op: Operation, args: list[str]) -> str:
    return f"tl.cast({args[0]}, {type_of(op.result.sample)})"


def _formatted(template: str) -> Template:
    def text(op: Operation, args: list[str]) -> str:
        return template.format(*args)

    return text


_SIGNS = {"add": "+", "sub": "-", "mul": "*"}
_SIGNS |= {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
ELEMENTWISE: dict[str, Template] = {
    **{name: _infix(sign) for name, sign in _SIGNS.items()},
    "and": _logical("&"),
    "or": _logical("|"),
    "floordiv": _infix("//"),  # of counts, which are not negative
    "truediv": _divided,
    "where": _chosen,
    "minimum": _formatted(MINIMUM),
    "maximum": _formatted(MAXIMUM),
    "isfinite": _formatted("(tl.abs({0}) < float('inf'))"),
    "isnan": _formatted("({0} != {0})"),
    "logical_not": _formatted("({0} == 0)"),
    "abs": _formatted("tl.abs({0})"),
    "neg": _formatted("(-{0})"),
    "floor": _formatted("tl.floor({0})"),
    "sqrt": _formatted("tl.sqrt_rn({0})"),
    "astype": _cast,
}
