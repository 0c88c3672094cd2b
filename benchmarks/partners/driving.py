"""Runs a training loop on the batches with and without the bad one, and resumes it in the middle."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.partners.batches import BAD, SAVED_AFTER, Batch, batches
from benchmarks.partners.outcome import Fault, Outcome, Row, State

__all__ = ["Program", "drive"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training of one partner; its training state may be any object, which ``step`` may change in place.

    Attributes:
        start: returns the state before the first step, the same at each call.
        step: runs one step, and returns the next state and what the partner's log shows.
        state: returns parameters, moments, counters and buffers by name, as arrays of their own.
        schedule: returns the number of the scheduler's steps, or the learning rate.
        save: writes a state to an empty folder, as the partner's documentation says.
        load: returns the state that was saved in a folder, in new objects.
    """

    start: Callable[[], Any]
    step: Callable[[Any, Batch], tuple[Any, Row]]
    state: Callable[[Any], State]
    schedule: Callable[[Any], float]
    save: Callable[[Any, Path], None]
    load: Callable[[Path], Any]


def drive(program: Program, fault: Fault | None) -> Outcome:
    """Train on all batches, saving and resuming once; with a fault, train without the bad batch too."""
    data = batches(fault)
    with tempfile.TemporaryDirectory() as folder:
        outcome = _trained(program, data, Path(folder))
    if fault is None:
        return outcome
    without = [batch for i, batch in enumerate(data) if i != BAD]
    reference = _trained(program, without, None)
    return Outcome(**{**vars(outcome), "reference": reference})


def _trained(program: Program, data: Sequence[Batch], folder: Path | None) -> Outcome:
    now = program.start()
    log, schedule = [], []
    for i, batch in enumerate(data):
        now, row = program.step(now, batch)
        log.append(row)
        schedule.append(program.schedule(now))
        if folder is not None and i == SAVED_AFTER:
            program.save(now, folder)
    resumed = None if folder is None else _resumed(program, data[SAVED_AFTER + 1 :], folder)
    return Outcome(state=program.state(now), log=tuple(log), schedule=tuple(schedule), resumed=resumed)


def _resumed(program: Program, rest: Sequence[Batch], folder: Path) -> State:
    now = program.load(folder)
    for batch in rest:
        now, _ = program.step(now, batch)
    return program.state(now)
