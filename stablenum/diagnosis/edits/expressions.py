"""Find the expression that failed in its source, and take it apart."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stablenum.diagnosis.edits.edit import Span, segment
from stablenum.diagnosis.replay.values import Place

__all__ = ["Called", "ancestors", "called", "expression_at", "node_at", "parsed", "span_of", "text_of"]


@dataclass(frozen=True, slots=True)
class Called:
    """An operation as it is written: a call, a method, or an operator.

    Attributes:
        name: the name of the function, or of the operator.
        operands: what it is given in order, the object of a method first.
        keywords: the keyword arguments.
    """

    name: str
    operands: tuple[ast.expr, ...]
    keywords: tuple[ast.keyword, ...] = field(default=())


_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Div: "div", ast.Mult: "mul", ast.Pow: "pow", ast.Sub: "sub", ast.MatMult: "matmul",
}  # fmt: skip
# Modules whose functions are written with a dot, as methods are.
_MODULES = (
    "F",
    "functional",
    "jax",
    "jnp",
    "linalg",
    "nn",
    "np",
    "numpy",
    "special",
    "torch",
    "lax",
    "scipy",
)


class ModuleName(ast.Name):
    """The name of an imported module, such as the ``T`` of ``import torch as T``."""


class _Modules(ast.NodeTransformer):
    def __init__(self, names: set[str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.copy_location(ModuleName(node.id, node.ctx), node) if node.id in self._names else node


def parsed(source: str) -> ast.Module:
    """Return the tree of a source, in which the names of imported modules are known as such.

    Raises:
        SyntaxError: the source is not Python.
    """
    tree = ast.parse(source)
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names = {alias.asname or alias.name.partition(".")[0] for alias in imports}
    found: ast.Module = _Modules(names).visit(tree)
    return found


def expression_at(place: Place | None, source: str) -> tuple[ast.Module, ast.expr] | None:
    """Return the tree of a source, and its expression at a place; None if the place does not show one."""
    if place is None or place.span is None:
        return None
    try:
        tree = parsed(source)
    except SyntaxError:
        return None
    node = node_at(tree, place.span)
    return None if node is None else (tree, node)


def node_at(tree: ast.AST, span: Span) -> ast.expr | None:
    """Return the expression that takes up a span.

    Example:
        >>> tree = ast.parse("y = (a / b).sum()")
        >>> ast.unparse(node_at(tree, (1, 1, 5, 10)))
        'a / b'
    """
    return next((n for n in ast.walk(tree) if isinstance(n, ast.expr) and span_of(n) == span), None)


def span_of(node: ast.expr) -> Span | None:
    """Return the span of an expression."""
    if node.end_lineno is None or node.end_col_offset is None:
        return None
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def ancestors(tree: ast.AST, node: ast.expr) -> Iterator[ast.expr]:
    """Yield an expression and those around it, the innermost first."""
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    found: ast.AST | None = node
    while isinstance(found, ast.expr):
        yield found
        found = parents.get(found)


def called(node: ast.expr) -> Called | None:
    """Return an operation as it is written; None for another expression.

    Example:
        >>> called(ast.parse("torch.log(p)", mode="eval").body).name
        'log'
        >>> [ast.unparse(x) for x in called(ast.parse("logits.softmax(-1)", mode="eval").body).operands]
        ['logits', '-1']
    """
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return Called(_OPERATORS[type(node.op)], (node.left, node.right))
    if not isinstance(node, ast.Call) or any(isinstance(a, ast.Starred) for a in node.args):
        return None
    keywords = tuple(node.keywords)
    if any(k.arg is None for k in keywords):
        return None
    if isinstance(node.func, ast.Name):
        return Called(node.func.id, tuple(node.args), keywords)
    if not isinstance(node.func, ast.Attribute):
        return None
    owner = node.func.value
    module = isinstance(owner, ModuleName) or _last_name(owner) in _MODULES
    return Called(node.func.attr, tuple(node.args) if module else (owner, *node.args), keywords)


def text_of(source: str, nodes: Sequence[ast.expr]) -> list[str]:
    """Return expressions as they are written."""
    spans = [span_of(node) for node in nodes]
    return [
        segment(source, span) if span else ast.unparse(node) for node, span in zip(nodes, spans, strict=True)
    ]


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
