"""Try a changed program against the other side, in this process: do all results agree, or more of them?"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from stablenum.diagnosis.diff.causes.by_update import multiple_of
from stablenum.diagnosis.diff.mending.clues import short
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.results import Group, Update, groups_of
from stablenum.diagnosis.diff.sides.fingerprints import Fingerprint, distance
from stablenum.diagnosis.diff.sides.play import SEED, Program
from stablenum.diagnosis.diff.sides.recorded import RecordedProgram
from stablenum.diagnosis.diff.sides.recording import recorded
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of, into, measured
from stablenum.diagnosis.diff.weights.carrying import carried
from stablenum.diagnosis.diff.weights.given import Weights
from stablenum.diagnosis.diff.weights.optimizer_states import continued
from stablenum.diagnosis.diff.weights.weights import WeightMap

__all__ = ["NOT_RUN", "Trial", "Trials", "agree_elsewhere", "counts_of", "lacks", "same_results"]

# The other weights at which programs must agree, too, lie so far from their own, in parts of each of them,
# and so much of that in parts of the largest of a parameter; nearer ones if these do not fit what was
# recorded. Chosen: far above rounding, and too little to turn a training around.
_SIZES, _OF_ALL = (0.2, 1e-3), 0.25
# A momentum shows in the second step.
_STEPS = 2
# A changed program has so many values more before its loss than it had, or a tenth. Chosen, not measured.
_MORE = 100
# Two values are equal that are so near: what is not known of rounding, as in ``measured`` without noise.
_ROUNDING = 1e-9
# Two rates of a schedule in float32 differ by more. Chosen.
_SAME_RATE = 1e-5


class Trial(NamedTuple):
    """What a changed program gives.

    Attributes:
        agrees: whether all results agree.
        elsewhere: whether they do so at other weights; None if that is not known, or if they do not agree.
        shared: the values of the other side that it has, too.
        differing: how many of the results differ that differed first.
    """

    agrees: bool
    elsewhere: bool | None = None
    shared: frozenset[int] = frozenset()
    differing: int = 0


class Trials:
    """Changed programs beside the other side of a comparison.

    Args:
        comparison: the other side on the left, and the program that is to be mended on the right.
        weights: as in ``stablenum.diff``.
    """

    def __init__(self, comparison: Comparison, weights: Weights) -> None:
        self._left, self._weights = comparison.left, weights
        self._mapped, self._arrays = comparison.weights, comparison.right.weights
        self._right, self._shapes = comparison.right, _shapes(comparison.right.program)
        self._prints = comparison.right.prints
        self._first = comparison.differing
        self.differing = 0 if self._first is None else len(self._first.differing)
        self._counts = counts_of(comparison.groups)
        self._numbers = comparison.left.program.written(comparison.left.steps)
        self._sought, self._until = self._seen_early(comparison)
        self.shared = _shared(comparison)

    @property
    def recorded(self) -> bool:
        """Whether the other side is a recording, which cannot be run at other weights."""
        return isinstance(self._left.program, RecordedProgram)

    def unchanged(self, program: Program) -> bool:
        """Return whether a program that is made once more, without a change, is the one that was compared."""
        program, _, arrays = self._carried(program)
        return same_results(
            self._right, measured(program, weights=arrays, steps=self._left.steps, noise=False)
        )

    def of(self, program: Program, targets: Collection[int] = ()) -> Trial | None:
        """Return what a program gives; None if it is not nearer to the other side than before, as far as that
        can be told early.

        Args:
            program: the changed program.
            targets: the values of the other side with which the two parted.

        Raises:
            Exception: whatever the program raises, and what a comparison does.
        """
        program, mapped, arrays = self._carried(program)
        if self._until and not self._comes_nearer(program, arrays, targets):
            return None
        side = measured(program, weights=arrays, steps=self._left.steps, noise=False)
        if side.prints == self._prints:
            return None
        side.arrays = arrays_of(side, {r.value for r in side.play.results})
        groups = groups_of(self._left, side, mapped)
        if lacks(counts_of(groups), self._counts):
            return None
        if any(g.differing for g in groups) and self._differing(groups) < self.differing:
            # What rounding explains is known only with noise, which takes as long once more.
            side = measured(program, weights=arrays, steps=self._left.steps)
            groups = groups_of(self._left, side, mapped)
        if all(not g.differing for g in groups):
            return Trial(True, agree_elsewhere(self._left, side, mapped, self._right.program))
        shared = _shared(Comparison(self._left, side, mapped))
        return Trial(False, shared=shared, differing=self._differing(groups))

    def _seen_early(self, comparison: Comparison) -> tuple[list[int], int]:
        """Return the left values that a mended forward pass has, and up to which value it is evaluated."""
        first = comparison.differing
        if first is None or first.kind not in ("loss", "output"):
            return [], 0
        last = max(p.right.value for p in first.pairs)
        return [p.left.value for p in first.differing], last + max(_MORE, last // 10)

    def _comes_nearer(
        self, program: Program, arrays: Mapping[str, Any] | None, targets: Collection[int]
    ) -> bool:
        """Return whether a forward pass has a value of the other side that it lacked: a result, or one
        of the targets. The rest is not evaluated."""
        prints = list[Fingerprint]()
        look = into(prints)

        def visit(index: int, data: Any) -> None:
            if index > self._until:
                raise _Enough
            look(index, data)

        with suppress(_Enough):
            program.play(visit, weights=arrays, steps=self._left.steps)
        if prints == self._prints[: len(prints)]:
            return False
        left = self._left
        sought = [*self._sought, *targets]
        marks = [(left.prints[v], left.tolerance[v] + _ROUNDING) for v in sought]
        before = self._prints[: self._until]
        lacked = [m for m in marks if not _among(m, before)]
        return not lacked or any(_among(m, prints) for m in lacked)

    def _differing(self, groups: list[Group]) -> int:
        """Return how many of the results differ that differed first."""
        first = self._first
        assert first is not None
        found = next((g for g in groups if (g.kind, g.step) == (first.kind, first.step)), first)
        return len(found.differing)

    def _carried(self, program: Program) -> tuple[Program, WeightMap, Mapping[str, Any] | None]:
        """Return a changed program as it is compared, and the weights that it is given."""
        left, steps = self._left, self._left.steps
        recorded(program, "right", steps)
        program.numbers = self._numbers
        mapped, arrays = self._mapped, self._arrays
        if _shapes(program) != self._shapes:
            mapped, arrays = carried(left, program, self._weights)
        if self._weights != "as they are":
            program, _ = continued(left.program, program, mapped, lambda p: recorded(p, "right", steps))
        return program, mapped, arrays


def counts_of(groups: Iterable[Group]) -> Counter[tuple[str, int]]:
    """Return how many results of each kind and training step are compared."""
    return Counter({(g.kind, g.step): len(g.pairs) for g in groups})


def lacks(found: Counter[tuple[str, int]], wanted: Counter[tuple[str, int]]) -> bool:
    """Return whether fewer results are compared than should be: what is not compared does not differ, so that
    to leave out an optimizer would mend its updates.

    Example:
        >>> lacks(Counter({("loss", 1): 1}), Counter({("loss", 1): 1, ("updated", 1): 3}))
        True
    """
    return not wanted <= found


def same_results(one: Side, other: Side) -> bool:
    """Return whether two evaluations of one program give the same results."""
    mine, theirs = (
        {(r.kind, r.name, r.step): s.prints[r.value] for r in s.play.results} for s in (one, other)
    )
    return mine.keys() == theirs.keys() and all(distance(mine[k], theirs[k]) <= _ROUNDING for k in mine)


def _among(mark: tuple[Fingerprint, float], prints: Sequence[Fingerprint]) -> bool:
    return any(distance(mark[0], p) <= mark[1] for p in prints)


class _Enough(Exception):  # noqa: N818
    """Ends an evaluation when no more of it is needed."""


def agree_elsewhere(left: Side, right: Side, mapped: WeightMap, before: Program) -> bool | None:
    """Return whether two programs that agree do so at other weights and in a second training step, too: what
    a change leaves out may be 0 or 1 in the weights that a program begins with, and a momentum does nothing
    in its first step. None if that is not known: weights are not carried over, one side is a recording, or
    what was recorded does not fit other weights.

    The updates of the second step may differ by one factor: a schedule that is outside of one program, as
    those of PyTorch are, goes on in the other one. The factor is then one between numbers that a program
    computes of the number of the step, and what the right one computes of it is the same as ``before`` the
    change, so that the factor is not of its making.
    """
    if isinstance(left.program, RecordedProgram) or right.weights is None or not mapped.carried:
        return None
    trains = any(r.kind == "updated" for r in right.play.results)
    steps = max(left.steps, _STEPS) if trains else left.steps
    for size in _SIZES:
        moved = _moved(left.program.parameters(), _trained(left), size)
        try:
            there = measured(left.program, weights=moved, steps=steps)
        except NOT_RUN:
            continue  # what was recorded need not fit other weights, which may choose other rows
        arrays = {**right.weights, **mapped.of(moved)}
        try:
            comparison = Comparison(there, measured(right.program, weights=arrays, steps=steps), mapped)
        except NOT_RUN:
            return False
        apart = [g for g in comparison.groups if g.differing]
        further = left.steps < steps and all(g.kind == "updated" and g.step == steps for g in apart)
        outside = left.program.framework != right.program.framework
        if not apart or not (further and outside):
            return not apart
        rate = _rate(comparison.updates(apart[0]))
        if rate is None:
            return False
        first = measured(before, steps=steps, noise=False)
        return _timed(first) == _timed(comparison.right) and _of_time(rate, comparison)
    return None


def _of_time(rate: float, comparison: Comparison) -> bool:
    """Return whether a factor between the updates is one between two numbers that a program computes of the
    number of the step."""
    return any(
        math.isclose(a, rate * b, rel_tol=_SAME_RATE)
        for side in (comparison.left, comparison.right)
        for a, b in itertools.permutations(_timed(side) - {0.0}, 2)
    )


def _timed(side: Side) -> set[float]:
    """Return the numbers that the updates of a program compute of the number of the training step, as those
    of schedules and of corrections of a bias are: they come from nothing but constants."""
    fixed = {v.id for v in side.trace.values if v.producer is None and v.role == "constant"}
    found = set[float]()
    for step in side.trace.steps:
        if step.phase == "update" and fixed.issuperset(step.inputs):
            fixed.update(step.outputs)
            found.update(short(side.prints[v].total) for v in step.outputs if side.prints[v].entries == 1)
    return found


# What an evaluation raises whose recorded operations do not fit its values.
NOT_RUN = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)


def _rate(updates: Sequence[Update]) -> float | None:
    """Return the positive number by which all updates of one side are those of the other one; None if there
    is none."""
    mine, theirs = (np.concatenate([np.ravel(getattr(u, n)) for u in updates]) for n in ("left", "right"))
    factor = multiple_of(mine, theirs)
    return factor if factor is not None and factor > 0 else None


def _trained(side: Side) -> set[str]:
    """Return the parameters that get a gradient, or all if there are none: tables and masks that only one of
    the programs keeps among its weights are no part of them."""
    found = {r.name for r in side.play.results if r.kind == "gradient"}
    return found or {v.name for v in side.trace.values if v.role == "parameter"}


def _moved(arrays: Mapping[str, Any], names: Collection[str], size: float) -> dict[str, Any]:
    """Return arrays of which some are others near these: what is positive stays so."""
    random, found = np.random.default_rng(SEED), dict(arrays)
    for name in sorted(names):
        array = arrays[name]
        if array.dtype.kind != "f" or not np.isfinite(array).all():
            continue
        moved = array * (1 + size * random.uniform(-1, 1, array.shape))
        if not (array > 0).all():
            largest = float(np.abs(array).max(initial=0.0)) or 1.0
            moved = moved + size * _OF_ALL * largest * random.uniform(-1, 1, array.shape)
        found[name] = moved.astype(array.dtype)
    return found


def _shapes(program: Program) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in program.parameters().items()}


def _shared(comparison: Comparison) -> frozenset[int]:
    """Return the telling values of the left side that the right one has."""
    return frozenset(i for i in comparison.found.left if not comparison.left.neutral(i))
