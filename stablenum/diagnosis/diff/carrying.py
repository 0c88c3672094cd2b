"""Give the right program the left one's parameters, in the way that the caller asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from stablenum.diagnosis.diff.axis_roles import Roles, roles_of
from stablenum.diagnosis.diff.layouts import layouts
from stablenum.diagnosis.diff.neighbours import exchanged, neighbours_of
from stablenum.diagnosis.diff.orientation import in_convention, is_open, oriented
from stablenum.diagnosis.diff.origins import Gathered, Origin, Piece, Source
from stablenum.diagnosis.diff.parameter_uses import uses_of
from stablenum.diagnosis.diff.play import Program
from stablenum.diagnosis.diff.settling import better_of, settled
from stablenum.diagnosis.diff.sides import Side, measured
from stablenum.diagnosis.diff.weights import (
    Apart,
    UnmappedError,
    WeightMap,
    guessed,
    is_stack,
    numbered,
    stacks_apart,
    stacks_apart_by_layers,
)
from stablenum.errors import bad_field, bad_type

__all__ = ["Weights", "carried"]

Weights: TypeAlias = "str | Mapping[str, str] | Callable[[Mapping[str, Any]], Mapping[str, Any]]"


def carried(left: Side, right: Program, weights: Weights) -> tuple[WeightMap, Mapping[str, Any] | None]:
    """Return the map of the parameters, and the arrays that the right program is given."""
    arrays = left.program.parameters()
    if isinstance(weights, str) and weights not in ("match", "as they are"):
        raise bad_field("weights", "'match', 'as they are', a dict or a function", weights)
    if isinstance(weights, Mapping):
        # Frameworks differ in which axis of a matrix comes first; two programs of one do not.
        kind = "other" if left.program.framework == right.framework else "matmul"
        mapped = _given(weights, arrays, right.parameters(), kind)
        return mapped, mapped.of(arrays)
    if callable(weights):
        made = {name: np.asarray(x, np.float64) for name, x in weights(arrays).items()}
        _check_made(made, right.parameters())
        return _gathered(weights, arrays, made), made
    if weights == "as they are":
        return _guess_or_nothing(left, right), None
    if not isinstance(weights, str):
        raise bad_type("weights", "'match', 'as they are', a dict or a function", weights)
    found = _Guess(left, measured(right, noise=False))
    plain, revised = found.made(), found.made(by_neighbours=True)
    guess = revised if _same(plain, revised) else better_of(left, right, revised, plain)
    others = list(found.others())
    guess = max([guess, *others], key=numbered)
    others = [m for m in others if not _same(m, guess)]
    mapped = settled(left, right, guess, found.uses[1], others)
    return mapped, mapped.of(arrays)


class _Guess:
    """Guesses the map of two programs.

    Attributes:
        sides, uses: both programs, and how they use their parameters.
    """

    def __init__(self, left: Side, right: Side) -> None:
        self.sides = left, right
        self.uses = uses_of(left), uses_of(right)
        self._roles: tuple[dict[str, Roles], dict[str, Roles]] = {}, {}

    def others(self) -> Iterator[WeightMap]:
        """Yield further maps that may be tried."""
        if any(is_stack(u) for uses in self.uses for u in uses):
            for rows in (stacks_apart, stacks_apart_by_layers):
                with suppress(UnmappedError):
                    yield self.made(by_neighbours=True, rows_first=rows)

    def made(self, *, by_neighbours: bool = False, rows_first: Apart | None = None) -> WeightMap:
        """Return the map; see ``guessed``."""
        alike = self.sides[0].program.framework == self.sides[1].program.framework

        def revised(origins: dict[str, Source]) -> dict[str, Source]:
            if by_neighbours:
                before = neighbours_of(self.sides[0].trace), neighbours_of(self.sides[1].trace)
                origins = exchanged(origins, *self.uses, before)
            return self._oriented(origins)

        return guessed(*self.uses, alike=alike, rows_first=rows_first, revised=revised)

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


def _same(a: WeightMap, b: WeightMap) -> bool:
    return {name: str(o) for name, o in a.origins.items()} == {name: str(o) for name, o in b.origins.items()}


def _gathered(
    function: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    arrays: Mapping[str, Any],
    made: Mapping[str, Any],
) -> WeightMap:
    """Return where a function takes each element from: it is called once more, with numbered elements.

    A parameter that is computed rather than rearranged, such as a sum of two, has no origin, and its
    gradients are not compared.
    """
    ends = np.cumsum([0, *(x.size for x in arrays.values())])
    numbered = {
        name: np.arange(begin, begin + x.size, dtype=np.float64).reshape(x.shape)
        for (name, x), begin in zip(arrays.items(), ends, strict=False)
    }
    whole, names, origins = np.concatenate([np.ravel(x) for x in arrays.values()]), list(arrays), {}
    for name, x in function(numbered).items():
        places = np.ravel(np.asarray(x, np.float64))
        index = np.clip(places, 0, ends[-1] - 1).astype(int)
        if (index == places).all() and (whole[index] == np.ravel(made[name])).all():
            used = sorted(set(np.searchsorted(ends, index, side="right") - 1))
            shifts = np.cumsum([0, *(arrays[names[i]].size for i in used)])
            of = np.searchsorted(ends, index, side="right") - 1
            local = index - ends[of] + shifts[np.searchsorted(used, of)]
            origins[name] = Gathered(tuple(names[i] for i in used), made[name].shape, local)
    return WeightMap(origins)


def _guess_or_nothing(a: Side, right: Program) -> WeightMap:
    try:
        guess = _Guess(a, measured(right, noise=False)).made(by_neighbours=True)
    except UnmappedError:
        return WeightMap({}, carried=False)
    return replace(guess, carried=False)


def _given(
    weights: Mapping[str, str], left: Mapping[str, Any], right: Mapping[str, Any], kind: str
) -> WeightMap:
    origins = dict[str, Source]()
    for name, source in weights.items():
        for side, known, asked in (("right", right, name), ("left", left, source)):
            if asked not in known:
                raise ValueError(
                    f"weights names {asked!r}, which is no parameter of the {side} program. "
                    f"Its parameters are {', '.join(list(known)[:12])}."
                )
        ways = layouts(tuple(left[source].shape), tuple(right[name].shape), kind)
        if not ways:
            raise ValueError(
                f"weights maps {source!r} {list(left[source].shape)} to {name!r} {list(right[name].shape)}: "
                "no transposition or reshape does that. Give a function from the left arrays to the right."
            )
        origins[name] = Origin(Piece(source), tuple(right[name].shape), ways[0], ways[1:])
    return WeightMap(origins)


def _check_made(made: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    for name, x in made.items():
        if name not in right:
            raise ValueError(
                f"the function given as weights returns {name!r}, which the right program does not have. "
                f"Its parameters are {', '.join(list(right)[:12])}."
            )
        if x.size != right[name].size:
            raise ValueError(
                f"the function given as weights returns {name!r} with the shape {list(x.shape)}; the right "
                f"program has {list(right[name].shape)}."
            )
