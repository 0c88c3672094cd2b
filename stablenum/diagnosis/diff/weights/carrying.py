"""Give the right program the left one's parameters, in the way that the caller asks for."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.sides.equality import SAME_ARRAY
from stablenum.diagnosis.diff.sides.fingerprints import distance, fingerprint
from stablenum.diagnosis.diff.sides.play import Program
from stablenum.diagnosis.diff.sides.sides import Side, measured
from stablenum.diagnosis.diff.weights.axis_roles import Roles, roles_of
from stablenum.diagnosis.diff.weights.given import (
    Weights,
    by_function,
    by_name,
    check_form,
    entries_of,
    unknown,
    with_shared,
)
from stablenum.diagnosis.diff.weights.layouts import layouts
from stablenum.diagnosis.diff.weights.neighbours import exchanged, neighbours_of
from stablenum.diagnosis.diff.weights.orientation import in_convention, is_open, oriented
from stablenum.diagnosis.diff.weights.origins import Origin, Piece, Source
from stablenum.diagnosis.diff.weights.parameter_uses import Use, uses_of, words_of
from stablenum.diagnosis.diff.weights.sequences import by_full_names
from stablenum.diagnosis.diff.weights.settling import better_of, settled
from stablenum.diagnosis.diff.weights.weights import (
    Apart,
    UnmappedError,
    WeightMap,
    guessed,
    is_stack,
    numbered,
    stacks_apart,
    stacks_apart_by_layers,
)

__all__ = ["carried"]


def carried(left: Side, right: Program, weights: Weights) -> tuple[WeightMap, Mapping[str, Any] | None]:
    """Return the map of the parameters, and the arrays that the right program is given."""
    check_form(weights)
    arrays = left.program.parameters()
    if isinstance(weights, Mapping):
        mapped = by_name(weights, left.program, right)
        return with_shared(mapped, arrays, mapped.origins), mapped.of(arrays)
    if callable(weights):
        mapped, made = by_function(weights, left.program, right)
        return with_shared(mapped, arrays, mapped.origins), made
    if weights == "as they are":
        return _guess_or_nothing(left, right), None
    mapped = _matched(left, right, entries_of(weights))
    return mapped, mapped.of(arrays)


def _matched(left: Side, right: Program, entries: Mapping[str, str | None]) -> WeightMap:
    """Return the map that is found, with entries of the caller's: a left name, or None for nothing."""
    named = {name: source for name, source in entries.items() if source is not None}
    given = by_name(named, left.program, right).origins
    missing = [name for name in entries if name not in right.parameters()]
    if missing:
        raise unknown(missing[0], "right", right)
    found = _Guess(left, measured(right, noise=False), given, entries)
    plain, revised = found.made(), found.made(by_neighbours=True)
    guess = revised if _same(plain, revised) else better_of(left, right, revised, plain)
    others = list(found.others())
    guess = max([guess, *others], key=numbered)
    by_names = found.by_full_names()
    if by_names is not None and any(o.names != guess.origins[n].names for n, o in by_names.origins.items()):
        guess = better_of(left, right, guess, by_names)
    others = [m for m in others if not _same(m, guess)]
    mapped = settled(left, right, guess, found.uses[1], others)
    return with_shared(mapped, left.program.parameters(), given)


