"""Find the lines that made an argument of a call, by reading the sources that lead to it."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeAlias

from stablenum.diagnosis.replay.source_files import package_of
from stablenum.diagnosis.replay.values import Place

__all__ = ["CallSite", "argument_site"]

# Functions of the user's, and functions of a library within others, are followed so deep: they may call one
# another without end. Chosen, not measured.
_DEEPEST = 4
_Scope: TypeAlias = "ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True, slots=True)
class CallSite:
    """The lines that made an argument.

    Attributes:
        place: the line of the whole.
        parts: the line of each function that was called to make it, by the function's name; a function that
            another one calls stands in the line of that one.
    """

    place: Place
    parts: Mapping[str, Place]

    def line_of(self, function: str) -> Place:
        """Return the line of a library's function, such as "optax.scale"; that of the whole if none is
        known."""
        return self.parts.get(function.rpartition(".")[2], self.place)


def argument_site(frame: FrameType, name: str) -> CallSite | None:
    """Return the lines that made a keyword argument of the call that a frame is making.

    A variable leads to its last assignment before the call, and a function of the user's to what it returns.

    Args:
        frame: the caller's frame.
        name: the argument.

    Returns:
        The lines; None if the source cannot be read.
    """
    tree = _tree(frame.f_code.co_filename)
    call = None if tree is None else _call_at(tree, frame, name)
    if tree is None or call is None:
        return None
    value = next(k.value for k in call.keywords if k.arg == name)
    names = {**frame.f_globals, **frame.f_locals}
    found = _followed(_Found(value, value.lineno, frame.f_code, tree, names), _DEEPEST)
    direct = dict[str, Place]()
    within = dict[str, Place]()
    for function, made, part in _calls(found, _DEEPEST):
        direct.setdefault(part, found.place(made))
        for inner in _called_within(function) if isinstance(function, FunctionType) else ():
            within.setdefault(inner, found.place(made))
    return CallSite(found.place(found.line), {**within, **direct})


@dataclass(frozen=True, slots=True)
class _Found:
    """An expression, the line that it is said to stand in, and what its names mean."""

    value: ast.expr
    line: int
    code: CodeType
    tree: ast.Module
    names: Mapping[str, Any]

    def place(self, line: int) -> Place:
        file = self.code.co_filename
        return Place(file, line, self.code.co_name, linecache.getline(file, line).strip())

    def at(self, value: ast.expr, line: int) -> _Found:
        return _Found(value, line, self.code, self.tree, self.names)


def _followed(found: _Found, depth: int) -> _Found:
    """Return the expression that made what another one gives: past variables and functions of the user's."""
    for _ in range(depth):
        step = _STEPS.get(type(found.value), _returned)
        further = step(found)
        if further is None:
            break
        found = further
    return found


def _assigned(found: _Found) -> _Found | None:
    """Return the last assignment before an expression, to the variable that it is, in the function around it
    or in the module."""
    if not isinstance(found.value, ast.Name):
        return None
    line, name = found.value.lineno, found.value.id
    for inner, scope in enumerate(_scopes(found.tree, line)):
        last = _last_assignment(scope, name, None if inner else line)
        if last is not None and last.value is not None:
            return found.at(_part(last, last.value, name), last.lineno)
    return None


def _part(node: ast.Assign | ast.AnnAssign, value: ast.expr, name: str) -> ast.expr:
    """Return what an assignment gives to one variable: a part of the value, if it has several targets."""
    for target in _targets(node):
        for i, one in enumerate(target.elts if isinstance(target, ast.Tuple) else ()):
            if isinstance(one, ast.Name) and one.id == name:
                return ast.copy_location(ast.Subscript(value, ast.Constant(i), ast.Load()), value)
    return value


def _picked(found: _Found) -> _Found | None:
    """Return the part that is picked from a tuple, also from one that a function of the user's returns."""
    picks = found.value
    if not (isinstance(picks, ast.Subscript) and isinstance(picks.slice, ast.Constant)):
        return None
    whole: _Found | None = found.at(picks.value, found.line)
    if not isinstance(picks.value, ast.Tuple):
        whole = _returned(found.at(picks.value, found.line))
    index = picks.slice.value
    if whole is None or not isinstance(whole.value, ast.Tuple) or not isinstance(index, int):
        return None
    parts = whole.value.elts
    return whole.at(parts[index], whole.line) if -len(parts) <= index < len(parts) else None


