"""Place a difference of two updates by its cause.

Two optimizers that agree share few values on the way: one corrects its moments for their start, the other
one its rate. The first operation that has no counterpart may thus be innocent. If the numbers say what
differs, the operation that does it is named instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from stablenum.diagnosis.diff.places.frontier import Frontier, Start
from stablenum.diagnosis.diff.sides.kinds import kind, quiet
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.diff.weights.parameter_uses import hands_on
from stablenum.diagnosis.replay.trace import Step
from stablenum.diagnosis.replay.values import Place

__all__ = ["placed_by_cause"]

_SUMS = {"add", "sub", "addcdiv"}
_ROOTS = {"sqrt", "rsqrt"}
_EPSILONS = {"adam_epsilon_placement", "epsilon_value"}


def placed_by_cause(code: str, place: Frontier, left: Side, right: Side) -> tuple[Start | None, Start | None]:
    """Return where each side begins to differ, given what differs; where that is not known, as it was.

    Args:
        code: the cause.
        place: where the sides part as far as values tell.
        left, right: the sides.
    """
    does = _DOES.get(code)
    if does is None:
        return place.left, place.right
    return (
        _placed(code, does, place.left, place.region_left, left),
        _placed(code, does, place.right, place.region_right, right),
    )


def _placed(
    code: str, does: Callable[[str], bool], start: Start | None, region: Iterable[Step], side: Side
) -> Start | None:
    if start is None or does(_function(start.step)):
        return start
    if not start.step.library:
        step = _by_hand(code, region, side) or _of_library(code, does, region)
        return start if step is None else Start(step)
    if not start.step.library.startswith("optax."):
        step = _shrinking(region, side) if code.startswith("decay") else None
        return start if step is None else Start(step)
    step = next((s for s in region if does(_function(s))), None) or _elsewhere(start, does, side)
    if step is not None:
        return Start(step)
    return replace(start, place=_line_that(does, side), missing=code.startswith("decay"))


def _elsewhere(start: Start, does: Callable[[str], bool], side: Side) -> Step | None:
    """Return the nearest step of the update that does what differs for other parameters, as a part of the
    optimizer does that leaves some out."""
    steps = [s for s in side.trace.steps if s.phase == "update" and s.library and does(_function(s))]
    return min(steps, key=lambda s: abs(s.index - start.step.index), default=None)


def _line_that(does: Callable[[str], bool], side: Side) -> Place | None:
    """Return the line of the part of the optimizer that does what differs, although none of its operations
    leads to the difference; without such a part, that of the whole."""
    site = side.program.optimizer_at
    if site is None:
        return None
    return next((place for name, place in site.parts.items() if does(name)), site.place)


def _by_hand(code: str, region: Iterable[Step], side: Side) -> Step | None:
    """Return the step that does what differs in an update that is written out."""
    if code.startswith("decay"):
        return _decaying(region, side)
    return _at_root(region) if code in _EPSILONS else None


def _at_root(region: Iterable[Step]) -> Step | None:
    """Return the first root that is written out; the epsilon stands in it or beside it."""
    return next((s for s in region if not s.library and s.place and kind(s) in _ROOTS), None)


def _of_library(code: str, does: Callable[[str], bool], region: Iterable[Step]) -> Step | None:
    """Return the first step of a library that does what differs, after what is written out around it. An
    optimizer of PyTorch does all but clip."""
    steps = [s for s in region if s.library]
    whole = [s for s in steps if s.library.startswith("torch.optim.") and not code.startswith("clip")]
    return next((s for s in steps if does(_function(s))), None) or next(iter(whole), None)


def _decaying(region: Iterable[Step], side: Side) -> Step | None:
    """Return the first operation of an update that computes with a parameter, other than the last sum."""
    reading = [s for s in region if not quiet(s) and any(_is_parameter(side, i) for i in s.inputs)]
    updated = {r.value for r in side.play.results if r.kind == "updated"}
    return next((s for s in reading if s.operation not in _SUMS or not updated.intersection(s.outputs)), None)


def _shrinking(region: Iterable[Step], side: Side) -> Step | None:
    """Return the first operation of an optimizer of PyTorch that multiplies a parameter, or adds it to what
    the moments are made of."""
    updated = {r.value for r in side.play.results if r.kind == "updated"}
    steps = (
        s for s in region if s.library.startswith("torch.optim.") and not updated.intersection(s.outputs)
    )
    return next((s for s in steps if any(_is_parameter(side, _uncast(side, i)) for i in s.inputs)), None)


def _uncast(side: Side, value: int) -> int:
    """Return the value that was handed on to another one, such as one of a narrower format."""
    producer = side.trace.values[value].producer
    while producer is not None and hands_on(side.trace.steps[producer]):
        if len(side.trace.steps[producer].inputs) != 1:
            break
        (value,) = side.trace.steps[producer].inputs
        producer = side.trace.values[value].producer
    return value


def _is_parameter(side: Side, value: int) -> bool:
    updated = any(r.value == value for r in side.play.results if r.kind == "updated")
    return updated or side.trace.values[value].role == "parameter"


def _function(step: Step) -> str:
    return step.library.rpartition(".")[2]


def _decays(name: str) -> bool:
    return "decay" in name


def _clips(name: str) -> bool:
    return "clip" in name


def _has_a_schedule(name: str) -> bool:
    return name == "scale" or "schedule" in name or "learning_rate" in name


def _has_a_rate(name: str) -> bool:
    return name == "apply_updates" or _has_a_schedule(name)


def _has_momentum(name: str) -> bool:
    return name in ("trace", "ema") or "momentum" in name


def _has_moments(name: str) -> bool:
    return name.startswith("scale_by_") and not _has_a_rate(name)


def _nothing(name: str) -> bool:
    return False


# Cause -> whether a function of a library does what differs.
_DOES: dict[str, Callable[[str], bool]] = {
    "decay_coupling": _decays, "decay_excluded": _decays,
    "clip_epsilon": _clips, "clip_missing": _clips, "clip_per_tensor": _clips,
    "schedule_offset": _has_a_schedule, "loss_scale_left_in": _nothing,
    "scale": _has_a_rate,
    "betas": _has_moments, "momentum": _has_momentum,
    "momentum_dampening": _has_momentum, "nesterov": _has_momentum,
    "adam_epsilon_placement": _has_moments, "epsilon_value": _has_moments, "bias_correction": _has_moments,
}  # fmt: skip
