"""``diff``: compare two programs, and find the first operation at which they part."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from stablenum.diagnosis.diff.arrangement import chain_of, first_rearranged
from stablenum.diagnosis.diff.causes import Scene, causes_of
from stablenum.diagnosis.diff.differences import Difference, Location, Off
from stablenum.diagnosis.diff.fingerprints import distance, fingerprint
from stablenum.diagnosis.diff.frontier import Frontier, Start, frontier, kind, last_of_line
from stablenum.diagnosis.diff.layouts import layouts
from stablenum.diagnosis.diff.matching import Matching, matched
from stablenum.diagnosis.diff.origins import Origin
from stablenum.diagnosis.diff.parameter_uses import uses_of
from stablenum.diagnosis.diff.play import Program
from stablenum.diagnosis.diff.report import DiffReport
from stablenum.diagnosis.diff.results import Group, groups_of
from stablenum.diagnosis.diff.rounding import Rounding, rounding_of
from stablenum.diagnosis.diff.sides import Side, arrays_of, measured
from stablenum.diagnosis.diff.update_causes import Update
from stablenum.diagnosis.diff.weights import UnmappedError, WeightMap, guessed
from stablenum.diagnosis.replay.trace import Step
from stablenum.errors import bad_field, bad_type

__all__ = ["compared", "diff"]

Weights: TypeAlias = "str | Mapping[str, str] | Callable[[Mapping[str, Any]], Mapping[str, Any]]"


def diff(left: Any, right: Any, *, weights: Weights = "match", steps: int = 1) -> DiffReport:
    """Compare two programs, of one framework or two, and name the first operation at which they part.

    Both programs are recorded once and evaluated again in float64, where rounding errors are about 1e-12 of
    a value and a difference of the programs stands far above them. Values are matched by their contents,
    independently of layout, names and order. Nothing of the programs' own objects is changed.

    Args:
        left, right: made by ``stablenum_torch.program`` or ``stablenum_jax.program``. The left one is the
            reference: the right one is evaluated with its parameters.
        weights: "match" finds out which parameter corresponds to which; ``{right name: left name}`` gives
            it; a function from the left arrays to the right ones, both by name, gives the arrays;
            "as they are" leaves both alone.
        steps: how many training steps follow one another, with the same arguments.

    Returns:
        The report. Its ``verdict`` is "the same in exact arithmetic" if at most rounding distinguishes the
        programs, and "different" otherwise.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: parameters that do not correspond; results that do not; ``steps`` below 1.
    """
    for name, given in (("left", left), ("right", right)):
        if not (hasattr(given, "play") and hasattr(given, "parameters")):
            raise bad_type(name, "a program made by stablenum_torch.program or stablenum_jax.program", given)
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise bad_type("steps", "a whole number", steps)
    if steps < 1:
        raise bad_field("steps", "at least 1", steps)
    comparison = compared(left, right, weights, steps)
    return comparison.report()


def compared(left: Program, right: Program, weights: Weights = "match", steps: int = 1) -> _Comparison:
    """Return the comparison from which the report is made."""
    a = measured(left, steps=steps)
    mapped, carried = _carried(a, right, weights)
    return _Comparison(a, measured(right, weights=carried, steps=steps), mapped, carried, steps)


class _Comparison:
    """Two sides, the values that they share, and their results."""

    def __init__(
        self, left: Side, right: Side, weights: WeightMap, carried: Mapping[str, Any] | None, steps: int
    ) -> None:
        self.left, self.right, self.weights, self.carried = left, right, weights, carried
        self.steps = steps
        self.found: Matching = matched(left, right)
        self.groups = groups_of(left, right, weights)

    def report(self) -> DiffReport:
        """Return the report."""
        differences = self.differences()
        off = None if differences else self._rounding()
        return DiffReport(
            verdict="different" if differences else "the same in exact arithmetic",
            differences=tuple(differences),
            weights={name: str(origin) for name, origin in self.weights.origins.items()},
            left_off=off[0] if off else None,
            right_off=off[1] if off else None,
            matched=(_share(self.left, self.found.left), _share(self.right, self.found.right)),
        )

    def differences(self) -> list[Difference]:
        """Return where the programs part, the first place first."""
        group = next((g for g in self.groups if g.differing), None)
        return [] if group is None else [self._difference(group)]

    def frontier(self, group: Group) -> Frontier:
        """Return where the results of a group begin to differ."""
        pairs = [(p.left.value, p.right.value) for p in group.differing]
        found = frontier(self.left, self.right, self.found, pairs, group.since)
        return self._rearranged(found) or found

    def _rearranged(self, found: Frontier) -> Frontier | None:
        """Return the frontier at the operations that put what the first operations read in another order;
        None if there are none."""
        here, there = found.left, found.right
        if here is None or there is None or here.missing or there.missing or kind(there.step) != "matmul":
            return None
        for j in there.step.inputs:
            for i in set(self.found.right.get(j, ())).intersection(here.step.inputs):
                a = chain_of(self.left.trace, i, kind)
                b = chain_of(self.right.trace, j, kind)
                arrays_a = arrays_of(self.left.program, a, steps=self.steps)
                arrays_b = arrays_of(self.right.program, b, weights=self.carried, steps=self.steps)
                mine = first_rearranged(a, arrays_a, arrays_b.values())
                theirs = first_rearranged(b, arrays_b, arrays_a.values())
                starts = [_maker(self.left, mine), _maker(self.right, theirs)]
                if any(starts):
                    return replace(found, left=starts[0] or here, right=starts[1] or there)
        return None

    def _difference(self, group: Group) -> Difference:
        found = self.frontier(group)
        worst = max(group.differing, key=lambda p: p.error)
        phase = {"gradient": "backward", "updated": "update"}.get(group.kind, "forward")
        return Difference(
            left=_location(found.left, self.left, phase),
            right=_location(found.right, self.right, phase),
            result=_named(group.kind, worst.left.name),
            step=group.step,
            error=worst.error,
            allowed=worst.allowed,
            causes=causes_of(self._scene(found, group)),
        )

    def _scene(self, found: Frontier, group: Group) -> Scene:
        def arrays(wanted: Iterable[int]) -> Mapping[int, Any]:
            return arrays_of(self.right.program, wanted, weights=self.carried, steps=self.steps)

        def agrees(side: str, values: Mapping[int, Any]) -> bool:
            return self._meets(found, side, values) or self._agrees(group, side, values)

        def updates() -> list[Update]:
            return self._updates(group)

        return Scene(self.left, self.right, found, group, self.found.right, arrays, agrees, updates)

    def _updates(self, group: Group) -> list[Update]:
        """Return what both sides make of each parameter in the layout of the right side."""
        mine = {(r.kind, r.name, r.step): self.left.arrays[r.value] for r in self.left.play.results}
        theirs = {(r.kind, r.name, r.step): self.right.arrays[r.value] for r in self.right.play.results}
        start_left, start_right = self.left.program.parameters(), dict(self.right.program.parameters())
        start_right.update(self.carried or {})
        found = []
        for pair in group.pairs:
            name, step = pair.right.name, group.step
            origin = self.weights.origins[name]
            new = origin.of({n: mine["updated", n, step] for n in origin.names})
            gradient = theirs.get(("gradient", name, step))
            if step > 1:
                before = origin.of({n: mine["updated", n, step - 1] for n in origin.names})
                other = theirs["updated", name, step - 1]
            else:
                before, other = origin.of(start_left), start_right[name].reshape(origin.shape)
            if gradient is not None:
                found.append(Update(before, gradient, new - before, theirs["updated", name, step] - other))
        return found

    def _meets(self, found: Frontier, side: str, values: Mapping[int, Any]) -> bool:
        """Return whether the line at which a side begins to differ gives the other side's value if some
        values are replaced. The results need not agree then: further lines may have the same fault."""
        own: Side = getattr(self, side)
        other = self.left if side == "right" else self.right
        ends = last_of_line(own, getattr(found, side), getattr(found, f"region_{side}"))
        name = "left" if side == "right" else "right"
        there = last_of_line(other, getattr(found, name), getattr(found, f"region_{name}"))
        if ends is None or there is None:
            return False
        given = self.carried if side == "right" else None
        new = arrays_of(own.program, [ends], weights=given, replace=values, steps=self.steps)[ends]
        allowed = own.tolerance[ends] + other.tolerance[there]
        return distance(fingerprint(new), other.prints[there]) <= allowed

    def _agrees(self, group: Group, side: str, values: Mapping[int, Any]) -> bool:
        """Return whether the results of a group agree if values of a side are replaced."""
        given = self.carried if side == "right" else None
        old: Side = getattr(self, side)
        wanted = [r.value for r in old.play.results if (r.kind, r.step) == (group.kind, group.step)]
        arrays = arrays_of(old.program, wanted, weights=given, replace=values, steps=self.steps)
        new = copy.copy(old)
        new.arrays = {**old.arrays, **arrays}
        sides = (self.left, new) if side == "right" else (new, self.right)
        groups = groups_of(*sides, self.weights)
        same = next(g for g in groups if (g.kind, g.step) == (group.kind, group.step))
        return not same.differing

    def _rounding(self) -> tuple[Off, Off]:
        left = rounding_of(self.left.program, None, self.steps)
        right = rounding_of(self.right.program, self.carried, self.steps)
        return _off(left, self.left), _off(right, self.right)


def _maker(side: Side, value: int | None) -> Start | None:
    producer = None if value is None else side.trace.values[value].producer
    return None if producer is None else Start(side.trace.steps[producer])


# --- weights ------------------------------------------------------------


def _carried(a: Side, right: Program, weights: Weights) -> tuple[WeightMap, Mapping[str, Any] | None]:
    """Return the map of the parameters, and the arrays that the right program is given."""
    arrays = a.program.parameters()
    if isinstance(weights, str) and weights not in ("match", "as they are"):
        raise bad_field("weights", "'match', 'as they are', a dict or a function", weights)
    if isinstance(weights, Mapping):
        mapped = _given(weights, arrays, right.parameters())
        return mapped, mapped.of(arrays)
    if callable(weights):
        made = {name: np.asarray(x, np.float64) for name, x in weights(arrays).items()}
        _check_made(made, right.parameters())
        return _guess(a, right, strict=False), made
    if weights == "as they are":
        return _guess(a, right, strict=False), None
    if not isinstance(weights, str):
        raise bad_type("weights", "'match', 'as they are', a dict or a function", weights)
    mapped = _guess(a, right, strict=True)
    return mapped, mapped.of(arrays)


def _guess(a: Side, right: Program, *, strict: bool) -> WeightMap:
    try:
        return guessed(uses_of(a), uses_of(measured(right, noise=False)))
    except UnmappedError:
        if strict:
            raise
        return WeightMap({})


def _given(weights: Mapping[str, str], left: Mapping[str, Any], right: Mapping[str, Any]) -> WeightMap:
    origins = {}
    for name, source in weights.items():
        for side, known, asked in (("right", right, name), ("left", left, source)):
            if asked not in known:
                raise ValueError(
                    f"weights names {asked!r}, which is no parameter of the {side} program. "
                    f"Its parameters are {', '.join(list(known)[:12])}."
                )
        ways = layouts(tuple(left[source].shape), tuple(right[name].shape), "matmul")
        if not ways:
            raise ValueError(
                f"weights maps {source!r} {list(left[source].shape)} to {name!r} {list(right[name].shape)}: "
                "no transposition or reshape does that. Give a function from the left arrays to the right."
            )
        origins[name] = Origin((source,), tuple(right[name].shape), ways[0], others=tuple(ways[1:]))
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


# --- what is shown ------------------------------------------------------------


def _location(start: Start | None, side: Side, phase: str) -> Location | None:
    if start is None:
        return None
    step = start.step
    place = step.place
    if phase == "update" and (place is None or step.phase != "update"):
        place = side.program.optimizer_at
    return Location(
        where=_where(place),
        operation=None if start.missing else _operation(step),
        module=step.module,
        phase=phase,
        code="" if place is None else place.code,
    )


def _operation(step: Step) -> str:
    return f"{step.library}: {step.operation}" if step.library else step.operation


def _where(place: Any) -> str:
    if place is None:
        return "?"
    short = os.path.relpath(place.file) if os.path.isabs(place.file) else place.file
    return f"{place.file if short.startswith('..') else short}:{place.line}"


def _named(kind: str, name: str) -> str:
    return {"gradient": f"gradient of {name}", "updated": f"{name} after the update"}.get(kind, name)


def _off(found: Rounding, side: Side) -> Off:
    step = found.step
    place = None if step is None else step.place
    return Off(
        error=found.error,
        where="" if place is None else _where(place),
        operation="" if step is None else _operation(step),
        added=found.added,
    )


def _share(side: Side, found: Mapping[int, Any]) -> tuple[int, int]:
    telling = [i for i in range(len(side.prints)) if not side.neutral(i)]
    return sum(i in found for i in telling), len(telling)
