"""How near healthy programs come to the bounds of the rules of ``stablenum checkup``.

``python -m benchmarks.bounds [NAME ...]`` runs the checkup over healthy programs of the corpus
(``torch/methods/lora``, ``jax/silent/c02``; by default all of ``methods`` and some of ``silent``) and puts
what it has measured into ``results/bounds.json``, beside what is there of other programs.

A rule finds something where each of its conditions holds. The margin of a condition is the measured quantity
over its bound, or the other way round where the bound is a least one: from 1 on, it holds. A program comes as
near to a rule as the smallest of the margins of its conditions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stablenum.commands.explain import child
from stablenum.diagnosis.checkup import (
    rules_data,
    rules_flow,
    rules_functions,
    rules_gradients,
    rules_losses,
    rules_normalisation,
    rules_updates,
)
from stablenum.diagnosis.checkup.course import (
    HALFWAY_DOWN,
    NEARLY_DOWN,
    NOT_DOWN,
    PARTLY_DOWN,
    Course,
    ParameterSeen,
    median,
)
from stablenum.diagnosis.checkup.reading import Reading
from stablenum.diagnosis.checkup.symptoms import Symptom
from stablenum.diagnosis.watch.plan import Plan
from stablenum.diagnosis.watch.session import Session

__all__ = ["RULES", "Condition", "measured", "programs"]

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "bounds.json"
# Of the healthy programs of ``silent``, one in so many is measured: about 30 of 108.
_ONE_IN = 4
# A program that takes longer under the checkup, in seconds, is left out; all take less than a minute alone.
_TIMEOUT = 600
# Where a quantity is 0, the margin of its least bound is this.
_ALL = 1e9


class Condition(NamedTuple):
    """One condition of a rule: what is measured, in words, with its number and bound, and the margin."""

    what: str
    value: float
    bound: float
    margin: float


def above(what: str, value: float, bound: float) -> Condition:
    """The condition that a quantity is above its bound."""
    return Condition(what, value, bound, 0.0 if math.isnan(value) else value / bound)


def below(what: str, value: float, bound: float) -> Condition:
    """The condition that a quantity, at least 0, is below its bound."""
    margin = 0.0 if math.isnan(value) else min(_ALL, bound / value) if value > 0 else _ALL
    return Condition(what, value, bound, margin)


def not_down(course: Course, bound: float, *, unknown: bool = True) -> Condition:
    """The condition that the loss has not come down by this part; ``unknown`` is whether a course that cannot
    be read counts as such."""
    fall = course.fall()
    if math.isnan(fall):
        return Condition("the course of the loss is not known", math.nan, bound, _ALL if unknown else 0.0)
    return below("the loss fell by", fall, bound)


def least(conditions: Sequence[Condition]) -> float:
    """How near a rule is."""
    return min((one.margin for one in conditions), default=0.0)


def _nearest(cases: Iterator[list[Condition]]) -> list[Condition]:
    return max(cases, key=least, default=[])


Rule = Callable[[Course, Sequence[Reading]], list[Condition]]
_u, _f, _g, _d, _n, _s = (  # short for their constants
    rules_updates, rules_flow, rules_gradients, rules_data, rules_normalisation, rules_functions,
)  # fmt: skip


def _changes(course: Course) -> list[float]:
    from_zero = course.began_at_zero()
    found = [_u._change(probe, from_zero) for probe in course.probes]
    return [change for change in found if not math.isnan(change)]


def steps_too_large(course: Course, readings: Sequence[Reading]) -> list[Condition]:
    changes, values, fall = _changes(course), course.values, course.fall()
    if not changes or math.isnan(fall):
        return []
    first = above("change of the first step", changes[0], _u._FIRST * _u._LARGE)
    later = above("change per step", max(*changes[1 : _u._NEXT + 1], median(changes), 0.0), _u._LARGE)
    jump = above("the largest loss is times the first", max(values) / abs(values[0] or 1.0), _u._JUMP)
    ways = [
        [size, *course_]
        for size in (first, later)
        for course_ in ([not_down(course, NOT_DOWN)], [jump, not_down(course, HALFWAY_DOWN)])
    ]
    return _nearest(iter(ways))


def steps_too_small(course: Course, readings: Sequence[Reading]) -> list[Condition]:
    changes = _changes(course)
    if not changes or course.steps < _u._FEWEST or not course.fall() > -NOT_DOWN:
        return []
    usual = median(changes)
    total = usual * course.steps
    ways = [
        [below("change per step", usual, _u._SMALL), not_down(course, NOT_DOWN / 2)],
        [below("change in all steps", total, _u._LITTLE), not_down(course, NOT_DOWN / 2)],
        [below("change in all steps", total, _u._HARDLY), not_down(course, HALFWAY_DOWN)],
    ]
    return _nearest(iter(ways))


def saturated(course: Course, readings: Sequence[Reading]) -> list[Condition]:
    def cases() -> Iterator[list[Condition]]:
        for reading in readings:
            since = reading.probe.step
            for step in reading.forward():
                if step.operation not in ("sigmoid", "tanh", "softmax") or not step.outputs:
                    continue
                found, final = reading.signals.get(step.outputs[0]), reading.is_last(step)
                if found is None or math.isnan(found.saturated) or step.index not in reading.differentiated:
                    continue
                if (final and since > _s._EARLY) or (step.operation == "softmax" and not final):
                    continue
                known = not _s._is_learned(course, since)
                part = above(f"saturated part of {step.operation}", found.saturated, _s._SATURATED)
                yield [part, not_down(course, PARTLY_DOWN, unknown=known)]

    return _nearest(cases())


def dead_units(course: Course, readings: Sequence[Reading]) -> list[Condition]:
    parts: dict[object, list[float]] = {}
    for reading in readings:
        for step in reading.forward():
            made = reading.signals.get(step.outputs[0]) if step.outputs else None
            if step.operation == "relu" and made is not None and not math.isnan(made.dead):
                rows = made.size / max(1, made.shape[1 if len(made.shape) in (4, 5) else -1])
                part = made.dead if rows >= _s._ROWS or made.dead == 1.0 else 0.0
                parts.setdefault((step.place, step.module), []).append(part)
    ends = [1.0 if seen[-1] == 1.0 else min(seen[-2:]) for seen in parts.values() if len(seen) > 1]
    return [above("dead part of a layer's units", max(ends), _s._DEAD)] if ends else []


def weight_decay(course: Course, readings: Sequence[Reading]) -> list[Condition]:
    cases = []
    for name in course.names():
        seen = course.history(name)
        first, end = seen[0][1].weight, seen[-1][1].weight
        if len(seen) < 3 or len(seen[0][1].shape) < 2 or not first > 0:
            continue
        along = median([p.shrink for _, p in seen]) * (seen[-1][0] - seen[0][0])
        lost = math.log(first / max(end, _u._TINY))
        reach = _u._reach_of_decay(course, first)
        cases.append(
            [
                below("weights left of their size", end / first, _u._SHRUNK),
                above("shrinking along themselves", along, _u._ALONG),
                above("of the shrinking, decay can do", reach / lost if lost > 0 else 0.0, _u._ITS_PART),
                not_down(course, NEARLY_DOWN),
            ]
        )
    # More than half of the weights have to.
    ordered = sorted(cases, key=least, reverse=True)
    return ordered[int(_u._MOSTLY * len(ordered))] if ordered else []


def lost_updates(course: Course, readings: Sequence[Reading]) -> list[Condition]:
    moved = {probe.step for probe in course.probes if any(p.update > 0 for p in probe.parameters)}
    still: list[tuple[float, ParameterSeen]] = []
    for name in course.names():
        history = [p for step, p in course.history(name) if step in moved]
        seen = [p for p in history if p.has_gradient and p.gradient > 0 and p.rate != 0.0]
        still.append(
            (median([p.still for p in seen[-_u._LAST :]]) if len(seen) > 1 else 0.0, history[-1])
            if history
            else (0.0, course.history(name)[-1][1])
        )
    narrow = [part for part, p in still if "16" in p.dtype or "8" in p.dtype]
    return [above("part that did not change", max([_by_size(still), *narrow]), _u._MOSTLY)] if still else []


def _by_size(parts: Collection[tuple[float, ParameterSeen]]) -> float:
    """The largest number that is reached by parameters with half of all elements."""
    total, reached = sum(p.size for _, p in parts), 0
    for part, p in sorted(parts, key=lambda one: -one[0]):
        reached += p.size
        if reached >= _u._MOSTLY * total:
            return part
    return 0.0


def flushed_gradients(course: Course, readings: Sequence[Reading]) -> list[Condition]:
    def cases() -> Iterator[list[Condition]]:
        for reading in readings:
            for step in reading.trace.steps:
                made = reading.signals.get(step.outputs[0]) if step.outputs else None
                if step.phase != "backward" or made is None or step.operation in _g._ZEROING or made.size < 2:
                    continue
                narrow = made.dtype in ("float16", "bfloat16")
                plain = step.operation in ("mul", "div", "cast") or narrow
                read = [
                    s for i in step.inputs if (s := reading.signal(i)) is not None and s.size == made.size
                ]
                if not plain or not read or any(_g._is_closed(reading, i) for i in step.inputs):
                    continue
                factors = [s.zero for i in step.inputs if (s := reading.signal(i)) is not None]
                if 0.0 in step.scalars or math.fsum(factors) >= made.zero:
                    continue
                before = max(s.zero for s in read)
                yield [
                    below("zeros before an operation", before, _g._ZERO_BEFORE),
                    above("zeros after it", made.zero, _g._ZERO_AFTER),
                ]

    return _nearest(cases())


def batch_norm(course: Course, readings: Sequence[Reading]) -> list[Condition]:
    last = readings[-1] if readings else None
    if last is None or course.steps < _n._SETTLED:
        return []
    steps = last.probe.step + (not last.probe.running)

    def cases() -> Iterator[list[Condition]]:
        for one in last.probe.running or _n._in_trace(last):
            if math.isnan(one.batch_variance) or not one.batch_variance > 0 or not one.variance.mean > 0:
                continue
            slow = (1 - one.momentum) ** course.steps > _n._LEFT
            if steps < _n._SETTLED and not slow:
                continue
            left = 0.0 if math.isnan(one.momentum) or slow else (1 - one.momentum) ** steps
            apart, shift = (_n._NEARER, _n._HALF) if slow else (_n._APART, _n._WHOLE)
            ways = []
            for variance, mean in (
                (one.batch_variance, one.batch_mean),
                (left + (1 - left) * one.batch_variance, (1 - left) * one.batch_mean),
            ):
                ratio = one.variance.mean / variance
                away = abs(one.mean.rms - mean) / math.sqrt(one.batch_variance)
                both = [
                    above("variances apart by a factor of", max(ratio, 1 / ratio), apart),
                    above("deviations between the means", away, shift),
                ]
                ways.append([max(both, key=lambda c: c.margin)])
            yield min(ways, key=least)

    return _nearest(cases())


def _activations(course: Course, readings: Sequence[Reading], grows: bool) -> list[Condition]:
    chain = readings[0].chain if readings and readings[0].probe.step == 0 else []
    sizes = [layer.output.rms for layer in chain]
    first = next((s for s in sizes if s > 0), 0.0)
    if len(chain) < _f._LEAST_LAYERS or not first:
        return []
    low = min((s for s in sizes[1:] if s > 0), default=first)
    ratio = max(sizes) / first if grows else first / low
    return [above("ratio along the layers", ratio, _f._RATIO), not_down(course, HALFWAY_DOWN)]


def _gradients(course: Course, readings: Sequence[Reading], grows: bool) -> list[Condition]:
    def cases() -> Iterator[list[Condition]]:
        for reading in readings[: _f._FIRST]:
            norms = [g.norm for layer in reading.chain if (g := reading.gradient(layer.step)) and g.norm > 0]
            if len(norms) >= _f._LEAST_LAYERS:
                ratio = norms[0] / norms[-1] if grows else norms[-1] / norms[0]
                what = "ratio of the gradients"
                yield [above(what, ratio, _f._GRADIENT_RATIO), not_down(course, PARTLY_DOWN)]

    return _nearest(cases())


def unscaled_input(course: Course, readings: Sequence[Reading]) -> list[Condition]:
    for layer in readings[0].chain if readings else ():
        found = layer.input
        if found is not None and readings[0].is_data(layer.source) and found.size > 1 and found.rms > 0:
            ways = [above("RMS", found.rms, _d._INPUT), below("RMS", found.rms, _d._SMALL)]
            return [max(ways, key=lambda c: c.margin), not_down(course, NEARLY_DOWN)]
    return []


def unscaled_target(course: Course, readings: Sequence[Reading]) -> list[Condition]:
    def cases() -> Iterator[list[Condition]]:
        for step, output, data in readings[0].targets() if readings else ():
            target, made = readings[0].signal(data), readings[0].signal(output)
            if target is not None and made is not None and step.operation in _d._COMPARING:
                yield [
                    above("RMS of the targets", target.rms, _d._INPUT),
                    above("times the output's", target.rms / max(made.rms, _d._SMALL), _d._TARGET),
                    not_down(course, NEARLY_DOWN),
                ]

    return _nearest(cases())


def eps_dominates(course: Course, readings: Sequence[Reading]) -> list[Condition]:
    last = course.probes[-1].parameters if course.probes else ()
    for kind, settings in course.settings:
        eps = settings.get("eps")
        if not eps or "ada" not in kind.lower() or not last:
            continue
        far = _u._FAR_BELOW if eps <= _u._USUAL_EPS else 1.0
        parts = [(eps / p.gradient if p.has_gradient and p.gradient > 0 else 0.0, p) for p in last]
        reached = _by_size(parts)
        return [below("gradient over eps", 1 / reached if reached > 0 else math.inf, far)]
    return []


def stale_state(course: Course, readings: Sequence[Reading]) -> list[Condition]:
    eps = max((s.get("eps", 0.0) for kind, s in course.settings if "adam" in kind.lower()), default=None)
    if eps is None or len(course.probes) < _u._STALE:
        return []
    ratios = []
    for probe in course.probes[-_u._LAST :]:
        moving = [p for p in probe.parameters if p.update > 0 and p.rate > 0 and len(p.shape) > 1]
        seen = [p for p in moving if p.gradient > _u._FAR_ABOVE * eps and _u._is_adams(p, course)]
        ratios.append(median([p.update / p.rate for p in seen]) if seen else math.inf)
    bound = _u._OF_THE_RATE if course.loaded_state is None else _u._LOADED
    return [below("steps over the rate", max(ratios), bound), not_down(course, NEARLY_DOWN)]


def clipped_always(course: Course, readings: Sequence[Reading]) -> list[Condition]:
    clips = [c for c in course.clips if c.bound > 0 and math.isfinite(c.norm)]
    over = [c for c in clips if c.norm > c.bound]
    if len(clips) <= _u._CLIPS or not over:
        return []
    ratio = median([c.norm / c.bound for c in over])
    adaptive = any("ada" in kind.lower() or "li" in kind.lower() for kind, _ in course.settings)
    down = PARTLY_DOWN if adaptive or ratio < _u._SHORTER else NEARLY_DOWN
    return [
        above("part of the steps that was clipped", len(over) / len(clips), _u._CLIPPED),
        above("norm over its bound", ratio, _u._SMALLER),
        not_down(course, down, unknown=False),
    ]


def loss_oscillates(course: Course, readings: Sequence[Reading]) -> list[Condition]:
    values = [v for v in course.values if math.isfinite(v)]
    size = median([abs(v) for v in values])
    if len(values) < rules_losses._LEAST or not size > 0:
        return []
    steps = [abs(b - a) for a, b in itertools.pairwise(values)]
    turns = sum((b - a) * (c - b) < 0 for a, b, c in zip(values, values[1:], values[2:]))
    return [
        above("part of the steps that turn", turns / (len(values) - 2), rules_losses._TURNS),
        above("by this part of the loss", median(steps) / size, rules_losses._FAR),
        not_down(course, PARTLY_DOWN, unknown=False),
    ]


def constant_output(course: Course, readings: Sequence[Reading]) -> list[Condition]:
    spreads = []
    for reading in readings[-_d._LAST :]:
        output = reading.output()
        found = None if output is None else reading.signal(output[1])
        if found is None or math.isnan(found.spread) or found.shape[0] < 2:
            return []
        given = reading.chain[0].input
        if given is not None and given.spread < _d._CONSTANT:
            return []
        spreads.append(found.spread)
    if len(spreads) < 2:
        return []
    return [below("spread of the outputs", max(spreads), _d._CONSTANT), not_down(course, NEARLY_DOWN)]


def _softmax(course: Course, readings: Sequence[Reading], symptom: Symptom) -> list[Condition]:
    def cases() -> Iterator[list[Condition]]:
        for reading in readings:
            begins = reading.probe.step == 0 and not course.loaded
            entropy, logit = _s._AT_FIRST if begins else _s._LATER
            for step in reading.forward():
                if step.operation != "softmax" or step.index not in reading.differentiated:
                    continue
                router = symptom is Symptom.ROUTER_COLLAPSE
                if reading.is_last(step) and not (router and reading.weighs(step)):
                    continue
                made = reading.signals.get(step.outputs[0]) if step.outputs else None
                into = _s._logits(reading, step)
                if made is None or math.isnan(made.entropy) or made.shape[-1] < 2:
                    continue
                if router is not (len(made.shape) > 2):
                    size = max(abs(into.least), abs(into.greatest)) if into is not None else math.nan
                    yield (
                        [below("experts in use", made.used, _s._few_of(made.shape[-1]))]
                        if router
                        else [below("entropy", made.entropy, entropy), above("largest logit", size, logit)]
                    )

    return _nearest(cases())


S = Symptom
RULES: dict[Symptom, Rule] = {
    S.FLUSHED_GRADIENTS: flushed_gradients,
    S.LOST_UPDATES: lost_updates,
    S.UNSCALED_INPUT: unscaled_input,
    S.UNSCALED_TARGET: unscaled_target,
    S.EXPLODING_ACTIVATIONS: lambda course, readings: _activations(course, readings, True),
    S.VANISHING_ACTIVATIONS: lambda course, readings: _activations(course, readings, False),
    S.BATCH_NORM: batch_norm,
    S.STALE_STATE: stale_state,
    S.EPS_DOMINATES: eps_dominates,
    S.WEIGHT_DECAY: weight_decay,
    S.STEPS_TOO_LARGE: steps_too_large,
    S.DEAD_UNITS: dead_units,
    S.SATURATED: saturated,
    S.ROUTER_COLLAPSE: lambda course, readings: _softmax(course, readings, S.ROUTER_COLLAPSE),
    S.ATTENTION_COLLAPSE: lambda course, readings: _softmax(course, readings, S.ATTENTION_COLLAPSE),
    S.EXPLODING_GRADIENTS: lambda course, readings: _gradients(course, readings, True),
    S.VANISHING_GRADIENTS: lambda course, readings: _gradients(course, readings, False),
    S.CLIPPED_ALWAYS: clipped_always,
    S.STEPS_TOO_SMALL: steps_too_small,
    S.CONSTANT_OUTPUT: constant_output,
    S.LOSS_OSCILLATES: loss_oscillates,
}


def measured(course: Course) -> dict[str, list[Condition]]:
    """The conditions of each rule that applies to a training, by its symptom."""
    seen = [Reading(probe) for probe in course.probes]
    readings = [reading for reading in seen if reading.first_use()] or seen
    found = {symptom.value: rule(course, readings) for symptom, rule in RULES.items()}
    return {name: conditions for name, conditions in found.items() if conditions}


def programs() -> list[str]:
    """The names of the healthy programs that are measured by default."""
    corpus = ROOT / "corpus"
    methods = [f"{p.parent.name}/methods/{p.stem}" for p in sorted((corpus / "methods").glob("*/*.py"))]
    answers = json.loads((corpus / "silent" / "answers.json").read_text(encoding="utf-8"))
    healthy = [name.replace("/", "/silent/") for name, one in answers.items() if one["kind"] == "healthy"]
    return [*methods, *healthy[::_ONE_IN]]


class _Measuring(Session):
    """A session that writes what was measured, instead of a report."""

    target = Path()

    def judge(self, course: Course, changes: Any) -> None:
        super().judge(course, changes)
        found = {
            name: [[c.what, *map(_number, c[1:])] for c in conditions]
            for name, conditions in measured(course).items()
        }
        self.target.write_text(json.dumps(found), encoding="utf-8")


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _written(report: dict[str, Any]) -> str:
    """The results as JSON, a line for each rule of a program."""
    parts = []
    for name, rules in sorted(report.items()):
        lines = ",\n".join(f"  {json.dumps(rule)}: {json.dumps(seen)}" for rule, seen in rules.items())
        parts.append(f" {json.dumps(name)}: {{" + (f"\n{lines}\n }}" if lines else "}"))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _run_one(script: Path, target: Path) -> None:
    """Run a script in this process, watched, and write what was measured."""
    _Measuring.target = target
    plan = Plan(
        script=str(script), arguments=(), module=False, seed=0, finite=False, checkup=True, steps=None
    )
    child.run(_Measuring(plan))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure programs, and put the figures into the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bounds", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--child", nargs=2, metavar=("SCRIPT", "TARGET"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        _run_one(*map(Path, options.child))
        return
    environment = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"} | os.environ
    for name in options.names or programs():
        framework, kind, stem = name.split("/")
        script = ROOT / "corpus" / kind / framework / f"{stem}.py"
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "measured.json")
            line = [sys.executable, "-m", "benchmarks.bounds", "--child", str(script), str(target)]
            where = {**environment, "PYTHONPATH": str(ROOT)}
            try:
                subprocess.run(
                    line, cwd=folder, env=where, capture_output=True, timeout=_TIMEOUT, check=False
                )
            except subprocess.TimeoutExpired:
                print(f"{name}: left out, it took more than {_TIMEOUT} s", flush=True)
                continue
            found = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
        known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        RESULTS.write_text(_written({**known, name: found}), encoding="utf-8")
        print(f"{name}: {len(found)} rules apply", flush=True)


if __name__ == "__main__":
    main()
