"""Functions that are written out in one expression: which they are, and what they are given."""

from __future__ import annotations

import ast

from stablenum.diagnosis.edits.expressions import called

__all__ = ["argument_of"]


def argument_of(function: str, node: ast.expr) -> tuple[ast.expr, bool] | None:
    """Return the argument of a function that an expression writes out, and whether it is negated; None if the
    expression is not such.

    Example:
        >>> expression = ast.parse("torch.log(1 + torch.exp(x))", mode="eval").body
        >>> [ast.unparse(part) for part in argument_of("softplus", expression)[:1]]
        ['x']
    """
    if function == "softplus":
        return _plain(_softplus(node))
    if function == "log_softmax":
        inner = _given(node, "log")
        return _plain(_given(inner, "softmax") or _softmax(inner)) if inner is not None else None
    if function == "log_sigmoid":
        return _log_sigmoid(node)
    if function == "logsumexp":
        inner = _given(node, "log")
        return _plain(_sum_of_exp(inner)) if inner is not None else None
    if function == "softmax":
        return _plain(_softmax(node))
    if function == "normalize":
        return _plain(_normalize(node))
    return None


def _plain(argument: ast.expr | None) -> tuple[ast.expr, bool] | None:
    return None if argument is None else (argument, False)


def _given(node: ast.expr | None, name: str) -> ast.expr | None:
    """Return what a function of this name is given first; None if the expression is no call of it."""
    found = None if node is None else called(node)
    return found.operands[0] if found is not None and found.name == name and found.operands else None


def _one_more(node: ast.expr | None) -> ast.expr | None:
    """Return what 1 is added to."""
    found = None if node is None else called(node)
    if found is None or found.name != "add" or len(found.operands) != 2:
        return None
    left, right = found.operands
    return right if _is_one(left) else left if _is_one(right) else None


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1


def _softplus(node: ast.expr) -> ast.expr | None:
    return _given(_given(node, "log1p") or _one_more(_given(node, "log")), "exp")


def _log_sigmoid(node: ast.expr) -> tuple[ast.expr, bool] | None:
    inner = _given(node, "log")
    argument = _given(inner, "sigmoid")
    if argument is not None:
        return argument, False
    rest = None if inner is None else called(inner)
    if rest is None or rest.name != "sub" or not _is_one(rest.operands[0]):
        return None
    argument = _given(rest.operands[1], "sigmoid")
    return None if argument is None else (argument, True)


def _sum_of_exp(node: ast.expr) -> ast.expr | None:
    return _given(_given(node, "sum"), "exp")


def _softmax(node: ast.expr | None) -> ast.expr | None:
    found = None if node is None else called(node)
    if found is None or found.name != "div":
        return None
    above, below = _given(found.operands[0], "exp"), _sum_of_exp(found.operands[1])
    same = above is not None and below is not None and ast.dump(above) == ast.dump(below)
    return above if same else None


def _normalize(node: ast.expr) -> ast.expr | None:
    found = called(node)
    if found is None or found.name != "div":
        return None
    whole, length = found.operands[0], _given(found.operands[1], "norm")
    length = length or _given(found.operands[1], "vector_norm")
    return whole if length is not None and ast.dump(whole) == ast.dump(length) else None
