"""The kinds of change of one expression: each is a small mistake, turned back."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import libcst as cst

from stablenum.diagnosis.diff.mending.clues import Clues
from stablenum.diagnosis.edits.tree import atom, code_of, dotted

__all__ = ["OPERATORS", "Operator", "shows_number"]

Operator = Callable[[cst.BaseExpression, Clues], Iterator[cst.BaseExpression]]

# Whole numbers up to this one may be axes, offsets and counts, which are often off by one. Chosen.
_SMALL = 4
# Of the numbers of the other side, so many are tried where nothing says that one is meant, and so many where
# only this side has the number that stands there. Chosen.
_MOST_GIVEN, _MOST_NUMBERS = 3, 8
# So many variables, the nearest ones, may be meant by another one. Chosen.
_MOST_VARIABLES = 6
# Functions that are taken for one another.
_FAMILIES = tuple(
    frozenset(words.split())
    for words in (
        "relu gelu silu swish tanh sigmoid softplus elu leaky_relu hard_swish hardswish relu6 celu selu mish",
        "mean sum max min amax amin prod std var median logsumexp nanmean",
        "softmax log_softmax sigmoid log_sigmoid logsigmoid",
        "sin cos tan", "exp exp2 expm1", "log log1p log2 log10", "sqrt rsqrt square abs cbrt",
        "floor ceil round trunc", "argmax argmin", "tril triu", "zeros ones", "zeros_like ones_like",
        "repeat tile", "maximum minimum", "cumsum cumprod", "any all", "concatenate stack cat",
        "avg_pool max_pool avg_pool2d max_pool2d", "adam adamw nadam nadamw radam amsgrad lion", "trace ema",
        "clip_by_global_norm clip clip_by_block_rms", "argsort sort", "floor_divide divide true_divide",
    )
)  # fmt: skip
_PADDINGS = ("SAME", "VALID", "CIRCULAR", "CAUSAL")
_STRINGS = (
    _PADDINGS, ("mean", "sum", "none"),
    ("nearest", "bilinear", "linear", "bicubic", "cubic"),
    ("constant", "reflect", "edge", "wrap", "symmetric"),
    ("tanh", "none"), ("fan_in", "fan_out", "fan_avg"),
)  # fmt: skip
_BINARY: Mapping[type[cst.BaseBinaryOp], tuple[type[cst.BaseBinaryOp], ...]] = {
    cst.Add: (cst.Subtract,),
    cst.Subtract: (cst.Add,),
    cst.Multiply: (cst.Divide,),
    cst.Divide: (cst.Multiply,),
    cst.FloorDivide: (cst.Divide,),
    cst.BitAnd: (cst.BitOr,),
    cst.BitOr: (cst.BitAnd,),
}
_COMPARED: Mapping[type[cst.BaseCompOp], tuple[type[cst.BaseCompOp], ...]] = {
    cst.LessThan: (cst.LessThanEqual, cst.GreaterThan, cst.GreaterThanEqual),
    cst.LessThanEqual: (cst.LessThan, cst.GreaterThanEqual, cst.GreaterThan),
    cst.GreaterThan: (cst.GreaterThanEqual, cst.LessThan, cst.LessThanEqual),
    cst.GreaterThanEqual: (cst.GreaterThan, cst.LessThanEqual, cst.LessThan),
    cst.Equal: (cst.NotEqual,),
    cst.NotEqual: (cst.Equal,),
}
_ORDERED = (cst.Subtract, cst.Divide, cst.MatrixMultiply, cst.Power, cst.FloorDivide, cst.Modulo)


# --- numbers and words -------------------------------------------------------------------------------------


def numbers(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """Another number: one of the other side, or one next to it."""
    if isinstance(node, cst.Name) and node.value in ("True", "False"):
        yield cst.Name("False" if node.value == "True" else "True")
    value = _value(node)
    if value is None:
        return
    whole, old = isinstance(value, int), clues.is_old(value)
    near = [value + 1, value - 1, -value, 0, 1, -1] if whole and abs(value) <= _SMALL else []
    given = [n for n in clues.near(value) if not whole or n == int(n) or old][:_MOST_NUMBERS]
    near, given = (near, given) if whole and not old else ([], [*given, *near])
    turned = [
        back(n)
        for forth, back in _TURNS
        if not whole and value > 0 and clues.is_old(forth(float(value)))
        for n in clues.new
        if n > 0
    ]
    found = dict.fromkeys(n for n in (*turned, *near, *given) if n != value)
    yield from (number(n, whole=whole) for n in found)


# What a program computes with may be made of what its author wrote, such as 1 - 0.9.
_TURNS: tuple[tuple[Callable[[float], float], Callable[[float], float]], ...] = (
    (lambda x: 1 - x, lambda y: round(1 - y, 12)),
    (lambda x: 1 / x, lambda y: 1 / y),
    (math.sqrt, lambda y: y * y),
)


def words(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """Another string, as of a padding or a method."""
    if not isinstance(node, cst.SimpleString):
        return
    if node.evaluated_value in _PADDINGS:
        yield from _paddings(clues)
    value = node.evaluated_value
    kin = [w for some in _STRINGS if value in some for w in some]
    for word in dict.fromkeys((*(kin and clues.strings), *kin)):
        if word != value and isinstance(word, str) and word.isidentifier():
            yield cst.SimpleString(f'"{word}"')


def _paddings(clues: Clues) -> Iterator[cst.BaseExpression]:
    """Yield paddings as numbers: one, and the same at both ends of two axes or of one."""
    given = [int(n) for n in clues.said if n == int(n) and 0 <= n <= _SMALL]
    for n in dict.fromkeys((*given, 1, 0, 2)):
        yield cst.Integer(str(n))
        yield cst.parse_expression(f"(({n}, {n}), ({n}, {n}))")
        yield cst.parse_expression(f"(({n}, {n}),)")


def keywords(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """A keyword argument that is given, or left out."""
    if not isinstance(node, cst.Call) or any(a.star for a in node.args):
        return
    given = {a.keyword.value for a in node.args if a.keyword is not None}
    count = len(node.args) - len(given)
    for i, parameter in enumerate(_parameters(node, clues)):
        name, default = parameter.name, parameter.default
        if i < count and parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        if name in given or default is parameter.empty:
            continue
        for value in _instead_of(default, name, clues):
            yield node.with_changes(args=_with_last(node.args, cst.Arg(value, cst.Name(name), _EQUAL)))
    for i, argument in enumerate(node.args):
        if argument.keyword is not None:
            yield node.with_changes(args=_without(node.args, i))


_EQUAL = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
_COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


def _instead_of(default: Any, name: str, clues: Clues) -> Iterator[cst.BaseExpression]:
    """Yield what may be given in place of a default."""
    if isinstance(default, bool):
        yield cst.Name(str(not default))
    elif isinstance(default, int | float):
        whole = isinstance(default, int)
        old = clues.is_old(default)
        known = [n for n in clues.near(default) if n != default and (not whole or n == int(n))]
        near = [default + 1, default - 1] if whole and abs(default) <= _SMALL else []
        most = _MOST_NUMBERS if old else _MOST_GIVEN
        yield from (number(n, whole=whole) for n in dict.fromkeys((*known[:most], *near)))
    elif isinstance(default, str):
        kin = [w for some in _STRINGS if default in some for w in some if w != default]
        yield from (cst.SimpleString(f'"{w}"') for w in kin)
    elif default is None and "axis" in name:
        yield from (number(n, whole=True) for n in (-1, 0, 1))
    elif default is None and "mask" in name:
        yield from (cst.Name(n) for n in clues.unused)


def functions(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """Another function of the same module, or one of the file's own that nothing in it calls."""
    if not isinstance(node, cst.Attribute | cst.Name):
        return
    if callable(_resolved(node, clues)):
        yield from (cst.Name(name) for name in clues.unused)
    name = node.attr.value if isinstance(node, cst.Attribute) else node.value
    kin = [w for some in _FAMILIES if name in some for w in sorted(some) if w != name]
    for other in dict.fromkeys((*(f for f in clues.functions if f in kin), *kin)):
        if isinstance(node, cst.Name):
            if other in clues.namespace:
                yield cst.Name(other)
        elif _resolved(node.value, clues) is None or hasattr(_resolved(node.value, clues), other):
            yield node.with_changes(attr=cst.Name(other))