def _last_assignment(scope: _Scope, name: str, before: int | None) -> ast.Assign | ast.AnnAssign | None:
    """Return the last assignment to a variable in a scope; with ``before``, before that line."""
    nodes = [
        node
        for node in _own_nodes(scope)
        if isinstance(node, ast.Assign | ast.AnnAssign) and (before is None or node.lineno < before)
        if any(isinstance(t, ast.Name) and t.id == name for t in _named(node))
    ]
    return max(nodes, key=lambda node: node.lineno, default=None)


def _returned(found: _Found) -> _Found | None:
    """Return what a function of the user's returns last, if an expression is a call of one."""
    if not isinstance(found.value, ast.Call):
        return None
    function = _meant(found.value.func, found.names)
    if not isinstance(function, FunctionType) or package_of(function.__code__.co_filename):
        return None
    tree = _tree(function.__code__.co_filename)
    made = None if tree is None else _function_at(tree, function.__code__.co_firstlineno)
    if tree is None or made is None:
        return None
    returns = [n for n in _own_nodes(made) if isinstance(n, ast.Return) and n.value is not None]
    if not returns:
        return None
    last = max(returns, key=lambda node: node.lineno)
    assert last.value is not None
    return _Found(last.value, last.lineno, function.__code__, tree, function.__globals__)


def _calls(found: _Found, depth: int) -> Iterator[tuple[Any, int, str]]:
    """Yield the functions that are called in an expression and in the variables that it reads: the function,
    the line and the name."""
    for node in ast.walk(found.value):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            yield _meant(node.func, found.names), node.lineno, name
        elif isinstance(node, ast.Name) and depth:
            made = _assigned(found.at(node, node.lineno))
            if made is not None:
                yield from _calls(made, depth - 1)


def _called_within(function: FunctionType) -> set[str]:
    """Return the names of the functions of a library that one of its functions calls, and of those that these
    call."""
    found, todo = set[str](), [(function, 0)]
    while todo:
        at, depth = todo.pop()
        named = _names_in(inspect.unwrap(at).__code__)
        spaces = [
            at.__globals__,
            *(vars(m) for n in named if isinstance(m := at.__globals__.get(n), ModuleType)),
        ]
        for name in named:
            inner = next((s[name] for s in spaces if isinstance(s.get(name), FunctionType)), None)
            if inner is not None and name not in found and _package(inner) == _package(function):
                found.add(name)
                if depth < _DEEPEST:
                    todo.append((inner, depth + 1))
    return found


def _names_in(code: CodeType) -> tuple[str, ...]:
    inside = (name for c in code.co_consts if isinstance(c, CodeType) for name in _names_in(c))
    return (*code.co_names, *inside)


def _package(function: FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]


def _meant(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return what a name or an attribute of a module stands for; None if that is not known."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _meant(node.value, names)
        return vars(owner).get(node.attr) if isinstance(owner, ModuleType) else None
    return None


# --- syntax trees ------------------------------------------------------------------------------------------


def _tree(file: str) -> ast.Module | None:
    return _parsed("".join(linecache.getlines(file)))


@lru_cache(maxsize=16)  # files; chosen, not measured
def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _call_at(tree: ast.AST, frame: FrameType, name: str) -> ast.Call | None:
    """Return the call with a keyword that a frame is making: several may stand in one line."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and any(k.arg == name for k in n.keywords)]
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2 :][:1]
    exact = [n for n in calls if (n.lineno, n.end_lineno, n.col_offset, n.end_col_offset) in positions]
    line = frame.f_lineno
    around = [n for n in calls if n.lineno <= line <= (n.end_lineno or n.lineno)]
    return next(iter(exact), None) or max(around, key=lambda node: node.lineno, default=None)


def _scopes(tree: ast.Module, line: int) -> list[_Scope]:
    """Return the functions around a line, the innermost first, and the module."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTIONS) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return [*sorted(around, key=lambda node: -node.lineno), tree]


def _function_at(tree: ast.Module, line: int) -> ast.FunctionDef | None:
    """Return the function that begins in a line, with its decorators."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return next(
        (f for f in functions if line == min([f.lineno, *(d.lineno for d in f.decorator_list)])), None
    )


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, without those of the functions and classes in it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield from _own_nodes(node)


def _named(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    """Return the targets of an assignment, those of a tuple one by one."""
    return [one for t in _targets(node) for one in (t.elts if isinstance(t, ast.Tuple) else [t])]


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


_STEPS = {ast.Name: _assigned, ast.Subscript: _picked}
