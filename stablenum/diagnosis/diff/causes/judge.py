"""The judge: make a proposed change to one side, and see whether the two sides agree then.

The rules of ``by_*`` only propose. What is said to be confirmed was made here, to the recorded program of one
side, and healed what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, TypeVar

from stablenum.diagnosis.diff.causes.remedies import REMEDIES, REMEDIES_OF_UPDATES
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.differences import Cause
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.mended_places import MOST_CALLS
from stablenum.diagnosis.diff.places.patches import LEAST_SHARED, newly_shared
from stablenum.diagnosis.diff.places.results import Group
from stablenum.diagnosis.diff.places.slopes import SAME_SLOPE
from stablenum.diagnosis.diff.sides.play import NotRecordedError
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.replay.trace import Step

__all__ = [
    "Edit", "Proposal", "Slope", "Trial", "applied", "calls_like", "in_all_of", "judged", "told",
]  # fmt: skip

T = TypeVar("T")

# Of the changes that a rule proposes, so many are tried: each evaluates a side once more. Chosen, not
# measured.
_MOST_TRIALS = 32
# Two changes that heal are both named; a third one tells no more. Chosen, not measured.
_MOST_HEALED = 2


class Edit(NamedTuple):
    """A change of one side's recorded program, as what the changed operations give.

    Attributes:
        side: "left" or "right".
        values: the arrays that take the place of values, by index. They are computed from what the side
            itself reads, in the way that a cause says.
    """

    side: str
    values: Mapping[int, Any]


class Slope(NamedTuple):
    """A change of a derivative, which is measured along one direction by finite differences.

    Attributes:
        changed: the slope with the change.
        wanted: the slope that the other side has, or that is lacking.
        before: the slope without the change.
    """

    changed: float
    wanted: float
    before: float

    @property
    def heals(self) -> bool:
        """Whether only the changed slope is the wanted one."""
        return _near(self.changed, self.wanted) and not _near(self.before, self.wanted)


# Changes that are made together, or one that is measured.
Trial: TypeAlias = tuple[Edit, ...] | Slope


@dataclass(frozen=True, slots=True)
class Proposal:
    """What may be the cause, and how to try it.

    Attributes:
        code, sentence: as in a cause.
        trials: ways to make the change; one that heals is enough. None if it cannot be tried.
        change: what is changed, as the beginning of a sentence that says what follows from it.
        measured: the evidence apart from that.
        likely: whether it is still said if none heals; what cannot be tried is.
        remedy: in place of that of the code; "" for none.
        same: what identifies the change; proposals of the same one are the same cause. The sentence, if None.
        by_results: whether it heals only if results agree.
        numbers: as in a cause.
    """

    code: str
    sentence: str
    trials: Iterable[Trial] | None = None
    change: str = ""
    measured: str = ""
    likely: bool = False
    remedy: str | None = None
    same: object = None
    by_results: bool = False
    numbers: tuple[float, float] | None = None


@dataclass(slots=True)
class _Verdict:
    confirmed: list[Cause] = field(default_factory=list)
    likely: list[Cause] = field(default_factory=list)


def judged(scene: Scene, what: str, proposals: Iterable[Proposal]) -> _Verdict:
    """Try what a rule proposes. Proposals that heal under different names are all confirmed: nothing tells
    which of them is meant.

    Args:
        scene: where the programs part.
        what: what the rule changes, such as "constants", for the report.
        proposals: in the order of their likelihood.
    """
    verdict, known, left = _Verdict(), list[object](), _MOST_TRIALS
    for proposal in _of_what_is_known(proposals):
        healed = None
        for trial in _of_what_is_known(islice(proposal.trials or (), left)):
            try:
                healed = _healed(scene, trial, by_results=proposal.by_results)
            except NotRecordedError:
                continue  # a recorded program cannot be run with a change
            left -= 1
            scene.tried[what] += 1
            if healed is not None:
                if not isinstance(trial, Slope):
                    scene.healed.append(trial)
                break
        same = proposal.same or proposal.sentence
        if healed is not None and same not in known:
            known.append(same)
            verdict.confirmed.append(_cause(scene, proposal, f"{proposal.change}{healed}."))
        elif healed is None and (proposal.likely or proposal.trials is None):
            verdict.likely.append(_cause(scene, proposal))
        if len(verdict.confirmed) == _MOST_HEALED or left <= 0:
            break
    return verdict


def _of_what_is_known(found: Iterable[T]) -> Iterator[T]:
    """Yield what a rule finds, up to where it needs a run of a recorded program."""
    with suppress(NotRecordedError):
        yield from found


def told(scene: Scene, proposal: Proposal) -> Cause:
    """Return the cause of one proposal, confirmed if a trial heals."""
    verdict = judged(scene, "", [proposal])
    return next(iter((*verdict.confirmed, *verdict.likely)), None) or _cause(scene, proposal)


def _cause(scene: Scene, proposal: Proposal, healed: str = "") -> Cause:
    remedies = REMEDIES_OF_UPDATES if scene.group.kind == "updated" else REMEDIES
    return Cause(
        code=proposal.code,
        sentence=proposal.sentence,
        evidence=" ".join(filter(None, (proposal.measured, healed))),
        remedy=remedies[proposal.code] if proposal.remedy is None else proposal.remedy,
        confirmed=bool(healed),
        numbers=proposal.numbers,
    )


def applied(comparison: Comparison, trial: Iterable[Edit], until: Group | None = None) -> Comparison:
    """Return the comparison with changes, up to the results of a group if one is given."""
    for side, values in trial:
        comparison = comparison.with_values(side, values, until=until)
    return comparison


def _healed(scene: Scene, trial: Trial, *, by_results: bool) -> str | None:
    """Return what agrees with a change, as the end of a sentence, "" for a measured slope; None if it does
    not heal.

    The results agree, or fewer of them differ, or what follows is computed from equal values again, at least
    what the line gives: further lines may have the same fault. But where the left side's value alone makes
    all results agree, a change that does not do so explains nothing. Nothing follows on an update, so that
    all of it must agree.
    """
    if isinstance(trial, Slope):
        return "" if trial.heals else None
    before, group = scene.comparison, scene.group
    after = applied(before, trial, group)
    if after.agrees(group):
        return f", {_AGREE.get(group.results, 'the results agree')}"
    if scene.alone_heals or group.kind == "updated":
        return None
    fewer = len(group.differing) - len(after.group(group).differing)
    if group.kind == "gradient" and fewer > 0:
        return f", {fewer} more gradients agree"
    if by_results:
        return None
    side = trial[-1].side
    last = max(trial[-1].values, default=0)
    shared = newly_shared(before, after, side, scene.region(side), last)
    if shared and after.meets(scene.found, side) and not before.meets(scene.found, side):
        return ", the two lines give the same"
    return ", what follows is computed from equal values" if shared >= LEAST_SHARED else None


_AGREE = {"gradient": "all gradients agree", "updated": "all updates agree"}


def calls_like(scene: Scene, name: str, step: Step) -> list[Step]:
    """Return a step and what its line does likewise in other calls, such as those of several layers."""
    own = step.place, step.primitive, step.phase, len(step.inputs)
    last = max(getattr(p, name).value for p in scene.group.pairs)
    alike = [
        s
        for s in scene.comparison.side(name).trace.steps
        if (s.place, s.primitive, s.phase, len(s.inputs)) == own and s.outputs[0] <= last
    ]
    return [step] if step.place is None else alike


def in_all_of(
    scene: Scene, name: str, steps: Sequence[Step], make: Callable[[Side, Step], Mapping[int, Any]]
) -> Iterator[Trial]:
    """Yield one change of several steps of a side: each is computed from what the step reads after those
    before it. None if there is one step, or too many.

    Args:
        scene, name: where the programs part, and the side.
        steps: the steps.
        make: gives what a step gives then; nothing if the change cannot be made there.
    """
    comparison, values, changed = scene.comparison, dict[int, Any](), 0
    for call in steps if len(steps) > 1 else ():
        new = make(comparison.side(name), call)
        if new:
            changed += 1
            if changed > MOST_CALLS:
                return
            values.update(new)
            comparison = comparison.with_values(name, new, until=scene.group)
    if changed > 1:
        yield (Edit(name, values),)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= SAME_SLOPE * max(abs(a), abs(b))
