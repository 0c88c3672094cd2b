"""Propose rewrites of a side's source for a difference, the likeliest first."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import libcst as cst

from stablenum.diagnosis.diff.differences import Difference, Location
from stablenum.diagnosis.diff.mending.clues import Clues
from stablenum.diagnosis.diff.mending.names import Names
from stablenum.diagnosis.diff.mending.operators import OPERATORS, shows_number
from stablenum.diagnosis.edits.fix import Rewrite
from stablenum.diagnosis.edits.tree import Tree, code_of

__all__ = ["FORMS", "lines_of", "proposals"]

# Code of a cause -> the kinds of change that mend it, the likeliest first. The other kinds come later.
FORMS: Mapping[str, tuple[str, ...]] = {
    "epsilon_value": ("number", "keyword"),
    "epsilon_placement": ("move", "keyword"),
    "gelu_variant": ("keyword", "number", "function"),
    "silu_variant": ("function",),
    "variance_correction": ("keyword", "number", "function"),
    "norm_axis": ("number", "keyword"),
    "running_statistics": ("number", "keyword"),
    "flipped_kernel": ("keyword", "number", "turn", "drop"),
    "transposed_weight": ("exchange", "turn", "drop", "number"),
    "head_split_order": ("exchange", "number", "function", "turn"),
    "entry_order": ("exchange", "turn", "drop", "number"),
    "other_input": ("exchange", "variable", "drop", "number", "function"),
    "rotary_layout": ("exchange", "function", "number"),
    "scale": ("number", "variable", "drop", "wrap", "keyword", "operator", "exchange"),
    "mask_missing": ("mask", "operator", "exchange", "number", "keyword", "function"),
    "mask_shifted": ("operator", "number", "keyword", "function"),
    "mask_added": ("number", "operator", "function"),
    "padding": ("word", "number", "keyword", "exchange"),
    "pooling_count": ("keyword", "number", "mask"),
    "resize_mode": ("word", "keyword", "number"),
    "softmax_axis": ("number", "keyword"),
    "reduction": ("function", "number", "keyword", "drop", "wrap"),
    "label_shift": ("number", "drop"),
    "label_smoothing": ("number", "keyword", "wrap"),
    "ignored_labels": ("function", "operator", "number", "keyword"),
    "dropout": ("number", "keyword", "drop"),
    "stopped_gradient": ("unstop", "stop", "exchange", "drop"),
    "straight_through_missing": ("straight_through", "stop", "drop"),
    "accumulation": ("drop", "function", "wrap"),
    "adam_epsilon_placement": ("keyword", "number", "exchange", "function", "move"),
    "bias_correction": ("keyword", "number", "drop"),
    "decay_coupling": ("decay", "keyword", "number", "exchange", "function"),
    "decay_excluded": ("keyword", "number", "operator", "drop"),
    "betas": ("number", "keyword"),
    "momentum": ("number", "keyword"),
    "momentum_dampening": ("function", "keyword", "number"),
    "nesterov": ("number", "keyword"),
    "schedule_offset": ("number", "wrap", "keyword", "drop"),
    "clip_missing": ("clip", "number", "exchange", "function", "keyword"),
    "clip_per_tensor": ("function", "number"),
    "clip_epsilon": ("number", "keyword"),
    "loss_scale_left_in": ("number", "drop", "wrap"),
    "other_function": (
        "function",
        "number",
        "keyword",
        "exchange",
        "operator",
        "drop",
        "move",
        "variable",
        "wrap",
    ),
    "missing_operation": ("wrap", "turn", "keyword", "number", "mask"),
    "extra_operation": ("drop", "keyword", "number"),
}  # fmt: skip
# What a change costs that is of no kind which the cause suggests, beside one place farther away: these are
# chosen, not measured.
_OTHER_KIND, _HEAVY, _LIKELIER, _MANY = 1.5, 3.0, 1.0, 1.0
# There are few changes of these kinds, so that they are tried for every cause.
_FEW, _OF_FEW = ("word", "unstop", "operand"), 0.05
_OF_ARRAYS = ("stop", "turn", "wrap", "straight_through", "operand", "mask")
# These are tried only where a cause suggests them: there are many.
_SUGGESTED = ("straight_through", "mask", "clip", "decay")
# Two statements are exchanged after what is likely in one of them, and before what is not. Chosen.
_STATEMENTS = 0.5
# How far a place is from the line of the difference.
_SAME_LINE, _READ_THERE, _FURTHER_LINES, _DEFINITIONS, _AROUND = 0.0, 0.4, 0.7, 1.0, 2.5


class _Spot(NamedTuple):
    """An expression that may be changed."""

    node: cst.BaseExpression
    statement: cst.CSTNode
    distance: float


def proposals(
    difference: Difference,
    side: str,
    texts: Mapping[str, str],
    clues: Clues,
    more: Iterable[str] = (),
    names: Names = MappingProxyType({}),
) -> Iterator[Rewrite]:
    """Yield rewrites of a side's source, the likeliest first.

    Args:
        difference: a difference of the two programs.
        side: "left" or "right", the side that is changed.
        texts: the source of each file that may be changed.
        clues: what the difference tells.
        more: further lines that lead to the difference, as "file:LINE".
        names: what the names in the functions hold.
    """
    ways = list[tuple[float, int, _Way]]()
    places = lines_of(difference, side)
    for file, further in _by_file(more).items():
        lines = places.setdefault(file, [])
        lines += [line for line in further if line not in lines]
    for file, lines in places.items():
        if file in texts:
            ways += _ways(Tree(texts[file]), file, lines, clues, names)
    seen = set[str]()
    for _, _, way in sorted(ways, key=lambda row: row[:2]):
        for rewrite in way.rewrites():
            if rewrite.after not in seen:
                seen.add(rewrite.after)
                yield rewrite


def _ways(
    tree: Tree, file: str, lines: Sequence[int], clues: Clues, names: Names
) -> Iterator[tuple[float, int, _Way]]:
    """Yield what may be changed in a file, with what it costs and its place."""
    known, statement = clues, None
    for place, spot in enumerate(_spots(tree, lines)):
        if spot.statement is not statement:
            statement = spot.statement
            known = _known(tree, file, statement, clues, names)
            yield spot.distance + _STATEMENTS, place, _Way(tree, file, statement, "statements", known)
        for kind in OPERATORS:
            if kind in _SUGGESTED and kind not in FORMS.get(clues.code, ()):
                continue
            if _fits(tree, spot.node, kind):
                cost = spot.distance + _cost(kind, spot.node, clues)
                yield cost, place, _Way(tree, file, spot.node, kind, known)


def _has_self(function: cst.FunctionDef) -> bool:
    return any(p.name.value == "self" for p in function.params.params)


def _known(tree: Tree, file: str, statement: cst.CSTNode, clues: Clues, names: Names) -> Clues:
    """Return the clues with what is known of the variables around a statement."""
    function = tree.function_of(statement)
    return replace(
        clues,
        variables=tree.variables_at(tree.range_of(statement).start.line),
        held=names.get((file, "<module>" if function is None else function.name.value), {}),
        unused=tree.unused,
        forgotten=tree.forgotten,
        kept=tree.kept if function is not None and _has_self(function) else (),
    )


def _cost(kind: str, node: cst.BaseExpression, clues: Clues) -> float:
    """Return how unlikely it is that a change of a kind mends a difference."""
    forms = FORMS.get(clues.code, ())
    known = _LIKELIER if shows_number(kind, node, clues) else 0.0
    if kind in _FEW:
        return _OF_FEW
    if kind in forms:
        place = forms.index(kind)
        return 0.1 * place + (_MANY if place > 1 and kind in _OF_ARRAYS else 0.0) - known
    return (_HEAVY if kind in _OF_ARRAYS else _OTHER_KIND) - known


def _fits(tree: Tree, node: cst.BaseExpression, kind: str) -> bool:
    """Return whether a kind of change is for an expression in its place."""
    parent = tree.parent(node)
    if isinstance(parent, cst.Call) and parent.func is node:
        return kind == "function"
    if isinstance(parent, cst.UnaryOperation | cst.Attribute) and kind in ("number", *_OF_ARRAYS):
        return False
    return kind == "exchange" or not isinstance(parent, cst.AssignTarget | cst.For)


class _Way(NamedTuple):
    """A kind of change of one expression, or of the order of two statements."""

    tree: Tree
    file: str
    node: cst.CSTNode
    kind: str
    clues: Clues

    def rewrites(self) -> Iterator[Rewrite]:
        """Yield the changes."""
        line, text = self.tree.range_of(self.node).start.line, self.tree.text
        for after, old, new in self._texts():
            if after != text and _is_python(after):
                yield Rewrite(self.file, line, text, after, old, new, self.kind)

    def _texts(self) -> Iterator[tuple[str, str, str]]:
        """Yield texts of the file, with what was there before and what is there now."""
        if isinstance(self.node, cst.BaseExpression):
            for new in OPERATORS[self.kind](self.node, self.clues):
                yield self.tree.with_node(self.node, new), code_of(self.node), code_of(new)
            return
        line = self.tree.range_of(self.node).start.line
        after = self.tree.with_next_first(self.node)
        if after:
            yield after, f"line {line}", "the line after the next statement"


def _is_python(text: str) -> bool:
    try:
        compile(text, "<changed>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _spots(tree: Tree, lines: Iterable[int]) -> Iterator[_Spot]:
    """Yield the expressions near some lines, of which the first is that of the difference."""
    numbers = list(lines)
    statements = [(s, n) for n in numbers if (s := tree.statement_at(n)) is not None]
    near = dict.fromkeys(s for s, _ in statements)
    ranked = {s: _SAME_LINE if i == 0 else _FURTHER_LINES for i, s in enumerate(near)}
    for statement in near:
        own = tree.function_of(statement)
        for other in tree.definitions(statement):
            local = own is not None and tree.function_of(other) is own
            ranked.setdefault(other, _READ_THERE if local else _DEFINITIONS)
            for inner in tree.within(other):
                ranked.setdefault(inner, _DEFINITIONS + _FURTHER_LINES)
        for other in tree.readers(statement):
            ranked.setdefault(other, _FURTHER_LINES)
    function = next((f for s in near if (f := tree.function_of(s)) is not None), None)
    if function is not None:
        ranked.setdefault(function, _DEFINITIONS)
        for other in tree.uses(function.name.value):
            ranked.setdefault(other, _DEFINITIONS)
        for inner in tree.within(function):
            ranked.setdefault(inner, _AROUND)
    line = numbers[0] if numbers else 1
    may_be = [(s, distance) for s, distance in ranked.items() if tree.may_run_otherwise(s)]
    for statement, distance in sorted(may_be, key=lambda row: row[1]):
        nodes = sorted(tree.expressions(statement), key=lambda n: abs(tree.range_of(n).start.line - line))
        yield from (_Spot(node, statement, distance) for node in nodes)


def lines_of(difference: Difference, side: str) -> dict[str, list[int]]:
    """Return the lines of a side that belong to a difference, by file, that of the difference first."""
    places = [(difference.left, difference.right), *difference.also]
    locations = [pair[side == "right"] for pair in places]
    said = [w for at in locations for w in _written(at)]
    said += difference.within[side == "right"]
    return _by_file(said)


def _by_file(said: Iterable[str]) -> dict[str, list[int]]:
    """Return lines by file, given as "file:LINE"."""
    found = dict[str, list[int]]()
    for where in said:
        file, _, line = where.rpartition(":")
        if line.isdigit():
            lines = found.setdefault(os.path.realpath(Path(file)), [])
            lines += [] if int(line) in lines else [int(line)]
    return found


def _written(at: Location | None) -> list[str]:
    return [] if at is None else [w for w in (at.called_at, at.where) if w]
