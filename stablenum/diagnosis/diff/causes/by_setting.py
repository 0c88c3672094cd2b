"""Name the cause by setting one argument of an operation otherwise: a number, an axis or a flag."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.causes.by_constant import code_of_constant, numbers_near, strangeness
from stablenum.diagnosis.diff.causes.judge import Edit, Proposal, Trial, in_all_of
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.places.flow import OTHER
from stablenum.diagnosis.diff.places.frontier import same_line
from stablenum.diagnosis.diff.sides.calls import Call, Setting, calls_of
from stablenum.diagnosis.diff.sides.kinds import quiet
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["by_setting"]

# Of the operations of a line, so many are called with other settings, and with so many in all. Chosen, not
# measured.
_MOST_STEPS, _MOST_SETTINGS = 8, 48
# A whole number says how large something is, how far apart, or how often; a larger one may ask for more
# memory than there is. Chosen, not measured.
_LARGEST = 64
_SAME = "Set it to the same on both sides."


def by_setting(scene: Scene) -> Iterator[Proposal]:
    """Propose other arguments for the operations of a line: the numbers of the other side's line, other axes,
    and flags the other way round."""
    lines = {
        name: [s for s in (start.step, *same_line(start, region)[1:]) if not quiet(s)][:_MOST_STEPS]
        for name, _, start, region in scene.forward_starts()
    }
    calls = {n: calls_of(scene.comparison.side(n), [s.index for s in line]) for n, line in lines.items()}
    for name, line in lines.items():
        side, others = scene.comparison.side(name), calls.get(OTHER[name], {})
        numbers = {n for n, _ in numbers_near(scene, OTHER[name]).values()}
        numbers |= {s.value for c in others.values() for s in c.settings() if not isinstance(s.value, bool)}
        arrays = arrays_of(side, {v for s in line for v in (*s.inputs, *s.outputs)})
        tried = (
            (step, setting, new)
            for step in line
            if step.index in calls[name]
            for setting in calls[name][step.index].settings()
            for new in _others(setting, numbers, len(side.shapes[step.inputs[0]]) if step.inputs else 0)
        )
        for step, setting, new in islice(tried, _MOST_SETTINGS):
            changed = calls[name][step.index].changed(setting.place, new)
            made = changed.made(arrays, side.shapes)
            if made is not None and any(not np.array_equal(made[o], arrays[o]) for o in made):
                yield _proposal(scene, name, (step, line), calls[name], (changed, made), setting, new)


def _others(setting: Setting, numbers: Iterable[float], axes: int) -> Iterator[float | bool]:
    """Yield what a setting may be in place of what it is, the likeliest first."""
    if isinstance(setting.value, bool):
        yield not setting.value
    elif setting.is_axis:
        yield from (k for k in range(axes) if k not in (setting.value, setting.value + axes))
    else:
        own = type(setting.value)
        fit = (n for n in numbers if math.isfinite(n) and n != setting.value and own(n) == n)
        small = (n for n in fit if own is float or abs(n) <= _LARGEST)
        yield from (own(n) for n in sorted(small, key=lambda n: (strangeness(setting.value, n), n)))


def _proposal(
    scene: Scene,
    name: str,
    at: tuple[Step, Sequence[Step]],
    calls: Mapping[int, Call],
    changed: tuple[Call, Mapping[int, Any]],
    setting: Setting,
    new: float | bool,
) -> Proposal:
    step, line = at
    here, there = (new, setting.value) if name == "right" else (setting.value, new)
    what = f"{setting.name} " if setting.name else ""
    told = (
        f"in {step.operation}, the flag {what}is {here} in the left program and {there} in the right one."
        if isinstance(new, bool)
        else f"in {step.operation}, the left program uses {what}{here:g} and the right one {there:g}."
    )
    code = _code(scene, name, step, setting, new)
    return Proposal(
        code,
        told,
        _trials(scene, name, (step, line), calls, changed[1], setting, new),
        f"With {changed[0]} in place of {calls[step.index]} on the {name}",
        remedy=_SAME if code == "other_function" else None,
        same=(step.operation, here, there),
        numbers=None if isinstance(new, bool) else (here, there),
    )


def _trials(
    scene: Scene,
    name: str,
    at: tuple[Step, Sequence[Step]],
    calls: Mapping[int, Call],
    made: Mapping[int, Any],
    setting: Setting,
    new: float | bool,
) -> Iterator[Trial]:
    """Yield the change of one operation, and of each place in its line where the number stands: in operations
    of that name, and in all."""
    yield (Edit(name, made),)
    step, line = at
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
    if changed is None or changed is call:
        return {}
    return changed.made(arrays_of(side, step.inputs), side.shapes) or {}


def _code(scene: Scene, name: str, step: Step, setting: Setting, new: float | bool) -> str:
    if setting.is_axis:
        norms = any(word in step.operation for word in ("norm", "mean", "var", "std"))
        return "softmax_axis" if "softmax" in step.operation else "norm_axis" if norms else "other_function"
    if isinstance(setting.value, bool):
        return "other_function"
    return code_of_constant(step, scene, name, (setting.value, new))
