"""The table that says when each rule of the checkup speaks, and how near healthy programs come to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measured import dense, table

from stablenum.diagnosis.checkup.symptoms import Symptom

__all__ = ["PRECONDITIONS", "nearest", "write_bounds"]

# Programs that are shown for each rule.
_SHOWN = 2


class Precondition(NamedTuple):
    """When a rule speaks: its level, what it needs at least, and where it is silent or gives a note."""

    level: str
    needs: str
    silent: str


S, P = Symptom, Precondition
PRECONDITIONS: dict[Symptom, Precondition] = {
    S.NO_GRAPH: P("fault", "a backward pass", ""),
    S.NOT_IN_MODEL: P("fault", "a step", "a gradient reaches the parameters, or a module has them"),
    S.NOT_IN_OPTIMIZER: P(
        "fault; warning if an optimizer has them",
        "a step; 2 measured ones if an optimizer has them",
        "note for a part in front of all that is trained, if the loss fell by 10 %; if an optimizer has "
        "them, for less than half of the elements, or if the loss fell by half",
    ),
    S.RATE_ZERO: P(
        "fault; warning if it is not quite 0", "4 steps; 11", "not quite 0, and the loss fell by half"
    ),
    S.CAPTURED_PARAMETERS: P("fault", "3 steps", ""),
    S.INDEX_OUT_OF_RANGE: P("fault", "a measured step", "the script has given a mode"),
    S.GRADIENTS_KEPT: P("fault", "3 such steps", "in half of the steps or fewer, as in an accumulation"),
    S.OPTIMIZER_RENEWED: P(
        "fault",
        "3 such steps, or 5 new optimizers",
        "note if most steps have the optimizer of the step before, and the loss fell by 90 %",
    ),
    S.WRONG_GRADIENT: P(
        "fault; warning if it may be an approximation, or a mean of what is a sum already",
        "a measured step; 2, and half of all, for a loss that counts twice",
        "the function hands its input on, is a step function, or gives other numbers in another call; "
        "5 % apart or less",
    ),
    S.UPHILL_UPDATES: P(
        "warning; fault if complex gradients are not conjugated",
        "3 measured steps",
        "the loss falls (complex: by 90 %); note if it is to rise, or is 0 or below",
    ),
    S.FLUSHED_GRADIENTS: P(
        "fault", "a measured step", "factors of 0, such as masks and closed gates; ReLU, dropout, `where`"
    ),
    S.LOST_UPDATES: P(
        "fault in 16 bits and below, else warning",
        "2 measured steps that move something",
        "in 32 bits, if less than half of all elements are concerned",
    ),
    S.BROADCAST_LOSS: P("fault", "a measured step", ""),
    S.WRONG_AXIS: P("fault", "a measured step", "time and batch are of one length"),
    S.ACTIVATION_BEFORE_LOSS: P("fault", "a measured step", "a layer stands between them"),
    S.UNSCALED_INPUT: P("warning; fault above 300", "a measured step", "note if the loss fell by 90 %"),
    S.UNSCALED_TARGET: P("warning", "a measured step", "note if the loss fell by 90 %"),
    S.ALIKE_UNITS: P("fault", "2 measured steps", "weights or gradients are 0"),
    S.EXPLODING_ACTIVATIONS: P("fault", "3 layers in a row, in step 0", "note if the loss fell by half"),
    S.VANISHING_ACTIVATIONS: P(
        "fault", "3 layers in a row, in step 0", "note if the loss fell by half; branches that begin at 0"
    ),
    S.BATCH_NORM: P(
        "warning",
        "50 steps; 10 for statistics that are still 0 and 1",
        "statistics that are still on their way from 0 and 1; note if the training is short",
    ),
    S.SAME_RANDOM_NUMBERS: P("warning", "5 measured steps", "one of them draws others"),
    S.BAD_STATE: P("fault", "a step", ""),
    S.STILL_STATE: P(
        "fault for statistics of a copy that is called, else warning",
        "20 steps",
        "the name of a copy does not say that it follows; note if the copy is not called in the training",
    ),
    S.STALE_STATE: P(
        "warning; fault after loading a state",
        "3 measured steps; 2",
        "another optimizer, gradients below 10 eps; note if the loss fell by 90 %",
    ),
    S.EPS_DOMINATES: P("warning; fault above 1e-5, if the loss did not fall by 90 %", "a measured step", ""),
    S.WEIGHT_DECAY: P(
        "fault", "3 measured steps", "the loss fell by 90 %, or rate, decay and steps cannot do half of it"
    ),
    S.STEPS_TOO_LARGE: P(
        "fault",
        "4 losses",
        "the course of the loss is not known; after k steps, a weight that began at 0 counts only above "
        "3 / √k of its size",
    ),
    S.NO_GRADIENT: P(
        "fault; warning if no line cuts it off", "a measured step", "note if all are vectors, as biases are"
    ),
    S.ZERO_GRADIENT: P("fault", "2 measured steps, the last from 10 on", "note if all are vectors"),
    S.DETACHED: P("fault", "3 rounds", "nothing is detached between them"),
    S.DEAD_UNITS: P(
        "fault; warning if the loss fell by 30 % and not all are dead",
        "2 measured steps",
        "fewer than 8 rows, unless all units are dead",
    ),
    S.SATURATED: P(
        "fault",
        "a measured step",
        "the last activation after step 2; note if the loss fell by 30 %, or if its course is not known and "
        "small steps have led there",
    ),
    S.ATTENTION_COLLAPSE: P("fault; warning if the loss fell by 30 %", "a measured step", "rows of a matrix"),
    S.ROUTER_COLLAPSE: P("fault; warning if the loss fell by 30 %", "a measured step", "more than two axes"),
    S.EXPLODING_GRADIENTS: P("fault", "3 layers in a row", "note if the loss fell by 30 %"),
    S.VANISHING_GRADIENTS: P("fault", "3 layers in a row", "note if the loss fell by 30 %"),
    S.CLIPPED_ALWAYS: P(
        "warning",
        "3 clippings",
        "note if the loss fell by 30 %; by 90 % without Adam, if the norm is 100 times its bound",
    ),
    S.LOSS_SCALE: P("warning", "10 scales", "the scale is where it began"),
    S.STEPS_TOO_SMALL: P(
        "warning",
        "20 steps",
        "the loss rose by 10 %, or its course is not known; note if the script has loaded parameters",
    ),
    S.CONSTANT_OUTPUT: P(
        "fault",
        "the last 3 measured steps, or 2",
        "all items of the batch are the same; note if the loss fell by 90 %",
    ),
    S.NOT_FINITE: P("fault", "a measured step", ""),
    S.LOSS_NOT_FINITE: P(
        "fault", "a loss", "note if the last loss is finite, or under a guard the one before it"
    ),
    S.LOSS_DIVERGES: P(
        "fault; warning for an objective without a lower bound",
        "10 losses",
        "the script multiplies the objective by a number that grows, as a barrier method does",
    ),
    S.LOSS_OSCILLATES: P("warning", "10 losses", "the loss fell by 30 %, or its course is not known"),
    S.LOSS_CONSTANT: P(
        "fault",
        "10 losses",
        "constant by construction: parameters move along gradients that differ from step to step",
    ),
}


def nearest(report: dict[str, Any], symptom: str) -> list[tuple[float, str, list[Any]]]:
    """The programs to which a rule applies, the nearest first: how near, the name, and the conditions."""
    found = [
        (min(c[-1] for c in rules[symptom]), n, rules[symptom])
        for n, rules in report.items()
        if symptom in rules
    ]
    return sorted(found, key=lambda one: -one[0])


def write_bounds(results: Path, directory: Path) -> None:
    """Write ``checkup-bounds.md``: when each rule speaks, and the healthy programs that come nearest.

    Raises:
        FileNotFoundError: nothing has been measured.
        ValueError: a symptom has no preconditions.
    """
    if not results.exists():
        raise FileNotFoundError(f"{results}: missing; `python -m benchmarks.bounds` writes it")
    if set(PRECONDITIONS) != set(Symptom):
        raise ValueError(f"no preconditions of {sorted(set(Symptom) - set(PRECONDITIONS))}")
    report: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    rows = [
        [f"`{symptom.value}`", *one, _shown(nearest(report, symptom.value))]
        for symptom, one in PRECONDITIONS.items()
    ]
    head = ["symptom", "level", "needs at least", "silent, or a note, where", "nearest healthy programs"]
    methods = sum("/methods/" in name for name in report)
    measured = f"{methods} programs of `corpus/methods` and {len(report) - methods} of `corpus/silent`."
    lines = [*dense(table(head, rows)), "", f"Measured: {measured}"]
    (directory / "checkup-bounds.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _shown(programs: Sequence[tuple[float, str, list[Any]]]) -> str:
    near = [one for one in programs if one[0] > 0][:_SHOWN]
    return "<br>".join(
        f"{_percent(part)}: `{name}`, {_figures(conditions)}" for part, name, conditions in near
    )


def _figures(conditions: Sequence[Any]) -> str:
    return "; ".join(_figure(*condition) for condition in conditions)


def _figure(what: str, value: float | None, bound: float, _margin: float) -> str:
    if value is None:
        return what
    if what.startswith("the loss fell"):
        return f"the loss {'fell' if value >= 0 else 'rose'} by {_percent(abs(value))} ({_percent(bound)})"
    return f"{what} {_number(value)} ({_number(bound)})"


def _number(x: float) -> str:
    """Three digits; all of them between a thousand and a million."""
    return f"{x:,.0f}" if 1000 <= abs(x) < 1e6 else f"{x:.3g}"


def _percent(x: float) -> str:
    return f"{x:.0%}".replace("%", " %")
