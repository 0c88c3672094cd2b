"""The variables of a script that is running, and the lines that assigned them."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from stablenum.diagnosis.replay.source_files import is_the_scripts, place_in
from stablenum.diagnosis.replay.values import Place

__all__ = ["Variable", "variables"]


class Variable(NamedTuple):
    """A variable, its value, and the line that last assigned it."""

    name: str
    value: Any
    place: Place


def variables(frame: FrameType | None, wanted: Callable[[Any], bool]) -> list[Variable]:
    """Return the variables with a wanted value, of the innermost frame of the user's code that has any.

    Args:
        frame: where the search begins; it goes outwards.
        wanted: whether a value is looked for.
    """
    while frame is not None:
        if is_the_scripts(frame.f_code.co_filename):
            values = {name: value for name, value in dict(frame.f_locals).items() if wanted(value)}
            lines = {name: _assigned(name, frame.f_code, frame.f_lineno) for name in values}
            found = [
                Variable(name, values[name], place_in(frame.f_code, line))
                for name, line in lines.items()
                if line
            ]
            if found:
                return found
        frame = frame.f_back
    return []


def _assigned(name: str, code: CodeType, before: int) -> int:
    """Return the number of the last line of a scope that assigns a variable before a line; 0 if there is
    none."""
    text = "".join(linecache.getlines(code.co_filename))
    try:
        module = ast.parse(text)
    except SyntaxError:
        return 0
    scope: ast.AST | None = module
    if code.co_name != "<module>":
        functions = (n for n in ast.walk(module) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
        scope = next((n for n in functions if code.co_firstlineno in _first_lines(n)), None)
    lines = [s.lineno for s in _assignments(scope) if s.lineno < before and name in _names(s)]
    return max(lines, default=0)


def _first_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[int]:
    return {node.lineno, *(d.lineno for d in node.decorator_list)}


def _assignments(scope: ast.AST | None) -> Iterator[ast.Assign | ast.AugAssign | ast.AnnAssign]:
    """Return the assignments of a scope, without those of the functions and classes inside it."""
    for node in ast.iter_child_nodes(scope) if scope is not None else ():
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _assignments(node)


def _names(statement: ast.Assign | ast.AugAssign | ast.AnnAssign) -> set[str]:
    """Return the variables that a statement assigns, as a whole or by parts."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    inner = [n for target in targets for n in ast.walk(target)]
    parts = [n.value for n in inner if isinstance(n, ast.Subscript)]
    stored = [n for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return {n.id for n in [*stored, *parts] if isinstance(n, ast.Name)}
