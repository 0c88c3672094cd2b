"""Scenarios are data: what is trained on, how, what goes wrong, and what must come of it.

Two kinds. A :class:`Stream` gives the gradients themselves, so that every backend sees the same
bits; a :class:`Training` gives a model and batches, and every backend differentiates it itself.
The command ``stablenum compare`` and the tests run the same objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

from stablenum.config import GuardConfig
from stablenum.errors import bad_field, check_int, check_number

__all__ = [
    "DTYPES",
    "MODELS",
    "OPTIMIZERS",
    "Event",
    "Expected",
    "Fault",
    "Goal",
    "OptimizerSpec",
    "Outcome",
    "Scenario",
    "Stream",
    "TensorSpec",
    "Tolerance",
    "Training",
]

OPTIMIZERS = ("sgd", "adam", "adamw")
DTYPES = ("float32", "bfloat16", "float16")
MODELS = ("deep", "digits-conv", "digits-mlp", "regression", "sigmoid-bce")


class Outcome(StrEnum):
    """What became of a run, by its parameters at the end."""

    SURVIVES = "survives"  # all finite, and the goal (if there is one) reached
    DIES = "dies"  # some are NaN or infinite
    STALLS = "stalls"  # bit-equal to the start although the true gradients were not zero
    FAILS = "fails"  # finite, but the goal was missed
    STOPS = "stops"  # NonFiniteError, as configured; the parameters are those before the bad steps


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer in words that every backend knows.

    Args:
        name: ``"sgd"``, ``"adam"`` or ``"adamw"``.
        lr: the learning rate.
        momentum: of SGD.
        eps: of Adam.
        weight_decay: L2 for SGD and Adam, decoupled for AdamW.

    Raises:
        ValueError: a field is out of its range.
    """

    name: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise bad_field("optimizer.name", f"one of {', '.join(OPTIMIZERS)}", self.name)
        check_number("optimizer.lr", self.lr, at_least=0.0)
        check_number("optimizer.momentum", self.momentum, at_least=0.0, below=1.0)
        check_number("optimizer.eps", self.eps, at_least=0.0)
        check_number("optimizer.weight_decay", self.weight_decay, at_least=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One parameter of a stream.

    Args:
        shape: may hold 0.
        dtype: of the parameter and of the gradients that the guard is handed.

    Raises:
        ValueError: a wrong shape or dtype.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for n in self.shape:
            check_int("tensors.shape", n, at_least=0)
        if self.dtype not in DTYPES:
            raise bad_field("tensors.dtype", f"one of {', '.join(DTYPES)}", self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something put into a stream.

    Args:
        step: the first step it happens at, from 0.
        until: the last step; by default ``step``.
        tensor: index of the gradient, or ``"loss"``.
        value: what is put there; may be NaN or infinite.
        everywhere: into all elements instead of the first.

    Raises:
        ValueError: a field is out of its range.
    """

    step: int
    value: float
    tensor: int | Literal["loss"] = 0
    until: int | None = None
    everywhere: bool = False

    def __post_init__(self) -> None:
        check_int("events.step", self.step, at_least=0)
        if self.until is not None:
            check_int("events.until", self.until, at_least=self.step)
        if self.tensor != "loss":
            check_int("events.tensor", self.tensor, at_least=0)
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise bad_field("events.value", "a number, nan or inf", self.value)
        if not isinstance(self.everywhere, bool):
            raise bad_field("events.everywhere", "true or false", self.everywhere)

    def holds_at(self, step: int) -> bool:
        """Whether it happens at ``step``."""
        return self.step <= step <= (self.step if self.until is None else self.until)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What must come of a scenario. None: not stated, not checked.

    Args:
        plain: the outcome without a guard.
        guarded: the outcome with it.
        skips: steps that the guard refuses.
        final_loss_scale: the loss scale after the last step.
    """

    plain: Outcome | None = None
    guarded: Outcome | None = None
    skips: int | None = None
    final_loss_scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a backend may be from NumPy. Decisions and loss scales have none: they are equal.

    Args:
        norm: relative, for gradient norms and clip coefficients.
        loss: relative, for the recorded loss.
        params: for the parameters at the end: the largest difference in a tensor over the
            largest number in it.
        why: shown where the tolerance is wider than the standard one.
    """

    norm: float = 1e-6
    loss: float = 0.0
    params: float = 1e-5
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Seeded gradients, the same bits for every backend.

    At each step a backend is handed ``(g x its own loss scale)`` rounded to the parameter's
    dtype, so that overflow and underflow in half precision are real.

    Args:
        name: a word for the command line.
        about: what it shows, one sentence.
        steps: how many.
        seed: of gradients and parameters.
        tensors: the parameters.
        magnitude: standard deviation of the (float32) gradients.
        start: value of all parameters at the start; None draws them from a normal distribution.
        events: what goes wrong.
        optimizer, guard: how it is trained.
        plain_clip: clip the run without a guard at this norm by the framework's own function.
        expected, tolerance: what is checked.

    Raises:
        ValueError: a field is out of its range, or an event names a tensor that is not there.
    """

    name: str
    about: str = ""
    steps: int = 60
    seed: int = 0
    tensors: tuple[TensorSpec, ...] = (
        TensorSpec(shape=(8, 5)),
        TensorSpec(shape=(5,)),
        TensorSpec(shape=(3, 2, 4)),
    )
    magnitude: float = 1.0
    start: float | None = None
    events: tuple[Event, ...] = ()
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    guard: GuardConfig = field(default_factory=GuardConfig)
    plain_clip: float | None = None
    expected: Expected = Expected()
    tolerance: Tolerance = Tolerance()

    def __post_init__(self) -> None:
        _check_name(self.name)
        check_int("steps", self.steps, at_least=1)
        check_int("seed", self.seed, at_least=0)
        check_number("magnitude", self.magnitude, at_least=0.0)
        if self.start is not None:
            check_number("start", self.start)
        for event in self.events:
            if event.tensor != "loss" and event.tensor >= len(self.tensors):
                allowed = f"below the number of tensors, {len(self.tensors)}, or 'loss'"
                raise bad_field("events.tensor", allowed, event.tensor)
            if event.step >= self.steps:
                raise bad_field("events.step", f"below the number of steps, {self.steps}", event.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A bad batch.

    Args:
        step: when.
        kind: ``"nan"`` puts NaN into one example, ``"scale"`` multiplies all inputs by ``factor``,
            ``"weight"`` multiplies the batch's loss by it.
        factor: see ``kind``.
    """

    step: int
    kind: Literal["nan", "scale", "weight"]
    factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a training must reach, evaluated in float32 on the parameters at the end.

    Args:
        measure: ``"accuracy"`` (of held-out data) or ``"loss"``.
        at_least: for accuracy.
        of_start: for the loss: at most this fraction of the loss at the start.
        below_clean: for accuracy: at most this much below plain training on the same batches
            without the faults.
    """

    measure: Literal["accuracy", "loss"]
    at_least: float | None = None
    of_start: float | None = None
    below_clean: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model and batches, the same numbers for every backend, differentiated by each itself.

    Args:
        name, about, steps, seed: as in :class:`Stream`.
        model: one of :data:`MODELS`.
        depth: layers, for ``"deep"``.
        compute: dtype of the forward and backward pass; parameters are float32.
        loss_factor: the loss is multiplied by it.
        faults: the bad batches.
        optimizer, guard: how it is trained.
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
    expected: Expected = Expected()
    tolerance: Tolerance = Tolerance()

    def __post_init__(self) -> None:
        _check_name(self.name)
        check_int("steps", self.steps, at_least=1)
        if self.model not in MODELS:
            raise bad_field("model", f"one of {', '.join(MODELS)}", self.model)


Scenario: TypeAlias = Stream | Training


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or name.split() != [name]:
        raise bad_field("name", "one word without spaces", name)
