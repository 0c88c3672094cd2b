"""Streams: seeded gradients and losses, and what happens to them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from stablenum._support.settings_checks import check_int, check_number
from stablenum.commands.compare.scenarios.shared import (
    DTYPES,
    Expected,
    OptimizerSpec,
    Tolerance,
    check_guard_names,
    check_name,
)
from stablenum.errors import bad_field, either
from stablenum.formats import get_format
from stablenum.guard.config import GuardConfig
from stablenum.recovery.settings import RecoveryPolicy

__all__ = ["Event", "Stream", "TensorSpec"]

# The limit is far enough below float32's maximum that a draw of many standard deviations is finite.
_LARGEST_DRIFT = 1e35


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One parameter of a stream.

    Args:
        shape: the shape; lengths of 0 are allowed.
        dtype: the dtype of the parameter and of the gradients that the guard receives.
        computed: the format in which the scaled gradients are computed before they are cast to ``dtype``, as
            under autocast, where a float32 parameter gets a gradient that was computed in float16.

    Raises:
        ValueError: the shape or a dtype is not allowed.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    computed: str | None = None

    def __post_init__(self) -> None:
        for n in self.shape:
            check_int("tensors.shape", n, at_least=0)
        if self.dtype not in DTYPES:
            raise bad_field("tensors.dtype", f"one of {either(DTYPES)}", self.dtype)
        if self.computed is not None and self.computed not in DTYPES:
            raise bad_field("tensors.computed", f"one of {either(DTYPES)}", self.computed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A change to a stream. Events of the same step apply in the order in which they are listed.

    Args:
        step: the first step to which the event applies, from 0.
        until: the last step to which the event applies; by default ``step``. ``"end"`` means the end of the
            stream.
        tensor: the index of a gradient, ``"all"`` for all gradients, or ``"loss"``.
        value: the number that replaces the first element; may be NaN or infinite.
        factor: the number by which all elements are multiplied. 0 gives a tensor that starts late.
        everywhere: whether ``value`` replaces all elements instead of the first.

    Exactly one of ``value`` and ``factor`` is given.

    Raises:
        ValueError: a field is out of its range, or not exactly one of ``value`` and ``factor`` is given.
    """

    step: int
    value: float | None = None
    factor: float | None = None
    tensor: int | Literal["all", "loss"] = 0
    until: int | Literal["end"] | None = None
    everywhere: bool = False

    def __post_init__(self) -> None:
        check_int("events.step", self.step, at_least=0)
        self._check_until()
        self._check_tensor()
        if (self.value is None) == (self.factor is None):
            raise ValueError(
                "events.value (replaces what is there) and events.factor (multiplies it): "
                f"exactly one must be given; got {'neither' if self.value is None else 'both'}."
            )
        if not isinstance(self.everywhere, bool):
            raise bad_field("events.everywhere", "true or false", self.everywhere)
        if self.factor is not None:
            check_number("events.factor", self.factor)
            if self.everywhere:
                hint = "A factor always multiplies all elements; omit everywhere."
                raise bad_field("events.everywhere", "false with events.factor", True, hint=hint)
        else:
            self._check_value()

    def _check_until(self) -> None:
        if isinstance(self.until, str):
            if self.until != "end":
                raise bad_field("events.until", "a whole number or 'end'", self.until)
        elif self.until is not None:
            check_int("events.until", self.until, at_least=self.step)

    def _check_tensor(self) -> None:
        if isinstance(self.tensor, str):
            if self.tensor not in ("all", "loss"):
                raise bad_field("events.tensor", "an index from 0, 'all' or 'loss'", self.tensor)
        else:
            check_int("events.tensor", self.tensor, at_least=0)

    def _check_value(self) -> None:
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise bad_field("events.value", "a number, nan or inf", self.value)
        try:
            object.__setattr__(self, "value", float(self.value))
        except OverflowError as error:
            raise bad_field(
                "events.value", "a number that fits in float64, nan or inf", self.value
            ) from error

    def holds_at(self, step: int) -> bool:
        """Return whether the event applies to ``step``."""
        if self.until == "end":
            return step >= self.step
        return self.step <= step <= (self.step if self.until is None else self.until)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Seeded gradients, the same bits for every backend.

    At each step, a backend receives ``g x loss scale``, with its own loss scale, rounded to the parameter's
    dtype, so that overflow and underflow in half precision are real.

    Args:
        name: the name on the command line, one word.
        about: a sentence about what the stream shows.
        steps: the number of steps.
        seed: the seed of gradients and parameters.
        tensors: the parameters.
        magnitude: the standard deviation of the (float32) gradients.
        drift: the gradients, not the loss, of step t are multiplied by ``drift**t``.
        jitter: gradients are also multiplied by ``exp(jitter x a standard normal number)``, drawn again at
            each step, so that norms vary from step to step as in training; 0 to 1, where 0.3 is realistic.
        start: the value of all parameters at the start; with None, they are drawn from a normal distribution.
        events: what goes wrong.
        optimizer, guard: how the parameters are trained.
        recovery: how the guarded run goes back when it is hurt; it does not if this is None. An event belongs
            to a batch, so that a rewind that leaves data out leaves the event out too.
        plain_clip: the norm at which the framework's own function clips in the run without a guard.
        most_moved: a run fails if at the end a tensor is further than this from its start, as a root mean
            square over its elements. (A finite spike makes no NaN; it does harm by moving parameters.)
        compiled_in: another scenario whose compiled step has the same rules. A run of all scenarios does not
            run this one on ``torch-compiled`` and ``jax-jit``, where compiling takes nearly all of the time.
        expected, tolerance: what is checked.

    Raises:
        ValueError: a field is out of its range, or an event, the guard or ``expected`` refers to tensors
            that do not exist.
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
    drift: float = 1.0
    jitter: float = 0.0
    start: float | None = None
    events: tuple[Event, ...] = ()
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    guard: GuardConfig = field(default_factory=GuardConfig)
    recovery: RecoveryPolicy | None = None
    plain_clip: float | None = None
    most_moved: float | None = None
    compiled_in: str | None = None
    expected: Expected = field(default_factory=Expected)
    tolerance: Tolerance = field(default_factory=Tolerance)

    def __post_init__(self) -> None:
        check_name(self.name)
        check_int("steps", self.steps, at_least=1)
        check_int("seed", self.seed, at_least=0)
        check_number("magnitude", self.magnitude, at_least=0.0)
        check_number("drift", self.drift, above=0.0)
        check_number("jitter", self.jitter, at_least=0.0, at_most=1.0)
        self._check_drift()
        if self.start is not None:
            top = min((get_format(t.dtype).max for t in self.tensors), default=get_format("float32").max)
            hint = "Every parameter must be finite in its dtype."
            check_number("start", self.start, at_least=-top, at_most=top, hint=hint)
        if self.plain_clip is not None:
            check_number("plain_clip", self.plain_clip, above=0.0)
        if self.most_moved is not None:
            check_number("most_moved", self.most_moved, above=0.0)
        if self.recovery is not None and not isinstance(self.recovery, RecoveryPolicy):
            raise bad_field("recovery", "a RecoveryPolicy or None", self.recovery)
        if self.compiled_in is not None and not isinstance(self.compiled_in, str):
            raise bad_field("compiled_in", "the name of a scenario", self.compiled_in)
        for event in self.events:
            if not isinstance(event.tensor, str) and event.tensor >= len(self.tensors):
                allowed = f"an index below {len(self.tensors)} (the number of tensors), 'all' or 'loss'"
                raise bad_field("events.tensor", allowed, event.tensor)
            if event.step >= self.steps:
                raise bad_field("events.step", f"below the number of steps, {self.steps}", event.step)
        check_guard_names(self.guard, len(self.tensors))
        moved = self.expected.moved
        if moved is not None and len(moved) != len(self.tensors):
            raise bad_field("expected.moved", f"{len(self.tensors)} numbers, one per tensor", moved)

    def _check_drift(self) -> None:
        # The logarithms are compared, because the power itself may be beyond float64's range.
        growth = (self.steps - 1) * math.log(self.drift)
        if growth > 0 and math.log(max(self.magnitude, 1.0)) + growth > math.log(_LARGEST_DRIFT):
            allowed = f"such that drift**(steps - 1), and magnitude times it, is at most {_LARGEST_DRIFT:g}"
            raise bad_field("drift", allowed, self.drift, hint="To cause an overflow, use an event.")
