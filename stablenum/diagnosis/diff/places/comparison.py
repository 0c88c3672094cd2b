"""Two programs side by side: the values that they share, and their results, also with other values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.places.arrangement import chain_of, first_rearranged, laid_apart
from stablenum.diagnosis.diff.places.frontier import Frontier, Start, frontiers, last_of_line, same_line
from stablenum.diagnosis.diff.places.results import Group, Pair, Update, groups_after, groups_of
from stablenum.diagnosis.diff.sides.fingerprints import distance
from stablenum.diagnosis.diff.sides.kinds import kind, quiet
from stablenum.diagnosis.diff.sides.matching import Matching, matched
from stablenum.diagnosis.diff.sides.play import if_recorded
from stablenum.diagnosis.diff.sides.sides import MOST_NOISE, Side, again, arrays_of, results_of
from stablenum.diagnosis.diff.weights.weights import WeightMap
from stablenum.diagnosis.replay.trace import Step

__all__ = ["Comparison"]

# A difference of a value this much smaller than that of the results does not explain it. Chosen, not
# measured.
_SMALL = 1e-6
# Operations that read every entry of a row, so that a value's order matters to them.
_MIX = ("conv", "matmul")
# Elementwise operations of several operands, by what they do.
_COMBINES = {
    "add": "sum", "sub": "sum", "mul": "product", "div": "product",
    "where": "choice", "masked_fill": "choice", "select_n": "choice",
}  # fmt: skip


class Comparison:
    """Two sides, the values that they share, and their results.

    Attributes:
        left, right: the sides.
        weights: where the parameters of the right side come from.
        found: the values that both have.
        groups: the results, in the order in which they are computed.
        notes: what the report says of the optimizers' states and of tables.
        but_for_constants: whether what constants of float32 explain is left out; see ``tables``.
    """

    def __init__(
        self,
        left: Side,
        right: Side,
        weights: WeightMap,
        notes: tuple[str, ...] = (),
        *,
        like: Comparison | None = None,
    ) -> None:
        self.left, self.right, self.weights, self.notes = left, right, weights, notes
        self.but_for_constants = False
        if like is None:
            self.found = matched(left, right)
            self.groups = groups_of(left, right, weights)
        else:  # of copies of whose sides one has other values
            self.found = like.found.after(left, right)
            self.groups = groups_after(like.groups, (like.left, like.right), (left, right), weights)

    @property
    def differing(self) -> Group | None:
        """The first results that differ; None if all agree."""
        return next((g for g in self.groups if g.differing), None)

    def side(self, name: str) -> Side:
        """Return the side of a name, "left" or "right"."""
        return self.left if name == "left" else self.right

    def with_values(self, side: str, values: Mapping[int, Any], until: Group | None = None) -> Comparison:
        """Return the comparison in which values of a side are replaced; with ``until``, it holds up to the
        results of that group only."""
        last = None if until is None else max(getattr(p, side).value for p in until.pairs)
        new = again(self.side(side), values, last=last)
        left, right = (new, self.right) if side == "left" else (self.left, new)
        return Comparison(left, right, self.weights, like=self)

    def agrees(self, group: Group) -> bool:
        """Return whether the results of a group agree here."""
        return not self.group(group).differing

    def group(self, group: Group) -> Group:
        """Return the results of a group as they are here."""
        return next(g for g in self.groups if (g.kind, g.step) == (group.results, group.step))

    # --- where ---

    def frontiers(self, group: Group) -> Iterator[Frontier]:
        """Yield where the results of a group may begin to differ, the most likely place first."""
        pairs = [(p.left.value, p.right.value) for p in group.differing]
        places = frontiers(self.left, self.right, self.found, pairs, group.since)
        first = next(places)
        rearranged = if_recorded(lambda: self._rearranged(first, self.found), None)
        yield rearranged or first
        if rearranged is None:
            yield from places

    def closer_frontiers(self, group: Group) -> Iterator[Frontier]:
        """Yield where the results of a group begin to differ if more values correspond: first those that are
        further apart than rounding explains, but far less than the results, as a table is that one side
        computes in float32 beforehand; then also values where one has some rows of the other."""
        pairs = [(p.left.value, p.right.value) for p in group.differing]
        floor = _SMALL * max(p.error for p in group.differing)
        sides = [replace(s, tolerance=[max(t, floor) for t in s.tolerance]) for s in (self.left, self.right)]
        near = matched(*sides)
        for found in (near, near.with_rows()):
            place = next(frontiers(self.left, self.right, found, pairs, group.since))
            yield if_recorded(partial(self._rearranged, place, found), None) or place

    def _rearranged(self, found: Frontier, known: Matching) -> Frontier | None:
        """Return the frontier at the operations that put what the first operations read in another order;
        None if there are none."""
        here, there = found.left, found.right
        if here is None or there is None or here.missing or there.missing:
            return None
        if kind(there.step) in _MIX:
            return self._reordered(found, here, there, known)
        both = {_COMBINES.get(kind(start.step)) for start in (here, there)}
        return self._laid_apart(found, here, there, known) if len(both) == 1 and None not in both else None

    def _reordered(self, found: Frontier, here: Start, there: Start, known: Matching) -> Frontier | None:
        """Return the frontier at the reshape or transposition that puts what a product reads in an order that
        the other side does not have."""
        for j in there.step.inputs:
            for i in set(known.right.get(j, ())).intersection(here.step.inputs):
                a = chain_of(self.left.trace, i)
                b = chain_of(self.right.trace, j)
                arrays_a, arrays_b = arrays_of(self.left, a), arrays_of(self.right, b)
                mine = first_rearranged(a, arrays_a, arrays_b.values())
                theirs = first_rearranged(b, arrays_b, arrays_a.values())
                starts = [_maker(self.left, mine), _maker(self.right, theirs)]
                if any(starts):
                    readers = here.step, there.step
                    return replace(found, left=starts[0] or here, right=starts[1] or there, readers=readers)
        return None

    def _laid_apart(self, found: Frontier, here: Start, there: Start, known: Matching) -> Frontier | None:
        """Return the frontier at what makes an operand of an elementwise operation that lies otherwise than
        the others on one side, such as scores whose queries and keys are exchanged beside a mask."""
        pairs = self._operands(here.step, there.step, known)
        a, b = arrays_of(self.left, {i for i, _ in pairs}), arrays_of(self.right, {j for _, j in pairs})
        shapes = self.left.shapes[here.step.outputs[0]], self.right.shapes[there.step.outputs[0]]
        apart = laid_apart([(a[i], b[j]) for i, j in pairs], shapes) if len(pairs) > 1 else None
        if apart is None:
            return None
        i, j = pairs[apart]
        before, steps = _steps_to(self.left, i), _steps_to(self.right, j)
        return replace(
            found,
            left=Start(before[0]) if before else here,
            right=Start(steps[0]) if steps else there,
            region_left=(*before, *found.region_left),
            region_right=(*steps, *found.region_right),
            readers=(here.step, there.step),
        )

    def _operands(self, here: Step, there: Step, known: Matching) -> list[tuple[int, int]]:
        """Return the operands of two elementwise operations that correspond: equal ones, and then flags."""
        pairs = []
        for j in there.inputs:
            same = set(known.right.get(j, ())).intersection(here.inputs)
            if same and self.right.depends[j]:
                pairs.append((min(same), j))
        flags = [
            [v for v in step.inputs if not side.prints[v].floating and side.shapes[v]]
            for side, step in ((self.left, here), (self.right, there))
        ]
        return pairs + (list(zip(*flags, strict=True)) if len(flags[0]) == len(flags[1]) == 1 else [])

    def meets(self, found: Frontier, side: str) -> bool:
        """Return whether the line at which a side begins to differ gives the other side's value here. The
        results need not agree then: further lines may have the same fault."""
        own = self.side(side)
        other = self.left if side == "right" else self.right
        name = "left" if side == "right" else "right"
        ends = _end_of_line(own, getattr(found, side), getattr(found, f"region_{side}"))
        there = _end_of_line(other, getattr(found, name), getattr(found, f"region_{name}"))
        if ends is None or there is None:
            return False
        return distance(own.prints[ends], other.prints[there]) <= own.tolerance[ends] + other.tolerance[there]

    def arrays_of(self, pair: Pair) -> tuple[Any, Any]:
        """Return the arrays of a result, the left one in the layout of the right one as far as the weights
        tell it."""
        theirs = self.right.arrays[pair.right.value]
        origin = self.weights.origins.get(pair.right.name)
        if pair.right.kind in ("loss", "output") or origin is None:
            return self.left.arrays[pair.left.value], theirs
        mine, (kind, _, _, step) = results_of(self.left), pair.left
        return origin.of({n: mine[kind, n, step] for n in origin.names}), theirs

    # --- updates ---

    def updates(self, group: Group) -> list[Update]:
        """Return what both sides make of each parameter in the layout of the right side.

        Entries whose gradient is 0 but for rounding, such as those of a bias of keys, are 0 here: what an
        optimizer that divides by the size of a gradient makes of them tells nothing.
        """
        mine, theirs = results_of(self.left), results_of(self.right)
        tolerance = {(r.kind, r.name, r.step): self.right.tolerance[r.value] for r in self.right.play.results}
        start_left, start_right = self.left.program.parameters(), dict(self.right.program.parameters())
        start_right.update(self.right.weights or {})
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
                change = theirs["updated", name, step] - other
                known = _known(gradient, tolerance["gradient", name, step])
                rest = np.where(known, other, new)
                before, gradient, moved_left, moved_right = (
                    np.where(known, x, 0.0) for x in (before, gradient, new - before, change)
                )
                value, told = pair.right.value, bool(known.any())
                found.append(
                    Update(before, gradient, moved_left, moved_right, name, pair.differs, value, rest, told)
                )
        return found

    def updates_so_far(self, group: Group) -> list[list[Update]]:
        """Return the updates of each training step up to that of a group."""
        groups = [g for g in self.groups if g.kind == "updated" and g.step <= group.step]
        return [self.updates(g) for g in groups]

    def given(self, group: Group) -> Mapping[int, Any]:
        """Return the left side's results of a group as arrays that can take the place of the right side's."""
        mine, found = results_of(self.left), dict[int, Any]()
        for pair in group.pairs:
            if group.kind not in ("gradient", "updated"):
                continue
            origin = self.weights.origins[pair.right.name]
            found[pair.right.value] = origin.of({n: mine[group.kind, n, group.step] for n in origin.names})
        return found


def _steps_to(side: Side, value: int) -> list[Step]:
    """Return the step that makes a value of several others that depend on the program's arguments, and what
    follows up to a value that is made of that alone, as a transposition or a factor does."""
    steps: list[Step] = []
    while True:
        producer = side.trace.values[value].producer
        if producer is None:
            return steps
        steps.insert(0, side.trace.steps[producer])
        read = [i for i in steps[0].inputs if side.depends[i]]
        if len(read) != 1 or side.trace.values[read[0]].producer is None:
            return steps
        (value,) = read


def _known(gradient: Any, tolerance: float) -> Any:
    """Return which entries of a gradient are more than rounding, or exactly 0."""
    size = np.abs(gradient)
    exact = (size == 0) | (size > tolerance * size.max(initial=0.0))
    return exact & (tolerance < MOST_NOISE)


def _end_of_line(side: Side, start: Start | None, region: Sequence[Step]) -> int | None:
    """Return the last telling value that a line computes, also if it moves entries first."""
    if start is not None and quiet(start.step):
        made = (o for s in same_line(start, region) if not quiet(s) for o in s.outputs if not side.neutral(o))
        last = max(made, default=None)
        if last is not None:
            return last
    return last_of_line(side, start, region)


def _maker(side: Side, value: int | None) -> Start | None:
    producer = None if value is None else side.trace.values[value].producer
    return None if producer is None else Start(side.trace.steps[producer])
