"""Rules on state that should follow a training and does not move."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from stablenum.diagnosis.checkup.course import Copy, Course
from stablenum.diagnosis.checkup.reading import Reading
from stablenum.diagnosis.checkup.signals import Signal
from stablenum.diagnosis.checkup.symptoms import Complaint, Level, Symptom
from stablenum.diagnosis.checkup.wording import joined, lines_assigning, places_of
from stablenum.diagnosis.replay.source_files import lines_with
from stablenum.diagnosis.replay.trace import Step, Value

__all__ = ["RULES"]

# In fewer steps an average or a table need not be updated once. Chosen, not measured.
_FEWEST = 20
# A copy of one of these names is meant to follow the model; a reference or a teacher may be frozen.
_FOLLOWS = re.compile(r"(?<![a-z])(target|ema|averaged?|momentum|shadow|slow|polyak|lagged)(?![a-z])", re.I)
# Lines that update a copy.
_UPDATES = r"zip\(.*(parameters|leaves)\(|incremental_update|\.lerp_?\(|tree\.map\(|tree_map\("
# Operations that look up rows, and those that choose them.
_ROWS = frozenset({"embedding", "gather", "index", "index_select", "take"})
_CHOICES = frozenset({"argmax", "argmin", "topk", "min", "max"})


def _copies(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield averages that leave out running statistics, and target networks that are never updated."""
    if course.steps < _FEWEST:
        return
    for one in course.copies:
        if one.moved and one.still:
            yield _left_out(one, course)
        elif not one.moved and one.equal and _FOLLOWS.search(one.name):
            name = one.name.rpartition(".")[2]
            if lines_with(course.step_place, rf"\b{re.escape(name)}\b.*(load_state_dict|copy_)\("):
                continue  # the script updates it after more steps than these
            assigned = lines_assigning(name, course.step_place)
            yield Complaint.of(
                Symptom.STILL_STATE,
                Level.WARNING,
                f"{one.name} is what {one.of or 'the trained model'} was when the training began, after "
                f"{course.steps} steps",
                place=next(iter(assigned), course.step_place),
                places=(*assigned[1:], *lines_with(course.step_place, _UPDATES)),
                what="a copy of the model that is meant to follow it has never been updated",
                cure="update it every few steps, and keep what the update returns; if it is meant to stay, "
                "nothing is wrong",
                expects="a copy that follows the model",
            )


def _left_out(one: Copy, course: Course) -> Complaint:
    updates = lines_with(course.step_place, _UPDATES)
    return Complaint.of(
        Symptom.STILL_STATE,
        Level.FAULT if one.runs else Level.NOTE,  # it may be done before the copy is used
        f"the parameters of {one.name or 'a copy of the model'} follow those of {one.of or 'the model'}, but "
        f"{joined(one.still)} stayed as they were for {course.steps} steps",
        place=next(iter(updates), course.step_place),
        places=(*updates[1:], *lines_assigning(one.name.rpartition(".")[2], course.step_place)),
        what="the moving average leaves out running statistics, so the copy is evaluated with old ones",
        cure="copy or average the buffers too: zip(model.buffers(), average.buffers()), "
        "torch.optim.swa_utils.AveragedModel(..., use_buffers=True), or the batch_stats in flax",
        expects="the same results as the model's",
    )


def _table(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield tables whose nearest rows are looked up and trained on, but never change."""
    if len(readings) < 2 or course.steps < _FEWEST:
        return
    last = readings[-1]
    for step, table in _looked_up(last):
        name = table.name
        before = next((v.id for v in readings[0].trace.values if v.name == name and v.producer is None), None)
        seen = [None if before is None else readings[0].signals.get(before), last.signals.get(table.id)]
        if not name or seen[0] is None or seen[1] is None or _sizes(seen[0]) != _sizes(seen[1]):
            continue
        yield Complaint.of(
            Symptom.STILL_STATE,
            Level.WARNING,
            f"{name} {list(seen[0].shape)}: the same numbers in step {last.probe.step} as in step "
            f"{readings[0].probe.step}, while its nearest rows are looked up for what the model computes",
            place=step.place,
            places=places_of(course.initialised.get(name), *lines_assigning(name, course.step_place)),
            module=step.module,
            parameters=(name,),
            what="a codebook that is in use never changes",
            cure="train it (a codebook loss, with the table as a parameter of the optimizer), or update it "
            "by a moving average and keep the result; a table that is fixed on purpose is not a fault",
            expects="rows that move towards what chooses them",
        )
        return


def _sizes(signal: Signal) -> tuple[float, ...]:
    """Return what tells whether an array has changed."""
    return signal.rms, signal.mean, signal.least, signal.greatest


def _looked_up(reading: Reading) -> Iterator[tuple[Step, Value]]:
    """Return look-ups in a table whose rows were chosen by comparing the table with what is trained."""
    values = reading.trace.values
    behind = {
        v.id: {v.id} for v in values if v.producer is None
    }  # the values from outside that one depends on
    chosen: dict[int, set[int]] = {}  # those on which the choices depend that made one
    trained = {v.id for v in values if v.role == "parameter" and v.producer is None}
    nothing = set[int]()
    for step in reading.forward():
        sources = nothing.union(*(behind.get(i, nothing) for i in step.inputs))
        choices = nothing.union(*(chosen.get(i, nothing) for i in step.inputs))
        choices |= sources if step.operation in _CHOICES else nothing
        behind.update(dict.fromkeys(step.outputs, sources))
        chosen.update(dict.fromkeys(step.outputs, choices))
        table = behind.get(step.inputs[0], nothing) if step.inputs else nothing
        if step.operation in _ROWS and len(table) == 1 and table < choices and choices & trained:
            yield step, values[next(iter(table))]


RULES = (_copies, _table)
