"""How the NumPy adapter goes back: the specification of what the other adapters do for a recovery."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from stablenum.guard.readout import StepRecord
from stablenum.recovery.buffers import Noted
from stablenum.recovery.hooks import Easing
from stablenum.recovery.logged import Why
from stablenum.recovery.parameters import Measures
from stablenum.recovery.settings import Response
from stablenum.recovery.snapshots import Snapshot
from stablenum.recovery.symptoms import Finding, Symptom, SymptomCode
from stablenum.reference.guarded import Guarded
from stablenum.reference.optimizers import AdamState

__all__ = ["Generators", "Hooks"]


class Generators:
    """The default generators of NumPy and of Python."""

    def read(self) -> Any:
        """Return their states."""
        return np.random.get_state(), random.getstate()  # the legacy generator is the default

    def write(self, states: Any) -> None:
        """Put states back."""
        numpy, python = states
        np.random.set_state(numpy)
        random.setstate(python)


class Hooks:
    """What a :class:`stablenum.recovery.loop.RecoveryLoop` asks of a training with NumPy.

    Args:
        guarded: the training.
    """

    def __init__(self, guarded: Guarded) -> None:
        self._guarded, self._lr = guarded, guarded.optimizer.lr
        self.generators = Generators()

    def check_beginning(self) -> None:
        """Do nothing: it begins with what it was given."""

    def capture(self) -> Any:
        """Return a copy of the parameters, of the states and of the generators."""
        guarded = self._guarded
        state = guarded._params, guarded.opt_state, guarded.state
        return *copy.deepcopy(state), self.generators.read()

    def restore(self, state: Any) -> None:
        """Put a captured state back."""
        guarded, (*parts, generators) = self._guarded, state
        guarded._params, guarded.opt_state, guarded.state = copy.deepcopy(parts)
        self.generators.write(generators)

    def log(self, why: Why, before: Sequence[StepRecord]) -> None:
        """Do nothing: there is no log."""

    def rows(self) -> Sequence[StepRecord]:
        """Return the guard's history."""
        return self._guarded.history()

    def counts(self) -> None:
        """Return None: the guard gets the gradients of each step."""

    def findings(self) -> list[Finding]:
        """Return the parameters and moments that are not finite."""
        guarded = self._guarded
        names = guarded.names or [str(i) for i in range(len(guarded._params))]
        entries = zip(names, zip(guarded._params, guarded.opt_state, strict=True), strict=True)
        bad = tuple(name for name, arrays in entries if not _is_finite(arrays))
        detail = "parameters or moments are not finite"
        return [Finding(SymptomCode.NONFINITE_STATE, detail, bad)] if bad else []

    def measures(self) -> dict[str, Measures]:
        """Return the norm of each parameter, and the extremes of Adam's second moments."""
        guarded = self._guarded
        names = guarded.names or [str(i) for i in range(len(guarded._params))]
        entries = zip(names, guarded._params, guarded.opt_state, strict=True)
        return {name: Measures(_norm(p), *_second_moments(state)) for name, p, state in entries}

    def note_buffers(self, step: int) -> None:
        """Do nothing: the reference has parameters and moments alone."""

    def noted_buffers(self) -> list[Noted]:
        """Return nothing, for the same reason."""
        return []

    def possible(self, response: Response) -> Response:
        """Return it; what is not specified here is an error in :meth:`ease`."""
        return response

    def ease(self, easing: Easing | None) -> None:
        """Lower the learning rate, or take the usual one again.

        Raises:
            ValueError: the easing clips or widens, which is not specified here.
        """
        if easing is not None and (easing.clip_at is not None or easing.wider):
            raise ValueError("the reference can ease the learning rate alone; leave clip and wider out.")
        rate = 1.0 if easing is None else easing.rate
        optimizer: Any = self._guarded.optimizer
        self._guarded.optimizer = dataclasses.replace(optimizer, lr=self._lr * rate)

    def agree(self, symptoms: list[Symptom]) -> list[Symptom]:
        """Return them: there is one process."""
        return symptoms

    def shared(self, value: Any) -> Any:
        """Return it: there is one process."""
        return value

    def save(self, snapshot: Snapshot, held: Sequence[int]) -> None:
        """Do nothing: snapshots are held in memory alone."""

    def load(self) -> list[Snapshot]:
        """Return nothing, for the same reason."""
        return []


def _norm(parameter: Any) -> float:
    return float(np.linalg.norm(np.abs(np.asarray(parameter)).astype(np.float64)))


def _second_moments(state: Any) -> tuple[float, float]:
    """Return the lowest and the largest."""
    if not isinstance(state, AdamState):
        return 0.0, 0.0
    second = state.exp_avg_sq
    return float(second.min(initial=0.0)), float(second.max(initial=0.0))


def _is_finite(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_finite, value))
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if value is None:
        return True
    return bool(np.isfinite(np.asarray(value).astype(np.float32)).all())