class _Guess:
    """Guesses the map of two programs.

    Attributes:
        sides, uses: both programs, and how they use their parameters.
        given: where the caller says that right parameters come from.
        entries: the right parameters that the caller says something about.
    """

    def __init__(
        self,
        left: Side,
        right: Side,
        given: Mapping[str, Source] | None = None,
        entries: Collection[str] = (),
    ) -> None:
        self.sides = left, right
        self.uses = uses_of(left), uses_of(right)
        self.given = {**_from_buffers(left, *self.uses), **(given or {})}
        self.entries = {*entries, *self.given}
        self._roles: tuple[dict[str, Roles], dict[str, Roles]] = {}, {}

    def others(self) -> Iterator[WeightMap]:
        """Yield further maps that may be tried."""
        if any(is_stack(u) for uses in self.uses for u in uses):
            for rows in (stacks_apart, stacks_apart_by_layers):
                with suppress(UnmappedError):
                    yield self.made(by_neighbours=True, rows_first=rows)

    def by_full_names(self) -> WeightMap | None:
        """Return the map that names alone give; None if they do not tell all."""
        wanted = [u for u in self.uses[1] if u.name not in self.entries]
        found = by_full_names(self.uses[0], wanted)
        return None if found is None else WeightMap(self._oriented({**found, **self.given}))

    def made(self, *, by_neighbours: bool = False, rows_first: Apart | None = None) -> WeightMap:
        """Return the map; see ``guessed``."""
        alike = self.sides[0].program.framework == self.sides[1].program.framework

        def revised(origins: dict[str, Source]) -> dict[str, Source]:
            if by_neighbours:
                before = neighbours_of(self.sides[0].trace), neighbours_of(self.sides[1].trace)
                origins = exchanged(origins, *self.uses, before)
            return self._oriented({**origins, **self.given})

        def found(left: Sequence[Use]) -> WeightMap:
            return guessed(left, wanted, alike=alike, rows_first=rows_first, revised=revised)

        wanted = [u for u in self.uses[1] if u.name not in self.entries]
        taken = {name for origin in self.given.values() for name in origin.names}
        free = [u for u in self.uses[0] if u.name not in taken]
        if taken and sum(u.size for u in free) >= sum(u.size for u in wanted):
            with suppress(UnmappedError):  # what is given may be used once more, as a table that is tied
                return found(free)
        return found(self.uses[0])

    def _oriented(self, origins: dict[str, Source]) -> dict[str, Source]:
        """Return the origins, laid out by what the programs do with each axis where shapes leave a choice."""
        opened = {name: o for name, o in origins.items() if is_open(o)}
        if not opened:
            return origins
        products = {u.name for u in self.uses[1] if u.kind == "matmul"}
        asked = {name: o for name, o in origins.items() if name in opened or name in products}
        of_left = {n for o in asked.values() for n in o.names}
        for side, roles, names in zip(self.sides, self._roles, (of_left, set(asked)), strict=True):
            missing = names - roles.keys()
            if missing:
                roles.update(dict.fromkeys(missing, ()))
                roles.update(roles_of(side, missing))
        shapes = {name: tuple(x.shape) for name, x in self.sides[0].program.parameters().items()}
        laid = {**origins, **oriented(opened, *self._roles, shapes)}
        return {**laid, **in_convention({n: laid[n] for n in products & laid.keys()}, *self._roles, shapes)}


def _from_buffers(left: Side, mine: Sequence[Use], theirs: Sequence[Use]) -> dict[str, Source]:
    """Return the origins of right parameters that only a buffer of the left side has the name of, as a bias
    that one framework does not train."""
    names = {use.words for use in mine}
    arrays = {n: x for n, x in left.program.parameters().items() if words_of(n) not in names}
    buffers = {words_of(n): (n, tuple(x.shape)) for n, x in arrays.items()}
    found = dict[str, Source]()
    for use in (u for u in theirs if u.words in buffers):
        name, shape = buffers[use.words]
        ways = layouts(shape, use.shape, use.kind) if math.prod(shape) == use.size else ()
        if ways:
            found[use.name] = Origin(Piece(name, ()), use.shape, ways[0], ways[1:])
    return found


def _same(a: WeightMap, b: WeightMap) -> bool:
    return {name: str(o) for name, o in a.origins.items()} == {name: str(o) for name, o in b.origins.items()}


def _guess_or_nothing(left: Side, right: Program) -> WeightMap:
    """Return the map of programs that keep their own parameters: what holds the same numbers corresponds,
    and the rest by uses and shapes."""
    try:
        found = _matched(left, right, {}).origins
    except UnmappedError:
        found = {}
    same = by_name(_by_numbers(left.program, right), left.program, right).origins
    other = {n: o for n, o in same.items() if n not in found or found[n].names != o.names}
    return WeightMap({**found, **other}, carried=False)


def _by_numbers(left: Program, right: Program) -> dict[str, str]:
    """Return the right parameters that hold the same numbers as a single left one, in a layout that fits."""
    arrays = left.parameters()
    mine = {name: fingerprint(x) for name, x in arrays.items()}
    found = dict[str, str]()
    for name, x in right.parameters().items():
        mark = fingerprint(x)
        same = [n for n, other in mine.items() if not mark.simple and distance(mark, other) <= SAME_ARRAY]
        if len(same) == 1 and layouts(np.shape(arrays[same[0]]), np.shape(x), "other"):
            found[name] = same[0]
    return found
