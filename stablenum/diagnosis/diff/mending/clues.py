"""What a comparison tells of the change that would mend one side: numbers, names and strings of the other."""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.mending.names import Held

__all__ = ["Clues", "clues_of", "short"]

# Numbers are the same that differ by less, as those of float32 do.
_SAME = 1e-6


@dataclass(frozen=True, slots=True)
class Clues:
    """What may help to find a change.

    Attributes:
        code: that of the cause; "" for none.
        old, new: the numbers that the side to be mended computes with and the other one does not, and the
            inverse, the likeliest first.
        said: the numbers of the cause and of the other side's lines.
        ratio: the number of the other side over that of the side to be mended; 0 if the cause names none.
        strings: those on the other side's lines.
        functions: the functions that the other side's lines call.
        variables: those of the function around the line that is to be mended.
        operands: what the other side's lines do with a number: the operation, such as "mul", and the number.
        unused: the functions of the file that nothing in it calls: one may have been forgotten.
        forgotten: the constants of the file that nothing in it reads.
        kept: the attributes of ``self`` that nothing in the file reads.
        held: what the variables hold, as far as that is known.
        namespace: what the names of the module to be mended mean.
        framework: that of the side to be mended.
    """

    code: str = ""
    old: tuple[float, ...] = ()
    new: tuple[float, ...] = ()
    said: tuple[float, ...] = ()
    ratio: float = 0.0
    strings: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    operands: tuple[tuple[str, float], ...] = ()
    unused: tuple[str, ...] = ()
    forgotten: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    held: Mapping[str, Held] = field(default_factory=dict)
    namespace: Mapping[str, Any] = field(default_factory=dict)
    framework: str = "jax"

    @property
    def sizes(self) -> list[str]:
        """The whole numbers that are constants of the module."""
        found = {n: x for n, x in self.namespace.items() if n.isupper() and isinstance(x, int)}
        return [n for n, x in found.items() if not isinstance(x, bool) and x > 1]

    def near(self, number: float) -> list[float]:
        """Return the numbers that may be meant by one: that of the cause first, then by their size. If the
        other side computes with this one, too, they are only those of its lines."""
        found = self.new if self.is_old(number) else self.said
        first = found[: 1 if self.ratio else 0]
        return [*first, *sorted((n for n in found if n not in first), key=lambda n: _apart(n, number))]

    def is_old(self, number: float) -> bool:
        """Return whether a number is one that only the side to be mended computes with."""
        return any(_same(number, n) for n in self.old)


def clues_of(
    code: str,
    values: tuple[float, float] | None,
    written: tuple[Collection[float], Collection[float]],
    lines: Iterable[str],
    operation: str | None,
    operands: Iterable[tuple[str, float]],
    namespace: Mapping[str, Any],
    framework: str,
) -> Clues:
    """Return what a difference tells.

    Args:
        code: that of the first cause.
        values: the numbers of the cause: of the side to be mended, and of the other one.
        written: the numbers that the two sides compute with, in this order.
        lines: the other side's lines.
        operation: what the other side does there.
        operands: as in ``Clues``, not yet shortened.
        namespace, framework: as in ``Clues``.
    """
    own, other = ([short(float(n)) for n in some if np.isfinite(n)] for some in written)
    old = [n for n in own if not any(_same(n, m) for m in other)]
    new = [n for n in other if not any(_same(n, m) for m in own)]
    numbers, strings, functions = list[float](), list[str](), list[str]()
    for line in lines:
        for node in _nodes(line):
            if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
                numbers += [node.value] if not isinstance(node.value, bool) else []
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(node.value)
            elif isinstance(node, ast.Call):
                functions += _name_of(node.func)
    name = (operation or "").rpartition(": ")[2].rpartition(".")[2]
    functions += [name] if name.isidentifier() else []
    ratio = 0.0 if values is None or not values[0] else short(values[1] / values[0])
    first = ([short(values[0])], [short(values[1])]) if values is not None else ([], [])
    return Clues(
        code,
        tuple(dict.fromkeys((*first[0], *old))),
        tuple(dict.fromkeys((*first[1], *numbers, *new))),
        tuple(dict.fromkeys((*first[1], *numbers))),
        ratio if math.isfinite(ratio) else 0.0,
        tuple(dict.fromkeys(strings)),
        tuple(dict.fromkeys(functions)),
        operands=tuple(dict.fromkeys((n, short(value)) for n, value in operands if math.isfinite(value))),
        namespace=namespace,
        framework=framework,
    )


def short(number: float) -> float:
    """Return the number that was written for this one: the shortest that float32 does not tell from it if it
    is one of float32, else the nearest of 13 digits.

    Example:
        >>> short(float(np.float32(0.1))), short(1 - 0.9), short(32**0.5)
        (0.1, 0.1, 5.656854249492)
    """
    near = np.float32(number)
    if not np.isfinite(near):
        return number
    return float(str(near)) if float(near) == number else float(f"{number:.13g}")


def _apart(a: float, b: float) -> float:
    """Return how many powers of ten lie between two numbers; numbers of other signs are far apart."""
    return abs(math.log10(a / b)) if a * b > 0 else math.inf


def _same(a: float, b: float) -> bool:
    return bool(abs(a - b) <= _SAME * max(abs(a), abs(b)))


def _nodes(line: str) -> list[ast.AST]:
    """Return the nodes of a line, which may be the head of a block or a part of an expression."""
    text = line.strip()
    for form in (text, f"{text} pass", text.rstrip(",:("), f"f({text}", f"({text}", f"f({text})"):
        try:
            return list(ast.walk(ast.parse(form)))
        except SyntaxError:
            continue
    return []


def _name_of(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [node.attr]
    return [node.id] if isinstance(node, ast.Name) else []
