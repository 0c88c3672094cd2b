"""Changes of order: of operands, arguments and entries, and of what is done first."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import libcst as cst

from stablenum.diagnosis.diff.mending.clues import Clues
from stablenum.diagnosis.diff.mending.names import Held
from stablenum.diagnosis.edits.tree import atom, code_of

__all__ = ["exchanges", "moves", "operators"]

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


def exchanges(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """Two operands, arguments, entries or letters of an einsum the other way round."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, _ORDERED):
        yield node.with_changes(left=atom(node.right), right=atom(node.left))
    elif isinstance(node, cst.IfExp):
        yield node.with_changes(body=node.orelse, orelse=node.body)
    elif isinstance(node, cst.Call):
        yield from (node.with_changes(args=some) for some in _swapped(node.args, "value", clues))
    elif isinstance(node, cst.Tuple | cst.List):
        yield from (node.with_changes(elements=some) for some in _swapped(node.elements, "value", clues))
    elif isinstance(node, cst.Subscript):
        yield from (node.with_changes(slice=some) for some in _swapped(node.slice, "slice", clues))
    elif isinstance(node, cst.SimpleString) and "->" in node.value:
        yield from (cst.SimpleString(text) for text in _subscripts(node.value))


def _may_be_exchanged(one: cst.CSTNode, other: cst.CSTNode, clues: Clues) -> bool:
    """Return whether two parts may stand for each other, as far as that is known: not a word or a tuple for
    something else, nor an array for a number."""
    if any(isinstance(one, kind) != isinstance(other, kind) for kind in (cst.BaseString, cst.Tuple)):
        return False
    kinds = {clues.held.get(n.value, Held()).kind for n in (one, other) if isinstance(n, cst.Name)}
    return len(kinds - {""}) < 2


def _subscripts(text: str) -> Iterator[str]:
    """Yield the subscripts of an einsum with two letters of one operand exchanged."""
    for term in re.finditer(r"[A-Za-z]{2,}", text):
        letters = term.group()
        for i, j in itertools.combinations(range(len(letters)), 2):
            turned = list(letters)
            turned[i], turned[j] = turned[j], turned[i]
            yield text[: term.start()] + "".join(turned) + text[term.end() :]


def _swapped(parts: Sequence[Any], name: str, clues: Clues) -> Iterator[list[Any]]:
    """Yield some parts with two of them exchanged, those that are next to each other first."""
    pairs = [(i, j) for j in range(len(parts)) for i in range(j) if parts[j] is not parts[i]]
    for i, j in sorted(pairs, key=lambda p: p[1] - p[0]):
        a, b = parts[i], parts[j]
        if any(getattr(p, "keyword", None) is not None or getattr(p, "star", "") for p in (a, b)):
            continue
        one, other = getattr(a, name), getattr(b, name)
        if code_of(one) == code_of(other) or not _may_be_exchanged(one, other, clues):
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
