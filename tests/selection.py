"""Which cases of a large table always run, and which are left to ``make test-all``.

A selection follows from the cases alone and is the same in every run. What it leaves out is marked ``slow``,
never dropped.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

__all__ = [
    "REPEATS",
    "covering",
    "of_kind",
    "one_in_three",
    "only",
    "pairwise",
    "slow_but_for",
    "slow_unless",
    "thinned",
]

Case = TypeVar("Case", bound=Hashable)

REPEATS = pytest.mark.slow(reason="repeats a fast case on another backend or path")


def one_in_three(name: str) -> bool:
    """Whether the case of this name, by its hash, is in the fixed third that always runs."""
    return zlib.crc32(name.encode()) % 3 == 0


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """A few rows of the product of ``factors`` in which any two values of two factors occur together.

    Greedy: the next row is the one with the most new pairs, the first of those that tie. The rows
    are returned in the order of the product.
    """
    rows = list(itertools.product(*map(range, map(len, factors))))
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        chosen.append(best)
    return [tuple(factor[i] for factor, i in zip(factors, row, strict=True)) for row in sorted(chosen)]


def covering(cases: Mapping[Case, Collection[Any]]) -> list[Case]:
    """A few of the cases, in which every value occurs that occurs in one of them."""
    missing = {value for values in cases.values() for value in values}
    chosen = []
    for case, values in sorted(cases.items(), key=lambda item: zlib.crc32(str(item[0]).encode())):
        if not missing.isdisjoint(values):
            chosen.append(case)
            missing -= set(values)
    return chosen


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(row), min(2, len(row))))


def slow_unless(fast: Callable[..., bool], rows: Iterable[Sequence[Any]]) -> list[Any]:
    """The rows for ``pytest.mark.parametrize``; those for which ``fast(*row)`` is false are slow."""
    return [pytest.param(*row, marks=[] if fast(*row) else [REPEATS]) for row in rows]


def slow_but_for(fast: Iterable[Sequence[Any]], rows: Iterable[Sequence[Any]]) -> list[Any]:
    """The rows for ``pytest.mark.parametrize``; those that are not among ``fast`` are slow."""
    kept = [tuple(row) for row in fast]
    return slow_unless(lambda *row: row in kept, rows)


def only(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases of one argument for ``pytest.mark.parametrize``; those not among ``fast`` are slow."""
    return [pytest.param(case, marks=[] if case in fast else [REPEATS]) for case in cases]


def thinned(cases: Iterable[str]) -> list[Any]:
    """The cases of one argument for ``pytest.mark.parametrize``; about two of three are slow."""
    return [pytest.param(case, marks=[] if one_in_three(case) else [REPEATS]) for case in cases]


def of_kind(kind: str, programs: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """The names of the programs of a kind; those that are "still" missed are expected to fail, with the
    reason."""
    return [
        pytest.param(name, marks=pytest.mark.xfail(reason=program["still"], strict=True))
        if "still" in program
        else name
        for name, program in programs.items()
        if program["kind"] == kind
    ]