def variables(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """Another variable, or a size divided by a constant of the module."""
    if not isinstance(node, cst.Name) or node.value in ("True", "False", "None", "self"):
        return
    known = clues.namespace.get(node.value)
    if callable(known) or inspect.ismodule(known):
        return
    yield from (cst.Name(n) for n in clues.variables[:_MOST_VARIABLES] if n != node.value)
    for name in clues.sizes:
        if name != node.value:
            yield cst.Name(name)
            yield cst.BinaryOperation(cst.Name(node.value), cst.FloorDivide(), cst.Name(name))


# --- order -------------------------------------------------------------------------------------------------


def exchanges(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """Two operands, arguments or entries the other way round."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, _ORDERED):
        yield node.with_changes(left=atom(node.right), right=atom(node.left))
    elif isinstance(node, cst.IfExp):
        yield node.with_changes(body=node.orelse, orelse=node.body)
    elif isinstance(node, cst.Call):
        yield from (node.with_changes(args=some) for some in _swapped(node.args, "value"))
    elif isinstance(node, cst.Tuple | cst.List):
        yield from (node.with_changes(elements=some) for some in _swapped(node.elements, "value"))
    elif isinstance(node, cst.Subscript):
        yield from (node.with_changes(slice=some) for some in _swapped(node.slice, "slice"))


def _swapped(parts: Sequence[Any], name: str) -> Iterator[list[Any]]:
    """Yield some parts with two of them exchanged, those that are next to each other first."""
    pairs = [(i, j) for j in range(len(parts)) for i in range(j) if parts[j] is not parts[i]]
    for i, j in sorted(pairs, key=lambda p: p[1] - p[0]):
        a, b = parts[i], parts[j]
        if any(getattr(p, "keyword", None) is not None or getattr(p, "star", "") for p in (a, b)):
            continue
        one, other = getattr(a, name), getattr(b, name)
        if code_of(one) == code_of(other):
            continue
        found = list(parts)
        found[i], found[j] = a.with_changes(**{name: other}), b.with_changes(**{name: one})
        yield found


def moves(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """An operand inside a call that was outside, or the inverse; and the same for a product and a sum."""
    if isinstance(node, cst.Call) and node.args and isinstance(node.args[0].value, cst.BinaryOperation):
        inside = node.args[0].value
        for part, rest in ((inside.left, inside.right), (inside.right, inside.left)):
            first = node.args[0].with_changes(value=part)
            call = node.with_changes(args=[first, *node.args[1:]])
            operands = (call, atom(rest)) if part is inside.left else (atom(rest), call)
            yield cst.BinaryOperation(operands[0], inside.operator, operands[1])
    if not isinstance(node, cst.BinaryOperation):
        return
    yield from _moved_in(node.operator, node.left, node.right, first=True)
    yield from _moved_in(node.operator, node.right, node.left, first=False)


def _moved_in(
    operator: cst.BaseBinaryOp, inner: cst.BaseExpression, rest: cst.BaseExpression, *, first: bool
) -> Iterator[cst.BaseExpression]:
    """Yield an operand moved into what it is combined with, which is its first operand if ``first``: into a
    call, or (a + b) * c as a + b * c."""

    def combined(part: cst.BaseExpression) -> cst.BaseExpression:
        a, b = (part, rest) if first else (rest, part)
        return cst.BinaryOperation(atom(a), operator, atom(b))

    if isinstance(inner, cst.Call) and inner.args and not inner.args[0].star:
        changed = inner.args[0].with_changes(value=combined(inner.args[0].value))
        yield inner.with_changes(args=[changed, *inner.args[1:]])
    elif isinstance(inner, cst.BinaryOperation) and first:
        yield cst.BinaryOperation(inner.left, inner.operator, atom(combined(inner.right)))
    elif isinstance(inner, cst.BinaryOperation):
        yield cst.BinaryOperation(atom(combined(inner.left)), inner.operator, inner.right)


def operators(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """Another operator or comparison."""
    if isinstance(node, cst.BinaryOperation):
        for other in _BINARY.get(type(node.operator), ()):
            yield node.with_changes(operator=_like(node.operator, other))
    elif isinstance(node, cst.Comparison) and len(node.comparisons) == 1:
        target = node.comparisons[0]
        for kind in _COMPARED.get(type(target.operator), ()):
            changed = target.with_changes(operator=_like(target.operator, kind))
            yield node.with_changes(comparisons=[changed])


def _like(old: Any, kind: Any) -> Any:
    return kind(whitespace_before=old.whitespace_before, whitespace_after=old.whitespace_after)


# --- more and less -----------------------------------------------------------------------------------------


def drops(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """A call, an operand, an index, a sign or an entry less, or all that is done to one variable."""
    if isinstance(node, cst.Call):
        first = next((a.value for a in node.args[:1] if a.keyword is None and not a.star), None)
        if isinstance(node.func, cst.Attribute) and _resolved(node.func.value, clues) is None:
            yield node.func.value
        if first is not None:
            yield first
        if len(node.args) > 1:
            yield from (
                node.with_changes(args=_without(node.args, i))
                for i, a in enumerate(node.args)
                if a.keyword is None
            )
    elif isinstance(node, cst.BinaryOperation):
        yield from (node.left, node.right)
    elif isinstance(node, cst.UnaryOperation):
        yield node.expression
    elif isinstance(node, cst.Subscript) or (
        isinstance(node, cst.Attribute) and node.attr.value in ("T", "mT")
    ):
        yield node.value
    elif isinstance(node, cst.Tuple | cst.List) and len(node.elements) > 1:
        for i in range(len(node.elements)):
            yield node.with_changes(elements=_without(node.elements, i))
    if isinstance(node, cst.Call | cst.BinaryOperation):
        yield from _variables(node, clues)


def _variables(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """Yield the variables in an expression that may be arrays, each once."""
    found, waiting = dict[str, cst.BaseExpression](), list[cst.CSTNode]([node])
    while waiting:
        inner = waiting.pop(0)
        if isinstance(inner, cst.Name) and _is_array(inner, clues):
            found.setdefault(inner.value, inner.with_changes(lpar=[], rpar=[]))
        skipped = inner.attr if isinstance(inner, cst.Attribute) else None
        skipped = inner.keyword if isinstance(inner, cst.Arg) else skipped
        waiting += [child for child in inner.children if child is not skipped]
    yield from found.values()


def stops(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """An expression through which no gradient passes."""
    if not _is_array(node, clues) or any(True for _ in unstops(node, clues)):
        return
    if clues.framework == "torch":
        yield cst.Call(cst.Attribute(atom(node), cst.Name("detach")))
        return
    name = _named("jax.lax", "stop_gradient", clues)
    if name:
        yield cst.Call(cst.parse_expression(name), [cst.Arg(node)])


def unstops(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """An expression through which a gradient passes that was stopped."""
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
        return
    name = node.func.attr.value
    if name == "stop_gradient" and len(node.args) == 1:
        yield node.args[0].value
    elif name == "detach" and not node.args:
        yield node.func.value


def straight_through(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """An expression whose gradient is that of another variable, x + stop(node - x)."""
    if not _is_array(node, clues):
        return
    for name in clues.variables:
        if name != code_of(node):
            inner = cst.BinaryOperation(atom(node), cst.Subtract(), cst.Name(name))
            for stopped in stops(inner, clues):
                yield cst.BinaryOperation(cst.Name(name), cst.Add(), stopped)


def turns(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """An expression transposed, flipped, or as its negation."""
    if not _is_array(node, clues):
        return
    own = atom(node)
    yield cst.Attribute(own, cst.Name("T"))
    for a, b in ((-1, -2), (1, 2)):
        yield cst.Call(
            cst.Attribute(own, cst.Name("swapaxes")),
            [cst.Arg(number(a, whole=True), comma=_COMMA), cst.Arg(number(b, whole=True))],
        )
    if clues.framework == "torch":
        yield from (cst.parse_expression(f"{code_of(own)}.flip({axis})") for axis in (0, 1, -1))
    else:
        yield from (
            cst.parse_expression(f"{code_of(own)}{cut}") for cut in ("[::-1]", "[:, ::-1]", "[..., ::-1]")
        )
    yield cst.UnaryOperation(cst.Minus(whitespace_after=cst.SimpleWhitespace("")), own)


def wraps(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """A function of the other side around an expression, and a number by which it is multiplied, divided or
    moved."""
    if not _is_array(node, clues):
        return
    modules = ("jax.nn", "jax.numpy") if clues.framework == "jax" else ("torch", "torch.nn.functional")
    for function in clues.functions:
        name = next((n for m in modules if (n := _named(m, function, clues))), "")
        if name:
            yield cst.Call(cst.parse_expression(name), [cst.Arg(node)])
    own = atom(node)
    if clues.ratio:
        yield cst.BinaryOperation(
            own, cst.Multiply(), number(clues.ratio, whole=clues.ratio == int(clues.ratio))
        )
    for given in clues.said[:_MOST_GIVEN]:
        for operator in (cst.Multiply(), cst.Divide(), cst.Add()):
            yield cst.BinaryOperation(own, operator, number(given, whole=True))
    yield cst.BinaryOperation(own, cst.Power(), cst.Integer("2"))
    yield cst.BinaryOperation(own, cst.Add(), cst.Integer("1"))
    yield cst.BinaryOperation(own, cst.Subtract(), cst.Integer("1"))


OPERATORS: Mapping[str, Operator] = {
    "number": numbers,
    "word": words,
    "keyword": keywords,
    "function": functions,
    "variable": variables,
    "exchange": exchanges,
    "operator": operators,
    "drop": drops,
    "move": moves,
    "unstop": unstops,
    "stop": stops,
    "straight_through": straight_through,
    "turn": turns,
    "wrap": wraps,
}


def shows_number(kind: str, node: cst.BaseExpression, clues: Clues) -> bool:
    """Return whether a number that only this side computes with stands in an expression, or is the default of
    a parameter that it does not give."""
    if kind == "number":
        value = _value(node)
        return value is not None and any(clues.is_old(forth(float(value))) for forth in _forms(float(value)))
    if kind != "keyword" or not isinstance(node, cst.Call):
        return False
    given = {a.keyword.value for a in node.args if a.keyword is not None}
    return any(
        isinstance(p.default, float) and p.name not in given and clues.is_old(p.default)
        for p in _parameters(node, clues)
    )


def _forms(value: float) -> list[Callable[[float], float]]:
    return [lambda x: x, *(forth for forth, _ in _TURNS if value > 0)]


# --- helpers -----------------------------------------------------------------------------------------------


def number(value: float, *, whole: bool) -> cst.BaseExpression:
    """Return a number as it is written."""
    if value < 0:
        return cst.UnaryOperation(
            cst.Minus(whitespace_after=cst.SimpleWhitespace("")), number(-value, whole=whole)
        )
    if whole and value == int(value):
        return cst.Integer(str(int(value)))
    return cst.Float(repr(float(value)))


def _value(node: cst.BaseExpression) -> int | float | None:
    """Return the value of a literal number, which may have a sign."""
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
        inner = _value(node.expression)
        return None if inner is None else -inner
    return node.evaluated_value if isinstance(node, cst.Integer | cst.Float) else None


def _resolved(node: cst.BaseExpression, clues: Clues) -> Any:
    """Return what a name with dots means in the module; None if that is not known."""
    name = dotted(node)
    first, *rest = name.split(".") if name else [""]
    found = clues.namespace.get(first)
    for part in rest:
        found = getattr(found, part, None)
    return found


def _parameters(call: cst.Call, clues: Clues) -> list[inspect.Parameter]:
    """Return the parameters of a function that is called, if it is known."""
    function = _resolved(call.func, clues)
    with suppress(TypeError, ValueError):
        return [] if function is None else list(inspect.signature(function).parameters.values())
    return []


def _named(module: str, function: str, clues: Clues) -> str:
    """Return how a function of a module is called here; "" if the module has none, or is not imported."""
    found = sys.modules.get(module)
    if found is None or not callable(getattr(found, function, None)):
        return ""
    for name, value in clues.namespace.items():
        if value is found:
            return f"{name}.{function}"
    root, _, rest = module.partition(".")
    return f"{module}.{function}" if clues.namespace.get(root) is sys.modules.get(root) and rest else ""


def _is_array(node: cst.BaseExpression, clues: Clues) -> bool:
    """Return whether an expression may be an array: no constant, module, function or keyword."""
    if not isinstance(
        node, cst.Name | cst.Attribute | cst.Call | cst.Subscript | cst.BinaryOperation | cst.UnaryOperation
    ):
        return False
    if isinstance(node, cst.Name) and node.value in ("True", "False", "None", "self"):
        return False
    if _value(node) is not None:
        return False
    known = _resolved(node, clues) if dotted(node) else None
    return not (inspect.ismodule(known) or callable(known) or isinstance(known, str | int | float | tuple))


def _with_last(args: Sequence[cst.Arg], new: cst.Arg) -> list[cst.Arg]:
    """Return arguments with one more, which takes over how they end."""
    if not args:
        return [new]
    last = args[-1]
    behind = new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    plain = last.with_changes(comma=_COMMA, whitespace_after_arg=cst.SimpleWhitespace(""))
    return [*args[:-1], plain, behind]


def _without(parts: Sequence[Any], index: int) -> list[Any]:
    found = [p for i, p in enumerate(parts) if i != index]
    if found and index == len(parts) - 1:
        found[-1] = found[-1].with_changes(comma=parts[index].comma)
    return found
