"""Tell parameters of one size apart by the parameters that come before and after them.

Two norms of one size may belong to a branch and to the shortcut beside it, and two programs may compute these
in another order. What they read tells them apart: the product of a kernel of another shape. So does what
reads them. Each parameter is described by its size, then by the descriptions of its neighbours, and so on;
two parameters resemble each other more, the longer their descriptions agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from stablenum.diagnosis.diff.weights.layouts import layouts
from stablenum.diagnosis.diff.weights.origins import Origin, Source
from stablenum.diagnosis.diff.weights.parameter_uses import Use
from stablenum.diagnosis.replay.trace import Trace

__all__ = ["exchanged", "neighbours_of"]

# The neighbours of each parameter, on the left and on the right.
Before: TypeAlias = "tuple[Mapping[str, frozenset[str]], Mapping[str, frozenset[str]]]"

# Descriptions reach so many neighbours far at most, and as far as a program has parameters if these are
# fewer: no longer description tells more then. Chosen, not measured.
_MOST_ROUNDS = 64
# Each pass looks at all pairs of parameters. One exchange may undo another, so that passes need not end by
# themselves. Chosen, not measured.
_MOST_PASSES = 8
_PRODUCTS = ("matmul", "conv", "gather")


def neighbours_of(trace: Trace) -> dict[str, frozenset[str]]:
    """Return, for each parameter, those whose effect reaches it past no other parameter, in the forward
    pass."""
    owned: dict[int, frozenset[str]] = {}  # of values that follow from parameters alone
    last: dict[int, frozenset[str]] = {}  # of the others: the parameters used last on the way
    for value in trace.values:
        if value.role == "parameter" and value.producer is None:
            owned[value.id] = frozenset([value.name])
    found: dict[str, frozenset[str]] = {name: frozenset() for names in owned.values() for name in names}
    nothing: frozenset[str] = frozenset()
    data = {v.id for v in trace.values if v.role == "input" and v.producer is None}
    for step in trace.steps:
        if step.phase != "forward":
            continue
        own = nothing.union(*(owned.get(i, nothing) for i in step.inputs))
        before = nothing.union(*(last.get(i, nothing) for i in step.inputs))
        if not data.intersection(step.inputs):
            owned.update(dict.fromkeys(step.outputs, own))
            continue
        for name in own:
            found[name] |= before
        data.update(step.outputs)
        last.update(dict.fromkeys(step.outputs, own or before))
    return found


def exchanged(
    origins: Mapping[str, Source], left: Sequence[Use], right: Sequence[Use], before: Before
) -> dict[str, Source]:
    """Return the origins with two parameters of one size exchanged wherever their neighbours resemble each
    other more then; if they do as much, wherever more of the neighbours before them correspond then.

    Args:
        origins: by the name of the right parameter.
        left, right: the uses.
        before: the neighbours of each parameter, on the left and on the right.
    """
    found, alike = dict(origins), _Likeness(left, right, before)
    kinds, shapes = {u.name: u.kind for u in right}, {u.piece.name: u.shape for u in left}
    single = [name for name in kinds if _is_whole(found.get(name))]
    changed, passes = True, 0
    while changed and passes < _MOST_PASSES:
        changed, passes = False, passes + 1
        best = {n for n in single if _score(found, (n,), alike, before) == _most(found, n, alike, before)}
        for one, two in itertools.combinations(single if len(best) < len(single) else (), 2):
            if one in best and two in best:
                continue
            a, b = found[one], found[two]
            if not (isinstance(a, Origin) and isinstance(b, Origin)) or a.piece.name == b.piece.name:
                continue
            new = _from(a, b, kinds[one], shapes), _from(b, a, kinds[two], shapes)
            if new[0] is None or new[1] is None:
                continue
            then = {**found, one: new[0], two: new[1]}
            if _score(then, (one, two), alike, before) > _score(found, (one, two), alike, before):
                found, changed = then, True
    return found


def _score(
    origins: Mapping[str, Source], names: Sequence[str], alike: _Likeness, before: Before
) -> tuple[int, int]:
    """Return how similar the neighbours of parameters are, and how many before them correspond."""
    likeness = links = 0
    for name in names:
        (source,) = origins[name].names
        likeness += alike(source, name)
        there = before[1].get(name, frozenset())
        links += len(before[0].get(source, frozenset()).intersection(_sources(origins, there)))
    return likeness, links


def _most(origins: Mapping[str, Source], name: str, alike: _Likeness, before: Before) -> tuple[int, int]:
    """Return the score of a parameter whose neighbours all correspond."""
    (source,) = origins[name].names
    others = len(before[0].get(source, frozenset())), len(before[1].get(name, frozenset()))
    return alike.most(source, name), min(others)


def _sources(origins: Mapping[str, Source], names: Iterable[str]) -> set[str]:
    """Return where parameters come from."""
    return {source for name in names if name in origins for source in origins[name].names}


def _is_whole(origin: Source | None) -> bool:
    return isinstance(origin, Origin) and not origin.piece.cuts


def _from(a: Origin, b: Origin, kind: str, shapes: Mapping[str, tuple[int, ...]]) -> Origin | None:
    """Return an origin with the piece of another one of its size; None if no layout fits."""
    if sorted(a.shape) != sorted(b.shape):
        return None
    ways = layouts(shapes[b.piece.name], a.shape, kind)
    return replace(a, piece=b.piece, axes=ways[0], others=ways[1:]) if ways else None


class _Likeness:
    """How far the surroundings of a left and a right parameter agree."""

    def __init__(
        self,
        left: Sequence[Use],
        right: Sequence[Use],
        before: Before,
    ) -> None:
        numbers: dict[Hashable, int] = {}
        rounds = min(max(len(left), len(right)), _MOST_ROUNDS)
        after = _turned(before[0]), _turned(before[1])
        self._descriptions = [
            (_described(left, mine, numbers, rounds), _described(right, theirs, numbers, rounds))
            for mine, theirs in (before, after)
        ]

    def __call__(self, left: str, right: str) -> int:
        """Return for how many steps the descriptions agree, backward and forward."""
        return sum(_alike(mine.get(left, ()), theirs.get(right, ())) for mine, theirs in self._descriptions)

    def most(self, left: str, right: str) -> int:
        """Return for how many steps they could agree."""
        return sum(
            min(len(mine.get(left, ())), len(theirs.get(right, ()))) for mine, theirs in self._descriptions
        )


def _alike(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """Return how many numbers are the same. Descriptions that differ after a round differ from there on."""
    same, most = 0, min(len(mine), len(theirs))
    while same < most:
        middle = (same + most + 1) // 2
        if mine[middle - 1] == theirs[middle - 1]:
            same = middle
        else:
            most = middle - 1
    return same


def _turned(before: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {name: set() for name in before}
    for name, others in before.items():
        for other in others:
            found.setdefault(other, set()).add(name)
    return {name: frozenset(others) for name, others in found.items()}


def _described(
    uses: Sequence[Use], near: Mapping[str, frozenset[str]], numbers: dict[Hashable, int], rounds: int
) -> dict[str, list[int]]:
    """Return the description of each parameter after each round, as numbers that equal descriptions share."""
    now = {u.name: _number(numbers, (u.size, u.kind in _PRODUCTS)) for u in uses}
    found = {name: [number] for name, number in now.items()}
    for _ in range(rounds):
        around = {n: tuple(sorted(now[o] for o in near.get(n, ()) if o in now)) for n in now}
        now = {name: _number(numbers, (now[name], around[name])) for name in now}
        for name, number in now.items():
            found[name].append(number)
    return found


def _number(numbers: dict[Hashable, int], description: Hashable) -> int:
    return numbers.setdefault(description, len(numbers))
