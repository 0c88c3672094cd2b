"""Name the cause of a difference where a call reads other values than its counterpart."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice, product, takewhile

from stablenum.diagnosis.diff.causes.judge import Edit, Proposal, Trial
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.places.flow import OTHER
from stablenum.diagnosis.diff.places.frontier import same_line
from stablenum.diagnosis.diff.sides.calls import calls_of
from stablenum.diagnosis.diff.sides.equality import SAME_ARRAY
from stablenum.diagnosis.diff.sides.fingerprints import distance
from stablenum.diagnosis.diff.sides.kinds import called
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["by_input"]

# A call that reads more other values than these is another call. Chosen, not measured.
_MOST_READ = 3
_SIDES = ("right", "left")


def by_input(scene: Scene) -> Iterator[Proposal]:
    """Propose that the same operation reads different values on the two sides, or the same function of the
    user's does, which also reads a value that both have."""
    starts = {name: (side, start.step) for name, side, start, _ in scene.forward_starts()}
    for inner in product((True, False), repeat=2) if len(starts) == 2 else ():
        calls = dict(zip(_SIDES, inner, strict=True))
        reads = {name: _read_by_call(*starts[name], inner=i) for name, i in calls.items()}
        common = {name: _met(scene, name, reads[OTHER[name]][1]) for name in calls}
        kept = {name: _unmet_parameters(scene, name, reads[name][0]) for name in calls}
        reads = {name: _read_by_call(*starts[name], common[name], inner=i) for name, i in calls.items()}
        reads = {name: (read | kept[name], made) for name, (read, made) in reads.items()}
        own = {name: _read_alone(scene, name, reads) for name in _SIDES}
        alike = called(starts["left"][1]) == called(starts["right"][1]) or _share(scene, reads)
        if alike and 0 < len(own["left"]) == len(own["right"]) <= _MOST_READ:
            here, there = (" and ".join(_told(starts[n][0], v) for v in own[n]) for n in OTHER)
            one, function = len(own["left"]) == 1, called(starts["left"][1])
            yield Proposal(
                "other_input",
                f"{function} reads {here} in the left program, and {there} in the right one.",
                _given(scene, own["left"][0], own["right"][0]) if one else (),
                "With the value that the left program reads",
                likely=True,
            )
            return


def _given(scene: Scene, mine: int, theirs: int) -> Iterator[Trial]:
    """Yield the right program with its own counterpart of what the left one reads: everywhere, and in the
    line alone, so that what else is made of the one that it reads stays as it is."""
    start, side = scene.found.right, scene.right
    line = [] if start is None else (start.step, *same_line(start, scene.found.region_right))
    reading = {s.index: s for s in line if theirs in s.inputs}
    for value in scene.comparison.found.known("left").get(mine, ()):
        if side.shapes[value] != side.shapes[theirs]:
            continue
        array = arrays_of(side, [value])[value]
        yield (Edit("right", {theirs: array}),)
        calls = calls_of(side, list(reading)) if reading else {}
        made = [
            call.made({**arrays_of(side, reading[at].inputs), theirs: array}, side.shapes)
            for at, call in calls.items()
        ]
        yield from ((Edit("right", new),) for new in made if new is not None)


def _share(scene: Scene, reads: Mapping[str, tuple[set[int], set[int]]]) -> bool:
    """Return whether both calls read a common value."""
    return any(not reads["left"][0].isdisjoint(scene.shared.get(j, ())) for j in reads["right"][0])


def _met(scene: Scene, name: str, values: set[int]) -> set[int]:
    """Return the values of a side that are equal to some of the other one."""
    known = scene.comparison.found.known(OTHER[name])
    return {v for value in values for v in known.get(value, ())}


def _unmet_parameters(scene: Scene, name: str, values: set[int]) -> set[int]:
    """Return the parameters that only one side has: what is made with them may yet be equal to a value of the
    other side, as with a scale of ones."""
    known, side = scene.comparison.found.known(name), scene.comparison.side(name)
    return {v for v in values if v not in known and side.trace.values[v].role == "parameter"}


def _read_by_call(
    side: Side, step: Step, common: Collection[int] = (), *, inner: bool
) -> tuple[set[int], set[int]]:
    """Return the telling values from which the call to which a step belongs makes its last value, and with
    them what it makes on the way.

    Args:
        side, step: the step.
        common: values that the call reads, rather than what they are made of, even if it makes them.
        inner: whether the call is that of its line, rather than that of the user's function around it.
    """
    steps, found, seen = side.trace.steps, set[int](), set[int]()
    if not inner and len(step.frames) < 2:
        return found, seen  # the whole program
    following = islice(steps, step.index + 1, None)
    *_, last = (step, *takewhile(lambda s: _in_call(s, step, inner=inner), following))
    todo = list(last.inputs)
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        producer = side.trace.values[value].producer
        if value not in common and producer is not None and _in_call(steps[producer], step, inner=inner):
            todo += steps[producer].inputs
        elif not side.neutral(value) or side.trace.values[value].role == "parameter":
            found.add(value)
    return found, seen


def _in_call(one: Step, step: Step, *, inner: bool) -> bool:
    if one.module != step.module:
        return False
    return one.place == step.place if inner else len(step.frames) > 1 and one.frames[:-1] == step.frames[:-1]


def _read_alone(scene: Scene, name: str, read: Mapping[str, tuple[set[int], set[int]]]) -> list[int]:
    """Return what the call of one side reads, and the other side has but neither reads nor makes there;
    parameters also if the other side does not have them."""
    known, side = scene.comparison.found.known(name), scene.comparison.side(name)
    other, further = scene.comparison.side(OTHER[name]), read[OTHER[name]][1]

    def alone(value: int) -> bool:
        if value in known:
            return further.isdisjoint(known[value])
        parameter, mark = side.trace.values[value].role == "parameter", side.prints[value]
        return parameter and not any(distance(mark, other.prints[v]) <= SAME_ARRAY for v in further)

    return sorted(v for v in read[name][0] if alone(v))


def _told(side: Side, value: int) -> str:
    known = side.trace.values[value]
    if known.producer is None:
        return f"{known.role} {known.name}".strip()
    step = side.trace.steps[known.producer]
    line = "" if step.place is None else f", line {step.place.line}"
    return f"the value of {step.operation}{line}"
