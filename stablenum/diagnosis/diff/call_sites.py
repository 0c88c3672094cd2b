"""Find the line that made an argument of a call, by reading the caller's source."""

from __future__ import annotations

import ast
import linecache
from types import FrameType

from stablenum.diagnosis.replay.values import Place

__all__ = ["argument_line"]


def argument_line(frame: FrameType, name: str) -> Place | None:
    """Return the line that made a keyword argument of the call that a frame is making.

    Args:
        frame: the caller's frame.
        name: the argument.

    Returns:
        The line of the last assignment before the call to the variable that was passed, or that of the
        argument itself; None if the source cannot be read.
    """
    code = frame.f_code
    text = "".join(linecache.getlines(code.co_filename))
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    call = _call_at(tree, frame.f_lineno, name)
    if call is None:
        return None
    value = next(k.value for k in call.keywords if k.arg == name)
    line = value.lineno
    if isinstance(value, ast.Name):
        line = _assigned(tree, value.id, call.lineno) or line
    return Place(code.co_filename, line, code.co_name, linecache.getline(code.co_filename, line).strip())


def _call_at(tree: ast.AST, line: int, name: str) -> ast.Call | None:
    """Return the innermost call with the keyword that spans a line."""
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
        and any(k.arg == name for k in node.keywords)
    ]
    return max(found, key=lambda node: node.lineno, default=None)


def _assigned(tree: ast.AST, variable: str, before: int) -> int | None:
    """Return the line of the last assignment to a variable before a line."""
    lines = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and node.lineno < before
        and any(isinstance(t, ast.Name) and t.id == variable for t in _targets(node))
    ]
    return max(lines, default=None)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]
