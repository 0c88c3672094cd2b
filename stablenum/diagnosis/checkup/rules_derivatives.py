"""Rules on gradients that are not the derivative of the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stablenum.diagnosis.checkup.course import Course
from stablenum.diagnosis.checkup.custom_derivatives import CustomDerivative, Difference
from stablenum.diagnosis.checkup.reading import Reading
from stablenum.diagnosis.checkup.symptoms import Complaint, Level, Symptom
from stablenum.diagnosis.checkup.wording import places_of
from stablenum.diagnosis.replay.trace import Step
from stablenum.diagnosis.replay.values import Place

__all__ = ["RULES"]

# A derivative that differs by less is an approximation or rounded: one in bfloat16 is good to 1 %. Chosen.
_APART = 0.05
# One that differs by less than the first, and whose direction is right to this cosine, may be meant as an
# approximation, such as that of an implicit layer. Chosen, not measured.
_APPROXIMATE, _DIRECTION = 0.3, 0.95
# More than this part of the steps, and at least so many, is no accident.
_OFTEN, _LEAST_OFTEN = 0.5, 2

_WRITTEN = "compare it with the ordinary derivative: torch.autograd.gradcheck on inputs in float64"
_WRITTEN_JAX = "compare it with the ordinary derivative: jax.test_util.check_grads on inputs in float64"


def _custom(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield functions whose derivative, as the script has written it, is that of another function."""
    seen = set[object]()
    for one in course.custom:
        # In JAX a rule gives None or 0 also for arguments that nobody differentiates.
        asked = [d for d in one.differences if course.framework == "torch" or d.written > 0 or _alone(one)]
        wrong = [d for d in asked if d.apart > _APART]
        key = one.name, one.written
        if not wrong or key in seen:
            continue
        seen.add(key)
        worst = max(wrong, key=lambda d: d.apart)
        yield Complaint.of(
            Symptom.WRONG_GRADIENT,
            Level.WARNING if all(map(_may_be_meant, wrong)) else Level.FAULT,
            f"{one.name}, {_input(worst, one)}: {_in_words(worst)}",
            since=one.step,
            place=one.written or one.place,
            places=places_of(one.place),
            cure=f"correct what {one.name} returns as the derivative; "
            + (_WRITTEN if course.framework == "torch" else _WRITTEN_JAX),
        )


def _alone(one: CustomDerivative) -> bool:
    return len(one.differences) + len(one.flat) == 1


def _may_be_meant(one: Difference) -> bool:
    return one.apart < _APPROXIMATE and one.along > _DIRECTION


def _input(one: Difference, of: CustomDerivative) -> str:
    return f"input {one.input}" if len(of.differences) + len(of.flat) > 1 else "its input"


def _in_words(one: Difference) -> str:
    if one.written == 0.0:
        return f"the derivative that it returns is exactly 0, that of what it computes is {one.actual:.3g}"
    ratio = one.written / one.actual
    opposite = ", in the opposite direction" if one.along < -_DIRECTION else ""
    angle = f", with a cosine of {one.along:.2g}" if abs(one.along) <= _DIRECTION else ""
    return (
        f"the derivative that it returns is {ratio:.3g} times as large as that of what it computes"
        f"{opposite}{angle} (they are {one.apart:.0%} apart)"
    )


def _overwritten(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield derivatives that read numbers which were written after the operation that they belong to."""
    for one in course.custom:
        if one.overwritten:
            yield _damaged(one.name, one.step, (*one.writers, one.place, one.written))
            return
    for reading in readings:
        found = next(_late_writes(reading), None)
        if found is not None:
            operation, writer = found
            yield _damaged(operation.operation, reading.probe.step, (writer.place, operation.place))
            return


def _damaged(name: str, step: int, places: Sequence[Place | None]) -> Complaint:
    known = places_of(*places)
    return Complaint.of(
        Symptom.WRONG_GRADIENT,
        Level.FAULT,
        f"the derivative of {name} reads numbers that were overwritten after the forward pass had used them",
        since=step,
        place=next(iter(known), None),
        places=known[1:],
        what="what the backward pass needs was overwritten without autograd's knowledge, so the gradient is "
        "that of other numbers",
        cure="write into a copy, or after the backward pass; .data, NumPy and kernels that write through "
        "pointers hide a write from autograd",
    )


def _late_writes(reading: Reading) -> Iterator[tuple[Step, Step]]:
    """Return operations with the later step that wrote what their derivatives read."""
    steps, values = reading.trace.steps, reading.trace.values
    passes = [s.index for s in steps if s.phase == "backward"]
    for index, backwards in reading.backwards.items():
        # In a backward pass checkpoints compute again what the forward pass has computed.
        end = next((i for i in passes if i > index), index)
        for step in backwards:
            made = [values[i].producer for i in step.inputs]
            late = [steps[i] for i in made if i is not None and index < i < end and steps[i].writes]
            yield from ((steps[index], writer) for writer in late)


def _summed(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield gradients to which a part of the loss contributes twice."""
    steps = {step for step, _, _ in course.summed_twice}
    if len(steps) < _LEAST_OFTEN or len(steps) < _OFTEN * course.steps:
        return
    _, first, second = course.summed_twice[0]
    yield Complaint.of(
        Symptom.WRONG_GRADIENT,
        Level.FAULT,
        f"in {len(steps)} of {course.steps} steps a backward pass starts at a loss that contains "
        "another loss, whose gradients are already there",
        since=min(steps),
        place=second,
        places=places_of(first),
        what="gradients are summed twice: one loss is a part of another one, and both are differentiated",
        cure="call backward() once, on the sum of all losses; or clear the gradients in between",
    )


# What is done with a gradient that is a sum over devices -> what that means, and how certain a fault it is:
# a loss that the script has divided by the number of devices has the right sum.
_SUMMED = {
    "vmap": (Level.FAULT, "that of an example is the sum of one example of each device"),
    "psum": (Level.FAULT, "another sum multiplies it by their number"),
    "pmean": (Level.WARNING, "its mean over them is still that sum"),
}


def _over_devices(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield gradients of replicated parameters that shard_map has summed over devices."""
    for one in course.over_devices[:1]:
        level, meaning = _SUMMED[one.then]
        axes = ", ".join(map(repr, one.axes))
        yield Complaint.of(
            Symptom.WRONG_GRADIENT,
            level,
            f"jax.{'vmap' if one.then == 'vmap' else f'lax.{one.then}'} of gradients of parameters that are "
            f"the same on all devices along {axes}, with a loss that is not",
            place=one.place,
            what="inside shard_map the gradient of a replicated parameter is summed over the devices, so "
            + meaning,
            cure="make the parameters vary before they are differentiated, "
            f"params = jax.lax.pcast(params, ({axes},), to='varying'), then combine what is to be combined",
            expects="gradients of each device's own loss",
        )


RULES = (_custom, _overwritten, _summed, _over_devices)
