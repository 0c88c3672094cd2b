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
from stablenum.errors import bad_field, check_choice, check_int, check_number
from stablenum.formats import get_format

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
        try:
            float(self.value)
        except OverflowError as error:
            raise bad_field(
                "events.value", "a number that fits in float64, nan or inf", self.value
            ) from error
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

    Raises:
        ValueError: a field is out of its range.
    """

    plain: Outcome | None = None
    guarded: Outcome | None = None
    skips: int | None = None
    final_loss_scale: float | None = None

    def __post_init__(self) -> None:
        for name, outcome in (("plain", self.plain), ("guarded", self.guarded)):
            if outcome is not None:
                check_choice(f"expected.{name}", outcome, [o.value for o in Outcome])
        if self.skips is not None:
            check_int("expected.skips", self.skips, at_least=0)
        if self.final_loss_scale is not None:
            check_number("expected.final_loss_scale", self.final_loss_scale, above=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a backend may be from NumPy. Decisions and loss scales have none: they are equal.

    Args:
        norm: relative, for gradient norms and clip coefficients.
        loss: relative, for the recorded loss.
        params: for the parameters at the end: the largest difference in a tensor over the
            largest number in it.
        why: shown where the tolerance is wider than the standard one.

    Raises:
        ValueError: a field is out of its range.
    """

    norm: float = 1e-6
    loss: float = 0.0
    params: float = 1e-5
    why: str = ""

    def __post_init__(self) -> None:
        check_number("tolerance.norm", self.norm, at_least=0.0)
        check_number("tolerance.loss", self.loss, at_least=0.0)
        check_number("tolerance.params", self.params, at_least=0.0)
        if not isinstance(self.why, str):
            raise bad_field("tolerance.why", "a sentence", self.why)


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
            top = min((get_format(t.dtype).max for t in self.tensors), default=get_format("float32").max)
            hint = "Every parameter must be finite in its dtype."
            check_number("start", self.start, at_least=-top, at_most=top, hint=hint)
        if self.plain_clip is not None:
            check_number("plain_clip", self.plain_clip, above=0.0)
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
        measure: ``"accuracy"`` (of held-out data) or ``"loss"``.
        at_least: for accuracy.
        of_start: for the loss: at most this fraction of the loss at the start.
        below_clean: for accuracy: at most this much below plain training on the same batches
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
        check_int("seed", self.seed, at_least=0)
        check_int("depth", self.depth, at_least=1)
        check_number("loss_factor", self.loss_factor)
        check_choice("compute", self.compute, DTYPES)
        if self.model not in MODELS:
            raise bad_field("model", f"one of {', '.join(MODELS)}", self.model)


Scenario: TypeAlias = Stream | Training


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or name.split() != [name]:
        raise bad_field("name", "one word without spaces", name)
