"""Rules on the running statistics of batch normalisations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from stablenum.diagnosis.checkup.course import Course, Running
from stablenum.diagnosis.checkup.reading import Reading
from stablenum.diagnosis.checkup.signals import Signal
from stablenum.diagnosis.checkup.symptoms import Complaint, Level, Symptom
from stablenum.diagnosis.replay.source_files import lines_with
from stablenum.diagnosis.replay.trace import Step
from stablenum.diagnosis.replay.values import Place

__all__ = ["LAGGING", "RULES", "SLOW", "UNFELT"]

# After so many steps running statistics with momentum 0.1 are those of the data; further apart than by this
# factor they are not. Fewer values per channel than this give no statistics.
_SETTLED, _APART, _FEW = 50, 4.0, 4
# Of statistics with a small momentum more than this part is still the initial one; then they need not be so
# far apart. If a new batch counts more than this, it is the training that is short.
_LEFT, _NEARER, _USUAL = 0.5, 2.0, 0.009
# After so many steps statistics have moved away from mean 0 and variance 1, if anything moves them.
_MOVED = 10
# In evaluation mode, what a layer gives is far from size 1 if it is below the first or above the second.
_LITTLE, _MUCH = 0.1, 10
# Means may be so many deviations apart: of statistics with a small momentum, and of others.
_HALF, _WHOLE = 0.5, 1.0

_OUTPUTS = 5  # running mean and variance, the result, and mean and inverse deviation of the batch
_MODES = r"\.eval\(\)|\.train\(|\btrain=|training=|use_running_average|deterministic="
_EVALUATING = (
    "it runs in evaluation mode",
    "train in training mode: model.train() (PyTorch, flax.nnx), use_running_average=False (flax.linen)",
)
_DROPPED = (
    "the step computes new ones, but the script does not keep them",
    "hand the statistics that the step computes to the next step and to the evaluation",
)
# The cure of running statistics that do not keep up with those of the batches.
LAGGING = (
    "let a new batch count 0.1 (momentum 0.1 in PyTorch, 0.9 in flax), with at least 16 values per channel; "
    "if that is so, the data or the weights change too fast: lower the learning rate"
)
# The cure of running statistics that are mostly what they were before the first step.
SLOW = (
    "let a new batch count more (momentum 0.1 in PyTorch, 0.9 in flax), or train for more steps before you "
    "evaluate"
)
# With these cures, only an evaluation reads the statistics: the training itself computes those of the batch.
UNFELT = (LAGGING, SLOW, _DROPPED[1])


def _normalisation(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield a batch norm whose running statistics are not those of the batches, or are used in training."""
    last = readings[-1] if readings else None
    if last is None:
        return
    # What is not in the trace was measured before the step.
    steps = last.probe.step + (not last.probe.running)
    for one in last.probe.running or _in_trace(last):
        found = _unfit(one, course, steps)
        if found is not None:
            shown, cure = found
            short = cure == SLOW and one.momentum > _USUAL
            yield Complaint.of(
                Symptom.BATCH_NORM,
                Level.NOTE if short else Level.WARNING,
                shown,
                module=one.module,
                place=course.initialised.get(one.name, one.place),
                places=(*one.frames[::-1], *_modes(course, shown)),
                **({"cure": cure} if cure else {}),
            )
            return


def _modes(course: Course, shown: str) -> tuple[Place, ...]:
    """Return the script's lines that choose the evaluation mode, if that is what is wrong."""
    return lines_with(course.step_place, _MODES) if _EVALUATING[0] in shown else ()


