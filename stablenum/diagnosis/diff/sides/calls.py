"""The call of an operation as code, with its settings: numbers, axes and flags that can be set otherwise."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.sides.play import Dialect
from stablenum.diagnosis.diff.sides.sides import Side

__all__ = ["Call", "Setting", "calls_of"]

_VALUE = re.compile(r"\$(\d+)")
_NAME = re.compile(r"value_(\d+)")
_ATEN = re.compile(r"torch\.ops\.aten\.(\w+)\.\w+")
# Names that take an axis; a number of theirs is never one of another argument.
_AXES = frozenset({"axes", "axis", "dim", "dimension", "dimensions", "dims"})


@dataclass(frozen=True, slots=True)
class Setting:
    """A number or flag in a call.

    Attributes:
        place: which of the call's literals it is.
        name: the argument that it belongs to; "" for one that is given by its position.
        value: the number or flag.
    """

    place: int
    name: str
    value: float | bool

    @property
    def is_axis(self) -> bool:
        """Whether this is an axis."""
        return self.name in _AXES


@dataclass(frozen=True, slots=True)
class Call:
    """The call of a step.

    Attributes:
        dialect: how its framework is called.
        tree: its code, with ``value_7`` for the value 7.
        outputs: the values that it gives.
    """

    dialect: Dialect
    tree: ast.Module
    outputs: tuple[int, ...]

    def settings(self) -> list[Setting]:
        """Return the numbers and flags of the call, in order."""
        found = enumerate(_literals(self.tree))
        return [Setting(k, name, ast.literal_eval(node)) for k, (node, name) in found]

    def changed(self, place: int, new: float | bool) -> Call:
        """Return the call with another number or flag."""
        tree = ast.parse(ast.unparse(self.tree))
        node, _ = list(_literals(tree))[place]
        tree = _Replacement(node, ast.Constant(new)).visit(tree)
        return Call(self.dialect, ast.parse(ast.unparse(tree)), self.outputs)

    def made(self, arrays: Mapping[int, Any], shapes: Sequence[tuple[int, ...]]) -> Mapping[int, Any] | None:
        """Return what the call gives; None if it fails, or if a result does not have its shape.

        Args:
            arrays: what it reads, by value.
            shapes: of all values.
        """
        code = ast.unparse(self.tree)
        read = {int(m[1]) for m in _NAME.finditer(code)} - {*self.outputs}
        try:
            names = {f"value_{v}": arrays[v] for v in read}
            made = _run(self.dialect, code, names, self.outputs)
        except Exception:  # noqa: BLE001 - a function says in any way that it does not take a setting
            return None
        fits = all(np.shape(made[o]) == shapes[o] for o in self.outputs)
        return made if fits else None

    def __str__(self) -> str:
        """Return the last line of the call, with the letters x, y, ... for what it reads."""
        line = ast.unparse(self.tree.body[-1]).partition(" = ")[2] or ast.unparse(self.tree.body[-1])
        read = list(dict.fromkeys(_NAME.findall(line)))
        letters = dict(zip(read, "xyzuvw", strict=False))
        return _ATEN.sub(r"torch.\1", _NAME.sub(lambda m: letters.get(m[1], m[0]), line))


class _Replacement(ast.NodeTransformer):
    """Puts a node in place of another one."""

    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self._new if node is self._old else super().visit(node)


def calls_of(side: Side, steps: Collection[int]) -> dict[int, Call]:
    """Return the calls of those steps of a side that can be written as code."""
    code = side.program.play(
        lambda index, data: None, weights=side.weights, replace=side.replaced, steps=side.steps, code=steps
    ).code
    found = {}
    for index, line in code.items():
        with suppress(SyntaxError):  # an argument may have no code
            tree = ast.parse(_VALUE.sub(r"value_\1", line))
            found[index] = Call(side.program.dialect, tree, tuple(side.trace.steps[index].outputs))
    return found


def _literals(tree: ast.Module) -> Iterator[tuple[ast.Constant | ast.UnaryOp, str]]:
    """Yield the numbers and flags that a call is given, with the names of their arguments; shapes and formats
    of arrays that it makes are none."""
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("empty", "clone"):
            continue
        given = [("", a) for a in call.args] + [(k.arg or "", k.value) for k in call.keywords]
        for name, argument in given:
            parts = argument.elts if isinstance(argument, ast.List | ast.Tuple) else [argument]
            for part in parts:
                number = part.operand if isinstance(part, ast.UnaryOp) else part
                if isinstance(number, ast.Constant) and isinstance(number.value, int | float):
                    yield (part if isinstance(part, ast.UnaryOp) else number), name


def _run(dialect: Dialect, code: str, read: Mapping[str, Any], outputs: Collection[int]) -> dict[int, Any]:
    """Run a call on arrays of NumPy, and return its results as such."""
    names: dict[str, Any] = {"np": np}
    lines = [*dialect.imports, f"with {dialect.within}:"]
    for name, array in read.items():
        names[f"{name}_given"] = np.ascontiguousarray(array) if np.ndim(array) else np.array(array)
        lines.append(f"    {name} = {dialect.load.format(f'{name}_given')}")
    lines += [f"    {line}" for line in code.splitlines()]
    lines += [f"    made_{o} = {dialect.give.format(f'value_{o}')}" for o in outputs]
    exec("\n".join(lines), names)
    return {o: np.asarray(names[f"made_{o}"]) for o in outputs}
