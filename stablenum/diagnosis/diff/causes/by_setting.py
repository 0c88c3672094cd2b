"""Name the cause by setting one argument of an operation otherwise: a number, an axis or a flag."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.causes.by_constant import code_of_constant, numbers_near
from stablenum.diagnosis.diff.causes.judge import Edit, Proposal, Trial, in_all_of
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.places.frontier import Start, same_line
from stablenum.diagnosis.diff.sides.calls import Call, Setting, calls_of
from stablenum.diagnosis.diff.sides.kinds import quiet
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["by_setting"]

# Of the operations of a line, so many are called with other settings, each of which has a few. Chosen, not
# measured.
_MOST_STEPS = 8
_FLAG = "{}is {} in {} of the left program, and {} in that of the right one."
_SAME = "Set it to the same on both sides."


def by_setting(scene: Scene) -> Iterator[Proposal]:
    """Propose other arguments for the operations of a line: the numbers of the other side's line, other axes,
    and flags the other way round."""
    for name, side, start, region in scene.forward_starts():
        other = "left" if name == "right" else "right"
        steps = [s for s in same_line(start, region) if not quiet(s)][:_MOST_STEPS]
        calls = calls_of(side, [s.index for s in steps])
        theirs = {n for n, _ in numbers_near(scene, other).values()}
        for step in (s for s in steps if s.index in calls):
            for setting in calls[step.index].settings():
                for new in _others(setting, theirs, len(side.shapes[step.inputs[0]]) if step.inputs else 0):
                    changed = calls[step.index].changed(setting.place, new)
                    made = changed.made(side)
                    if made is not None and _differ(side, made):
                        yield _proposal(scene, name, step, (calls[step.index], changed, made), setting, new)


def _others(setting: Setting, numbers: Iterable[float], axes: int) -> Iterator[float | bool]:
    """Yield what a setting may be in place of what it is."""
    if isinstance(setting.value, bool):
        yield not setting.value
    elif setting.is_axis:
        yield from (k for k in range(axes) if k not in (setting.value, setting.value + axes))
    else:
        own = type(setting.value)
        finite = sorted(n for n in numbers if math.isfinite(n) and n != setting.value)
        yield from (own(n) for n in finite if own(n) == n)


def _differ(side: Side, made: Mapping[int, Any]) -> bool:
    """Return whether some values are not what a side computes."""
    return not all(np.array_equal(made[o], a) for o, a in arrays_of(side, made).items())


def _proposal(
    scene: Scene,
    name: str,
    step: Step,
    calls: tuple[Call, Call, Mapping[int, Any]],
    setting: Setting,
    new: float | bool,
) -> Proposal:
    call, changed, made = calls
    here, there = (new, setting.value) if name == "right" else (setting.value, new)
    what = f"{setting.name} " if setting.name else ""
    code = _code(scene, name, step, setting)
    return Proposal(
        code,
        _FLAG.format(what, here, step.operation, there)
        if isinstance(new, bool)
        else f"the left program uses {what}{here:g}, the right one {there:g} in {step.operation}.",
        _trials(scene, name, step, made, setting, new),
        f"With {changed} in place of {call} on the {name}, the two sides agree.",
        remedy=_SAME if code == "other_function" else None,
        same=(here, there),
    )


def _trials(
    scene: Scene, name: str, step: Step, made: Mapping[int, Any], setting: Setting, new: float | bool
) -> Iterator[Trial]:
    """Yield the change of one operation, and of each place in its line where the number stands: in operations
    of that name, and in all."""
    yield (Edit(name, made),)
    line = same_line(Start(step), scene.region(name))
    calls = calls_of(scene.comparison.side(name), [s.index for s in line])
    for steps in ([s for s in line if s.operation == step.operation], line):
        yield from in_all_of(scene, name, steps, partial(_set, calls, setting, new))


def _set(
    calls: Mapping[int, Call], setting: Setting, new: float | bool, side: Side, step: Step
) -> Mapping[int, Any]:
    """Return what a step gives with a number set otherwise, wherever it stands in the call; nothing where it
    does not stand."""
    call = changed = calls.get(step.index)
    for own in [] if call is None else call.settings():
        if changed is not None and (own.name, own.value) == (setting.name, setting.value):
            changed = changed.changed(own.place, new)
    return {} if changed is None or changed is call else changed.made(side) or {}


def _code(scene: Scene, name: str, step: Step, setting: Setting) -> str:
    if setting.is_axis:
        norms = any(word in step.operation for word in ("norm", "mean", "var", "std"))
        return "softmax_axis" if "softmax" in step.operation else "norm_axis" if norms else "other_function"
    if isinstance(setting.value, bool):
        return "other_function"
    return code_of_constant(step, scene, name)
