"""Data that was bad before the step: which of its columns are NaN, and the line that made it.

A column of features that is NaN in every row was divided by a standard deviation of 0, or is missing from the
file. The array from which the batch was taken has the same columns, so it can be found among the variables of
the script, with the line that assigned it.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import numpy as np

from stablenum.diagnosis.replay.findings import Finding
from stablenum.diagnosis.replay.source_files import is_outside, lines_around, package_of
from stablenum.diagnosis.replay.values import Place

__all__ = ["nan_columns", "with_maker"]

_OWN = ("stablenum", "stablenum_jax", "stablenum_torch")
# Larger arrays are not looked through.
_MOST_ELEMENTS = 50_000_000


def nan_columns(x: Any) -> tuple[int, ...]:
    """Return the columns (along the last axis) of an array that are NaN in every row; empty if all are, or if
    there are other NaN.

    Example:
        >>> nan_columns(np.array([[1.0, np.nan], [2.0, np.nan]]))
        (1,)
    """
    if x.ndim < 2 or not x.size or x.dtype.kind != "f":
        return ()
    bad = np.isnan(x).reshape(-1, x.shape[-1])
    whole = bad.all(axis=0)
    if whole.all() or np.count_nonzero(bad) != bad.shape[0] * np.count_nonzero(whole):
        return ()
    return tuple(int(i) for i in np.flatnonzero(whole))


def with_maker(finding: Finding, frame: FrameType | None) -> Finding:
    """Return a finding about an input with the variable that holds its data and the line that assigned it, if
    whole columns are NaN and such a variable is found.

    Args:
        finding: any finding.
        frame: the innermost of the frames whose variables are searched.
    """
    if finding.phase != "before" or not finding.outputs or not finding.outputs[0].nan_columns:
        return finding
    columns, shape = finding.outputs[0].nan_columns, finding.outputs[0].shape
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            found = [
                (line, -len(value), name)
                for name, value in dict(frame.f_locals).items()
                if _holds(value, columns, shape) and (line := _assigned(name, frame.f_code, frame.f_lineno))
            ]
            if found:
                line, _, name = min(found)
                return _made_at(finding, name, frame.f_code, line)
        frame = frame.f_back
    return finding


def _is_users(file: str) -> bool:
    return not package_of(file) and is_outside(file, _OWN)


def _made_at(finding: Finding, name: str, code: CodeType, line: int) -> Finding:
    file = code.co_filename
    place = Place(file, line, code.co_name, linecache.getline(file, line).strip())
    called = f"{name} ({finding.name})" if finding.name and finding.name != name else name
    return replace(finding, name=called, place=place, around=lines_around(place))


def _holds(value: Any, columns: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a value is an array with the same columns of NaN, in as many rows or more."""
    held = getattr(value, "shape", None)
    if not isinstance(held, tuple) or len(held) != len(shape) or tuple(held[1:]) != shape[1:]:
        return False
    if held[0] < shape[0] or held[0] * int(np.prod(shape[1:])) > _MOST_ELEMENTS:
        return False
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):  # no array, one of another format, or a deleted one
        return False
    return nan_columns(array) == columns


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
