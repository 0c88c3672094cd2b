"""Changes of what is written: a number, a word, a keyword argument, a function, a variable."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import libcst as cst

from stablenum.diagnosis.diff.mending.clues import Clues
from stablenum.diagnosis.diff.mending.names import Held
from stablenum.diagnosis.diff.mending.nodes import (
    EQUAL,
    MOST_GIVEN,
    number,
    parameters_of,
    resolved,
    value_of,
    with_last,
    without,
)

__all__ = ["TURNS", "functions", "keywords", "numbers", "variables", "words"]

# Whole numbers up to this one may be axes, offsets and counts, which are often off by one. Chosen.
_SMALL = 4
# Of the numbers of the other side, so many are tried where only this side has the number that stands there.
# Chosen.
_MOST_NUMBERS = 8
# So many variables, the nearest ones, may be meant by another one. Chosen.
_MOST_VARIABLES = 6
# Functions that are taken for one another.
_FAMILIES = tuple(
    frozenset(words.split())
    for words in (
        "relu gelu silu swish tanh sigmoid softplus elu leaky_relu hard_swish hardswish relu6 celu selu mish",
        "mean sum max min", "amax amin mean sum", "std var", "mean median nanmean", "logsumexp max sum",
        "sigmoid hard_sigmoid hardsigmoid", "tanh hard_tanh hardtanh", "sum prod",
        "softmax log_softmax sigmoid log_sigmoid logsigmoid",
        "sin cos tan", "exp exp2 expm1", "log log1p log2 log10", "sqrt rsqrt square abs cbrt",
        "floor ceil round trunc", "argmax argmin", "tril triu", "zeros ones", "zeros_like ones_like",
        "repeat tile", "maximum minimum", "cumsum cumprod", "any all", "concatenate stack cat",
        "avg_pool max_pool avg_pool2d max_pool2d", "adam adamw nadam nadamw radam amsgrad lion", "trace ema",
        "clip_by_global_norm clip clip_by_block_rms", "argsort sort", "floor_divide divide true_divide",
        "add set multiply",
    )
)  # fmt: skip
_PADDINGS = ("SAME", "VALID", "CIRCULAR", "CAUSAL")
_STRINGS = (
    _PADDINGS, ("mean", "sum", "none"),
    ("nearest", "bilinear", "linear", "bicubic", "cubic"),
    ("constant", "reflect", "edge", "wrap", "symmetric"),
    ("tanh", "none"), ("fan_in", "fan_out", "fan_avg"), ("ij", "xy"),
)  # fmt: skip


def numbers(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """Another number: one of the other side, or one next to it."""
    if isinstance(node, cst.Name) and node.value in ("True", "False"):
        yield cst.Name("False" if node.value == "True" else "True")
    yield from _axes(node)
    value = value_of(node)
    if value is None:
        return
    whole, old = isinstance(value, int), clues.is_old(value)
    near = [value + 1, value - 1, -value, 0, 1, -1] if whole and abs(value) <= _SMALL else []
    given = [n for n in clues.near(value) if not whole or n == int(n) or old][:_MOST_NUMBERS]
    near, given = (near, given) if whole and not old else ([], [*given, *near])
    turned = [
        back(n)
        for forth, back in TURNS
        if not whole and value > 0 and clues.is_old(forth(float(value)))
        for n in clues.new
        if n > 0
    ]
    found = dict.fromkeys(n for n in (*turned, *near, *given) if n != value)
    yield from (number(n, whole=whole) for n in found)


def _axes(node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """Yield as many other axes as a tuple of axes names."""
    values = [value_of(e.value) for e in node.elements] if isinstance(node, cst.Tuple) else []
    given = [int(n) for n in values if isinstance(n, int) and -_SMALL <= n < _SMALL]
    if len(given) < 2 or len(given) != len(values) or sorted(set(given)) != given:
        return
    count = len(given)
    for axes in (*itertools.combinations(range(_SMALL), count), tuple(range(-count, 0))):
        if list(axes) != given:
            yield cst.parse_expression(repr(axes))


# What a program computes with may be made of what its author wrote, such as 1 - 0.9.
TURNS: tuple[tuple[Callable[[float], float], Callable[[float], float]], ...] = (
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
    for i, parameter in enumerate(parameters_of(node, clues)):
        name, default = parameter.name, parameter.default
        if i < count and parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        if name in given or default is parameter.empty:
            continue
        variable = [cst.Name(name)] if name in clues.variables else []
        for value in (*variable, *_instead_of(default, name, clues)):
            yield node.with_changes(args=with_last(node.args, cst.Arg(value, cst.Name(name), EQUAL)))
    for i, argument in enumerate(node.args):
        if argument.keyword is not None:
            yield node.with_changes(args=without(node.args, i))


def _instead_of(default: Any, name: str, clues: Clues) -> Iterator[cst.BaseExpression]:
    """Yield what may be given in place of a default."""
    if isinstance(default, bool):
        yield cst.Name(str(not default))
    elif isinstance(default, int | float):
        whole = isinstance(default, int)
        old = clues.is_old(default)
        yield from (cst.Name(n) for n in clues.forgotten if n != name)
        known = [n for n in clues.near(default) if n != default and (not whole or n == int(n))]
        near = [default + 1, default - 1] if whole and abs(default) <= _SMALL else []
        most = _MOST_NUMBERS if old else MOST_GIVEN
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
    if callable(resolved(node, clues)):
        yield from (cst.Name(name) for name in clues.unused)
    name = node.attr.value if isinstance(node, cst.Attribute) else node.value
    kin = [w for some in _FAMILIES if name in some for w in sorted(some) if w != name]
    for other in dict.fromkeys((*(f for f in clues.functions if f in kin), *kin)):
        if isinstance(node, cst.Name):
            if other in clues.namespace:
                yield cst.Name(other)
        elif resolved(node.value, clues) is None or hasattr(resolved(node.value, clues), other):
            yield node.with_changes(attr=cst.Name(other))


def variables(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """Another variable, or a size divided by a constant of the module."""
    if not isinstance(node, cst.Name) or node.value in ("True", "False", "None", "self"):
        return
    known = clues.namespace.get(node.value)
    if callable(known) or inspect.ismodule(known):
        return
    own = clues.held.get(node.value, Held())
    others = [n for n in clues.variables if n != node.value and own.like(clues.held.get(n, Held()))]
    yield from (cst.Name(n) for n in others[:_MOST_VARIABLES])
    for name in clues.sizes if own.kind in ("", "number") else ():
        if name != node.value:
            yield cst.Name(name)
            yield cst.BinaryOperation(cst.Name(node.value), cst.FloorDivide(), cst.Name(name))
