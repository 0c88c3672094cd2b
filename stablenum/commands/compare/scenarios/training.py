"""Trainings: a model, batches, and what is wrong with some of the batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from stablenum._support.settings_checks import check_choice, check_int, check_number
from stablenum.commands.compare.scenarios.shared import DTYPES, Expected, OptimizerSpec, Tolerance, check_name
from stablenum.errors import bad_field, either
from stablenum.guard.config import GuardConfig

__all__ = ["MODELS", "Fault", "Goal", "Training"]

MODELS = ("deep", "digits-conv", "digits-mlp", "digits-normed", "regression", "sigmoid-bce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A bad batch.

    Args:
        step: the step of the batch.
        kind: ``"nan"`` puts NaN into one example, ``"scale"`` multiplies all inputs by ``factor``, and
            ``"weight"`` multiplies the batch's loss by ``factor``.
        factor: see ``kind``.

    Raises:
        ValueError: a field is out of its range.
    """

    step: int
    kind: Literal["nan", "scale", "weight"]
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_int("faults.step", self.step, at_least=0)
        check_choice("faults.kind", self.kind, ("nan", "scale", "weight"))
        check_number("faults.factor", self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a training must reach, evaluated in float32 on the parameters at the end.

    Args:
        measure: ``"accuracy"`` (on held-out data) or ``"loss"``.
        at_least: the smallest accuracy.
        of_start: the largest loss, as a fraction of the loss at the start.
        below_clean: how far the accuracy may be below that of plain training on the same batches
            without the faults.

    Raises:
        ValueError: a field is out of its range.
    """

    measure: Literal["accuracy", "loss"]
    at_least: float | None = None
    of_start: float | None = None
    below_clean: float | None = None

    def __post_init__(self) -> None:
        check_choice("goal.measure", self.measure, ("accuracy", "loss"))
        for name in ("at_least", "of_start", "below_clean"):
            value = getattr(self, name)
            if value is not None:
                check_number(f"goal.{name}", value, at_least=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model and batches, with the same numbers for every backend. Each backend differentiates the model.

    Args:
        name, about, steps, seed, compiled_in: as in :class:`Stream`.
        model: one of :data:`MODELS`.
        depth: the number of layers of the model ``"deep"``.
        compute: the dtype of the forward and backward pass; parameters are float32. A guard that escalates
            from this dtype chooses the dtype of each step.
        loss_factor: the number by which the loss is multiplied.
        faults: the bad batches.
        optimizer, guard: how the model is trained.
        goal, expected, tolerance: what is checked.
    """

    name: str
    about: str
    model: str
    steps: int
    seed: int = 0
    depth: int = 1
    compute: str = "float32"
    loss_factor: float = 1.0
    faults: tuple[Fault, ...] = ()
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    guard: GuardConfig = field(default_factory=GuardConfig)
    goal: Goal
    compiled_in: str | None = None
    expected: Expected = field(default_factory=Expected)
    tolerance: Tolerance = field(default_factory=Tolerance)

    def __post_init__(self) -> None:
        check_name(self.name)
        check_int("steps", self.steps, at_least=1)
        check_int("seed", self.seed, at_least=0)
        check_int("depth", self.depth, at_least=1)
        check_number("loss_factor", self.loss_factor)
        check_choice("compute", self.compute, DTYPES)
        if self.model not in MODELS:
            raise bad_field("model", f"one of {either(MODELS)}", self.model)

    def ladder(self, guard: GuardConfig | None) -> tuple[str, ...]:
        """Return the formats of the guard's ladder, or only ``compute`` if the ladder begins elsewhere."""
        escalate = None if guard is None else guard.escalate
        if escalate is None or escalate.formats[0] != self.compute:
            return (self.compute,)
        return escalate.formats
