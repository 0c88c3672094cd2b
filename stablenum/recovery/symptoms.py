"""Symptoms: what shows that a run has been hurt, and since when."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from stablenum.guard.readout import StepRecord
from stablenum.guard.reasons import NO_PARAMETER
from stablenum.recovery.buffers import BufferWatch, Noted
from stablenum.recovery.levels import Level
from stablenum.recovery.parameters import Measures, ParameterWatch
from stablenum.recovery.settings import RecoveryPolicy

__all__ = ["Finding", "Symptom", "SymptomCode", "Watch", "first_of"]

_RUNAWAY_NORM = 10.0  # times the usual: Adam makes bursts of several times, of which the loss shows little


class SymptomCode(StrEnum):
    """The kinds of symptoms, in the order in which they are named if several have one origin."""

    NONFINITE_STATE = "nonfinite_state"
    POISONED_MOMENTS = "poisoned_moments"
    RUNAWAY_PARAMETER = "runaway_parameter"
    RUNAWAY_BUFFER = "runaway_buffer"
    SKIPS_IN_A_ROW = "skips_in_a_row"
    NONFINITE_EVALUATION = "nonfinite_evaluation"
    RUNAWAY_LOSS = "runaway_loss"
    RUNAWAY_GRAD_NORM = "runaway_grad_norm"
    REPORTED = "reported"


_ORDER = {code: place for place, code in enumerate(SymptomCode)}


class Symptom(NamedTuple):
    """One symptom.

    Attributes:
        code: its kind.
        step: the step after which it was seen, counted from 1.
        origin: the first step that may have been hurt, counted from 1.
        detail: a clause that says what was seen.
        names: the parameters, buffers or moments concerned; none if that is not known.
    """

    code: SymptomCode
    step: int
    origin: int
    detail: str
    names: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return self._asdict() | {"code": str(self.code), "names": list(self.names)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Symptom:
        """Return the symptom that :meth:`to_dict` described."""
        return cls(**dict(plain) | {"code": SymptomCode(plain["code"]), "names": tuple(plain["names"])})


def first_of(symptoms: Iterable[Symptom]) -> Symptom | None:
    """Return the symptom with the earliest origin; of several, the first kind. None if there is none.

    The order of the symptoms does not matter, so that ranks which join theirs choose the same one.
    """
    return min(symptoms, key=lambda s: (s.origin, _ORDER[s.code], s), default=None)


class Finding(NamedTuple):
    """Something bad in the state: its kind, a clause about it, and the entries concerned."""

    code: SymptomCode
    detail: str
    names: tuple[str, ...]


# By what a look at the parameters returns: the code, and a clause about one parameter and about several.
_WRONG = {
    "negative": (
        SymptomCode.POISONED_MOMENTS,
        "a second moment of 1 parameter is negative",
        "second moments of {} parameters are negative",
    ),
    "unexplained": (
        SymptomCode.POISONED_MOMENTS,
        "the second moments of 1 parameter are such that no gradients produce them",
        "the second moments of {} parameters are such that no gradients produce them",
    ),
    "jumped": (
        SymptomCode.RUNAWAY_PARAMETER,
        "a norm more than doubled, by far more than it ever changed before",
        "{} norms more than doubled, by far more than they ever changed before",
    ),
}


_JUMPED = "{} more than doubled in one step, by far more than {} changed before"


class Watch:
    """Finds symptoms in the guard's record, and in what is measured of the parameters and buffers.

    A row is judged when the next one is there, because only that one says whether the loss scale came down.

    Args:
        policy: the settings.
    """

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._policy = policy
        steps = policy.runaway_steps or 1
        self._loss = Level(policy.window, steps, policy.runaway_threshold)
        self._grad_norm = Level(policy.window, steps, policy.runaway_threshold, _RUNAWAY_NORM)
        self._skips: list[int] = []
        self._parameters = ParameterWatch()
        threshold = policy.buffer_threshold
        self._buffers = None if threshold is None else BufferWatch(threshold, policy.window)
        # Rows have numbers in the guard's count, which is not the run's.
        self._seen = -1  # the newest row that was judged
        self._newest: tuple[int, int] | None = None  # the newest row that was read, and after which step
        self._steps: dict[int, int] = {}  # the steps of the rows that were not yet judged

    @property
    def usual_grad_norm(self) -> float | None:
        """The median gradient norm of the ordinary steps; None before the first."""
        return statistics.median(self._grad_norm.usual) if self._grad_norm.usual else None

    def read(self, rows: Sequence[StepRecord], step: int) -> list[Symptom]:
        """Take in the rows that were not yet judged, and return the symptoms.

        Args:
            rows: the guard's history, oldest first.
            step: how many steps the run has made. If gradients are accumulated over several of them, there
                are fewer rows, and each belongs to the first of its steps, as far as it is known.
        """
        self._place(rows, step)
        found = []
        for row, after in itertools.pairwise(rows):
            if row["step"] > self._seen:
                self._seen = row["step"]
                at = self._steps.get(self._seen, 0)  # 0: it was there before the run
                self._take(row, at, scale_fell=after["loss_scale"] < row["loss_scale"])
                if not row["applied"] and len(self._skips) == self._policy.skips_in_a_row:
                    found.append(self._skipped(row, step))
        self._steps = {number: at for number, at in self._steps.items() if number > self._seen}
        return found + self._runaways(step)

    def look(self, measures: Mapping[str, Measures]) -> list[Finding]:
        """Take in what is measured of each parameter, by name, and return what is wrong."""
        found = self._parameters.look(measures)
        return [
            Finding(code, one if len(names) == 1 else several.format(len(names)), tuple(names))
            for wrong, (code, one, several) in _WRONG.items()
            if (names := found[wrong])
        ]

    def look_at_buffers(self, noted: Iterable[Noted], step: int) -> list[Symptom]:
        """Take in what was measured of the buffers after each step since the last time."""
        found = None if self._buffers is None else self._buffers.look(noted)
        if found is None:
            return []
        origin, names = found
        several = len(names) > 1
        detail = _JUMPED.format(
            f"{len(names)} buffers" if several else "a buffer", "they" if several else "it"
        )
        return [Symptom(SymptomCode.RUNAWAY_BUFFER, step, origin, detail, tuple(names))]

    def _place(self, rows: Sequence[StepRecord], step: int) -> None:
        """Spread the new rows evenly over the steps since the last time that there was one."""
        if not rows:
            return
        last = rows[-1]["step"]
        known, before = self._newest or (max(last - step, rows[0]["step"] - 1), 0)
        for number in range(known + 1, last + 1):
            self._steps[number] = before + 1 + (number - known - 1) * (step - before) // (last - known)
        if last > known:
            self._newest = last, step

    def _take(self, row: StepRecord, at: int, *, scale_fell: bool) -> None:
        if row["applied"]:
            self._skips.clear()
            self._loss.add(at, row["loss"])
            self._grad_norm.add(at, row["grad_norm"])
            self._parameters.add(row)
        elif not scale_fell:
            self._skips.append(at)

    def _skipped(self, row: StepRecord, step: int) -> Symptom:
        name = row["worst"].name
        detail = f"{len(self._skips)} steps in a row were skipped, the last for {row['reason'].name}"
        names = () if name is None or row["reason"] in NO_PARAMETER else (name,)
        return Symptom(SymptomCode.SKIPS_IN_A_ROW, step, self._skips[0], detail, names)

    def _runaways(self, step: int) -> list[Symptom]:
        if self._policy.runaway_steps is None:
            return []
        signals = (
            (SymptomCode.RUNAWAY_LOSS, "loss", self._loss),
            (SymptomCode.RUNAWAY_GRAD_NORM, "gradient norm", self._grad_norm),
        )
        return [
            Symptom(code, step, since, level.described(name))
            for code, name, level in signals
            if (since := level.high_since()) is not None
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which :meth:`load_state_dict` takes."""
        levels = {name: level.state_dict() for name, level in self._levels()}
        levels["parameters"] = self._parameters.state_dict()
        levels["buffers"] = {} if self._buffers is None else self._buffers.state_dict()
        newest = None if self._newest is None else list(self._newest)
        rows = {"seen": self._seen, "newest": newest, "steps": [list(pair) for pair in self._steps.items()]}
        return levels | rows | {"skips": list(self._skips)}

    def load_state_dict(self, plain: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        for name, level in self._levels():
            level.load_state_dict(plain[name])
        self._parameters.load_state_dict(plain["parameters"])
        if self._buffers is not None:
            self._buffers.load_state_dict(plain.get("buffers", {}))  # snapshots of 0.1.0 have none
        self._skips, self._seen = list(plain["skips"]), plain["seen"]
        self._newest = None if plain["newest"] is None else (plain["newest"][0], plain["newest"][1])
        self._steps = dict(plain["steps"])

    def _levels(self) -> tuple[tuple[str, Level], ...]:
        return ("loss", self._loss), ("grad_norm", self._grad_norm)