def _unfit(one: Running, course: Course, steps: int) -> tuple[str, str] | None:
    """Return what is wrong with running statistics of so many steps, with a cure if there is a special
    one."""
    if _is_still(one.mean, one.variance) and not _ended_before(course, _MOVED):
        how, cure = _EVALUATING if math.isnan(one.batch_variance) else _DROPPED
        return f"after {steps} steps the running mean is still 0 and the variance 1: {how}", cure
    slow = (1 - one.momentum) ** course.steps > _LEFT
    if course.steps < _SETTLED or (_ended_before(course, _SETTLED) and not slow):
        return None
    if math.isnan(one.batch_variance):
        if one.made is None or _LITTLE < one.made.rms < _MUCH or one.name not in course.inside:
            return None
        return f"{_EVALUATING[0]}, with running statistics that leave values of size {one.made.rms:.2g}", ""
    count = _FEW if one.made is None else one.made.size / max(1, one.mean.size)
    if count < _FEW:
        return f"its statistics come from {count:.0f} values per channel", ""
    if not (one.batch_variance > 0 and 0 < one.variance.mean < math.inf):
        return None
    return _slow(one, course, steps) if slow else _lagging(one, steps)


def _is_still(mean: Signal, variance: Signal) -> bool:
    """Return whether statistics are the ones with which a layer begins."""
    return mean.rms == 0.0 and variance.least == variance.greatest == 1.0


def _slow(one: Running, course: Course, steps: int) -> tuple[str, str] | None:
    """Return what is wrong with statistics that are mostly the initial ones when the training ends."""
    if _near(one, one.batch_variance, one.batch_mean, _NEARER, _HALF):
        return None
    left = (1 - one.momentum) ** course.steps
    counts = f"a batch counts {one.momentum:.2g} against the initial statistics"
    return f"{_distance(one, steps)}; {counts}, of which {left:.0%} is left after {course.steps} steps", SLOW


def _lagging(one: Running, steps: int) -> tuple[str, str] | None:
    """Return what is wrong with statistics that are neither those of the batches nor still on their way there
    from mean 0 and variance 1."""
    if _near(one, one.batch_variance, one.batch_mean, _APART, _WHOLE):
        return None
    left = 0.0 if math.isnan(one.momentum) else (1 - one.momentum) ** steps
    expected = left + (1 - left) * one.batch_variance, (1 - left) * one.batch_mean
    return None if _near(one, *expected, _APART, _WHOLE) else (_distance(one, steps), LAGGING)


def _near(one: Running, variance: float, mean: float, apart: float, shift: float) -> bool:
    """Return whether running statistics are about these: the variance within a factor, the mean within so
    many standard deviations of the batch."""
    ratio = one.variance.mean / variance
    return max(ratio, 1 / ratio) < apart and abs(one.mean.rms - mean) <= shift * math.sqrt(one.batch_variance)


def _distance(one: Running, steps: int) -> str:
    """Return how far running statistics are from those of the batch, in words."""
    ratio = one.variance.mean / one.batch_variance
    shift = abs(one.mean.rms - one.batch_mean) / math.sqrt(one.batch_variance)
    return (
        f"after {steps} steps its running variance is {ratio:.2g} times that of the batch, and its running "
        f"mean is {shift:.2g} standard deviations away"
    )


def _ended_before(course: Course, step: int) -> bool:
    """Return whether the last measured step came before this one."""
    return course.probes[-1].step < step


def _in_trace(reading: Reading) -> Iterator[Running]:
    """Return the running statistics that batch norms of the trace have left."""
    for step in reading.forward():
        if step.operation != "batch_norm" or len(step.outputs) < _OUTPUTS:
            continue
        seen = [reading.signals.get(i) for i in step.outputs]
        mean, variance, made, batch_mean, inverse = seen[0], seen[1], seen[2], seen[-2], seen[-1]
        if mean is None or variance is None:
            continue
        # What runs without gradients only, as a teacher does, is measured against the first statistics alone.
        if step.index not in reading.differentiated and not _is_still(mean, variance):
            continue
        yield Running(
            name=_weight_of(reading, step),
            place=step.place,
            frames=(),
            mean=mean,
            variance=variance,
            batch_mean=math.nan if batch_mean is None else batch_mean.rms,
            batch_variance=math.nan if inverse is None or not inverse.rms else inverse.rms**-2,
            made=made,
            module=step.module,
            momentum=step.scalars[0] if step.scalars else math.nan,
        )


def _weight_of(reading: Reading, step: Step) -> str:
    return next(
        (v.name for i in step.inputs if (v := reading.trace.values[i]).role == "parameter" and v.name), ""
    )


RULES = (_normalisation,)
