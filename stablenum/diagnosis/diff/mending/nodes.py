"""What the kinds of change share: numbers and names as they are written, and parts more or less."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import libcst as cst

from stablenum.diagnosis.diff.mending.clues import Clues
from stablenum.diagnosis.edits.tree import dotted

__all__ = [
    "COMMA",
    "EQUAL",
    "MOST_GIVEN",
    "may_be_array",
    "name_of",
    "number",
    "parameters_of",
    "resolved",
    "spelled",
    "value_of",
    "with_last",
    "without",
]

# Of the numbers of the other side, so many are tried where nothing says that one is meant. Chosen.
MOST_GIVEN = 3
EQUAL = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


def number(value: float, *, whole: bool) -> cst.BaseExpression:
    """Return a number as it is written."""
    if value < 0:
        return cst.UnaryOperation(
            cst.Minus(whitespace_after=cst.SimpleWhitespace("")), number(-value, whole=whole)
        )
    if whole and value == int(value):
        return cst.Integer(str(int(value)))
    return cst.Float(repr(float(value)))


def spelled(value: float, clues: Clues) -> cst.BaseExpression:
    """Return a number by a constant of the module if one of its simple forms is it, else as it is written."""
    for name, known in clues.namespace.items():
        if not name.isupper() or isinstance(known, bool) or not isinstance(known, int | float) or known <= 0:
            continue
        if known > _TELLING or known == int(value):
            for form, of in _FORMS:
                if math.isclose(of(float(known)), value, rel_tol=_EXACT):
                    return cst.parse_expression(form.format(name))
    return number(value, whole=value == int(value))


# Constants up to this one are found by chance in forms of others. Chosen.
_TELLING = 2
# Far below what float32 tells apart, and above rounding in float64. Chosen.
_EXACT = 1e-10
_FORMS: tuple[tuple[str, Callable[[float], float]], ...] = (
    ("{}", lambda x: x),
    ("{} ** 0.5", math.sqrt),
    ("1 / {}", lambda x: 1 / x),
    ("{} ** -0.5", lambda x: x**-0.5),
)


def value_of(node: cst.BaseExpression) -> int | float | None:
    """Return the value of a literal number, which may have a sign."""
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
        inner = value_of(node.expression)
        return None if inner is None else -inner
    return node.evaluated_value if isinstance(node, cst.Integer | cst.Float) else None


def resolved(node: cst.BaseExpression, clues: Clues) -> Any:
    """Return what a name with dots means in the module; None if that is not known."""
    name = dotted(node)
    first, *rest = name.split(".") if name else [""]
    found = clues.namespace.get(first)
    for part in rest:
        found = getattr(found, part, None)
    return found


def parameters_of(call: cst.Call, clues: Clues) -> list[inspect.Parameter]:
    """Return the parameters of a function that is called, or of an object of a class that is, if it is
    known."""
    function = resolved(call.func, clues)
    if isinstance(call.func, cst.Call) and inspect.isclass(made := resolved(call.func.func, clues)):
        method = getattr(made, "__call__" if clues.framework == "jax" else "forward", None)
        function = None if method is None else functools.partial(method, None)
    name = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
    if function is None and isinstance(call.func, cst.Attribute) and may_be_array(call.func.value, clues):
        same = getattr(sys.modules.get("jax.numpy"), name, None)  # as a method of an array
        function = functools.partial(same, None) if callable(same) and clues.framework == "jax" else None
    if clues.framework == "torch" and name in _BUILTIN:
        return [
            inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY, default=x) for k, x in _BUILTIN[name].items()
        ]
    with suppress(TypeError, ValueError):
        return [] if function is None else list(inspect.signature(function).parameters.values())
    return []


# What PyTorch's builtin functions, which have no signature, take by name, with its default.
_SPREAD = {"correction": 1, "unbiased": True}
_POOL = {"ceil_mode": False, "count_include_pad": True}
_BUILTIN: Mapping[str, Mapping[str, Any]] = {
    "gelu": {"approximate": "none"}, "std": _SPREAD, "var": _SPREAD, "avg_pool1d": _POOL, "avg_pool2d": _POOL,
    "leaky_relu": {"negative_slope": 0.01}, "elu": {"alpha": 1.0},
}  # fmt: skip


def name_of(module: str, function: str, clues: Clues) -> str:
    """Return how a function of a module is called here; "" if the module has none, or is not imported."""
    found = sys.modules.get(module)
    if found is None or not callable(getattr(found, function, None)):
        return ""
    for name, value in clues.namespace.items():
        if value is found:
            return f"{name}.{function}"
    root, _, rest = module.partition(".")
    return f"{module}.{function}" if clues.namespace.get(root) is sys.modules.get(root) and rest else ""


def may_be_array(node: cst.BaseExpression, clues: Clues) -> bool:
    """Return whether an expression may be an array: no constant, module, function or keyword."""
    if not isinstance(
        node, cst.Name | cst.Attribute | cst.Call | cst.Subscript | cst.BinaryOperation | cst.UnaryOperation
    ):
        return False
    if isinstance(node, cst.Name) and node.value in ("True", "False", "None", "self"):
        return False
    if value_of(node) is not None:
        return False
    if isinstance(node, cst.Name) and (held := clues.held.get(node.value)) is not None and held.kind:
        return held.kind == "array"
    known = resolved(node, clues) if dotted(node) else None
    return not (inspect.ismodule(known) or callable(known) or isinstance(known, str | int | float | tuple))


def with_last(args: Sequence[cst.Arg], new: cst.Arg) -> list[cst.Arg]:
    """Return arguments with one more, which takes over how they end."""
    if not args:
        return [new]
    last = args[-1]
    behind = new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    plain = last.with_changes(comma=COMMA, whitespace_after_arg=cst.SimpleWhitespace(""))
    return [*args[:-1], plain, behind]


def without(parts: Sequence[Any], index: int) -> list[Any]:
    found = [p for i, p in enumerate(parts) if i != index]
    if found and index == len(parts) - 1:
        found[-1] = found[-1].with_changes(comma=parts[index].comma)
    return found
