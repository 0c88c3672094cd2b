"""The kinds of change of one expression: each is a small mistake, turned back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import libcst as cst

from stablenum.diagnosis.diff.mending.amounts import (
    clips,
    decays,
    drops,
    masks,
    operands,
    stops,
    straight_through,
    turns,
    unstops,
    wraps,
)
from stablenum.diagnosis.diff.mending.clues import Clues
from stablenum.diagnosis.diff.mending.nodes import parameters_of, value_of
from stablenum.diagnosis.diff.mending.order import exchanges, moves, operators
from stablenum.diagnosis.diff.mending.values import TURNS, functions, keywords, numbers, variables, words

__all__ = ["OPERATORS", "Operator", "shows_number"]

Operator = Callable[[cst.BaseExpression, Clues], Iterator[cst.BaseExpression]]

OPERATORS: Mapping[str, Operator] = {
    "number": numbers,
    "word": words,
    "keyword": keywords,
    "function": functions,
    "variable": variables,
    "exchange": exchanges,
    "operator": operators,
    "drop": drops,
    "move": moves,
    "unstop": unstops,
    "stop": stops,
    "straight_through": straight_through,
    "turn": turns,
    "wrap": wraps,
    "operand": operands,
    "mask": masks,
    "clip": clips,
    "decay": decays,
}


def shows_number(kind: str, node: cst.BaseExpression, clues: Clues) -> bool:
    """Return whether a number that only this side computes with stands in an expression, or is the default of
    a parameter that it does not give."""
    if kind == "number":
        value = value_of(node)
        return value is not None and any(clues.is_old(forth(float(value))) for forth in _forms(float(value)))
    if kind != "keyword" or not isinstance(node, cst.Call):
        return False
    given = {a.keyword.value for a in node.args if a.keyword is not None}
    return any(
        isinstance(p.default, float) and p.name not in given and clues.is_old(p.default)
        for p in parameters_of(node, clues)
    )


def _forms(value: float) -> list[Callable[[float], float]]:
    return [lambda x: x, *(forth for forth, _ in TURNS if value > 0)]
