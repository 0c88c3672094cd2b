"""What a checkup has seen of a training: the losses, and some steps measured in full."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stablenum.diagnosis.checkup.custom_derivatives import CustomDerivative
from stablenum.diagnosis.checkup.signals import Signal
from stablenum.diagnosis.replay.trace import Trace
from stablenum.diagnosis.replay.values import Place

__all__ = [
    "HALFWAY_DOWN",
    "LARGE_CHANGE",
    "MOST_PLACES",
    "NEARLY_DOWN",
    "NOT_DOWN",
    "PARTLY_DOWN",
    "UNTRAINED",
    "Clip",
    "Copy",
    "Course",
    "Drawn",
    "Loss",
    "OverDevices",
    "ParameterSeen",
    "Probe",
    "Recurrence",
    "Running",
    "measure_update",
    "median",
    "relative_change",
]

Array = Any

# The role, in a trace, of an array that a model holds as a plain array instead of a parameter.
UNTRAINED = "untrained"

# Of the lines of a script that do the same, such as making optimizers, so many are kept. Chosen, not
# measured.
MOST_PLACES = 4
# How far a loss has come down (``Course.fall``), which tells how serious a complaint is: hardly; a part of
# the way to 0; half of it; next to all of it.
NOT_DOWN, PARTLY_DOWN, HALFWAY_DOWN, NEARLY_DOWN = 0.1, 0.3, 0.5, 0.9
# Fewer losses show no course. What they begin and end with is the median of one in so many of them.
_LEAST_LOSSES, _PARTS = 4, 8
# A parameter that changes by more than this part of its size in each step is another one after a few steps.
LARGE_CHANGE = 0.1
# After k steps of one size in directions of their own, a weight that began at 0 has the size of sqrt(k) of
# them, and in a warm-up less, of sqrt(k / 3): its change is up to sqrt(3 / k) of its size. Momentum has the
# rest; chosen, not measured.
_FROM_ZERO = 3.0
# A loss is constant whose values differ by less than this part of their size: float32 rounds by 6e-8.
_SAME = 1e-6


class ParameterSeen(NamedTuple):
    """Statistics of a parameter in one optimizer step; NaN where one does not apply.

    Attributes:
        name, shape, dtype: the parameter's name, shape and dtype.
        rate: the learning rate of its group; NaN if it is not known.
        has_gradient: whether it had a gradient.
        weight: the RMS of the parameter before the step.
        gradient: the RMS of its gradient, as the optimizer used it.
        zero: the fraction of elements of the gradient that are exactly 0.
        update: the RMS of the change.
        still: of the elements with a gradient that is not 0, the fraction that did not change.
        shrink: the part of the change that shortens the parameter, -(dw . w) / (w . w).
        apart: of a matrix or more, how far the slices along an axis are apart, relative to their size: the
            larger one for the parameter and its gradient, the smallest over the axes.
        rise: the mean over the elements of the change times the gradient, positive if the loss rises by it;
            without the part of the change along the parameter itself, as weight decay makes it.
        optimizer: the name of the class of its optimizer, "momentum" if it has no second moment; "" if it is
            not known.
        mirrored: of a complex parameter in JAX, by how much nearer the change is to the gradient that JAX
            returns than to its conjugate, which points uphill; NaN elsewhere.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rate: float = math.nan
    has_gradient: bool = True
    weight: float = math.nan
    gradient: float = math.nan
    zero: float = math.nan
    update: float = math.nan
    still: float = math.nan
    shrink: float = math.nan
    apart: float = math.nan
    rise: float = math.nan
    optimizer: str = ""
    mirrored: float = math.nan

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def relative(self) -> float:
        """The size of the change relative to the parameter; NaN for a parameter of zeros."""
        return self.update / self.weight if self.weight > 0 else math.nan


def measure_update(before: Array, after: Array, gradient: Array, *, xp: Any) -> Array:
    """Return the numbers of a :class:`ParameterSeen` from ``weight`` to ``rise``, as one array.

    Args:
        before, after: the parameter before and after the step, in float64.
        gradient: its gradient, in float64; zeros if it has none.
        xp: the array namespace.

    Example:
        >>> import array_api_compat.numpy as np
        >>> w, g = np.asarray([2.0, 2.0]), np.asarray([1.0, 0.0])
        >>> float(measure_update(w, w - 0.5 * g, g, xp=np)[2])  # half of the gradient is 0
        0.5
    """
    change = after - before
    moved = xp.astype(change != 0, before.dtype)
    pulled = xp.astype(gradient != 0, before.dtype)
    one = xp.ones_like(xp.sum(pulled))
    count = xp.sum(pulled)
    still = xp.sum(pulled * (1 - moved)) / xp.where(count > 0, count, one)
    square = xp.sum(before * before)
    shrink = -xp.sum(change * before) / xp.where(square > 0, square, one)
    return xp.stack(
        [
            _rms(before, xp),
            _rms(gradient, xp),
            1 - xp.mean(pulled),
            _rms(change, xp),
            still,
            shrink,
            _apart(before, gradient, xp),
            xp.mean((change + shrink * before) * gradient),
        ]
    )


def _apart(x: Array, gradient: Array, xp: Any) -> Array:
    nearest = xp.sum(x) * 0 + float("inf" if x.ndim > 1 else "nan")
    for axis in range(x.ndim if x.ndim > 1 else 0):
        if x.shape[axis] > 1:
            nearest = xp.minimum(nearest, xp.maximum(_spread(x, axis, xp), _spread(gradient, axis, xp)))
    return nearest


def _spread(x: Array, axis: int, xp: Any) -> Array:
    size = _rms(x, xp)
    around = _rms(x - xp.mean(x, axis=axis, keepdims=True), xp)
    return around / xp.where(size > 0, size, xp.ones_like(size))


def _rms(x: Array, xp: Any) -> Array:
    return xp.sqrt(xp.mean(x * x))


class Recurrence(NamedTuple):
    """A layer that takes the first axis for time: its path, a weight, the user's line, and both lengths."""

    module: str
    weight: str
    place: Place | None
    time: int
    batch: int


class Drawn(NamedTuple):
    """Random numbers that a step has drawn: with which key, and on which line."""

    key: bytes
    place: Place | None


class Running(NamedTuple):
    """The running statistics of a batch normalisation, as a step has read or left them.

    Attributes:
        name: the name of its weight, or of the module.
        place: the user's line.
        frames: the user's call stack, outermost first.
        mean, variance: the running mean and variance.
        batch_mean: the root mean square of the batch's means; NaN if they are not computed.
        batch_variance: the mean of the batch's variances; NaN if they are not computed.
        made: what the normalisation puts out, if that is known.
        module: the path of the module.
        momentum: the weight of a new batch; NaN if it is not known.
    """

    name: str
    place: Place | None
    frames: tuple[Place, ...]
    mean: Signal
    variance: Signal
    batch_mean: float
    batch_variance: float
    made: Signal | None = None
    module: str = ""
    momentum: float = math.nan


@dataclass(slots=True, kw_only=True)
class Probe:
    """One step that was measured in full.

    Attributes:
        step: the number of the optimizer step, from 0.
        trace: its operations.
        signals: id of a value of the trace -> what was measured of it.
        parameters: what its optimizers did.
        recurrences: recurrent layers that take the first axis for time.
        out_of_range: reads with indices outside of an array: the step's index, and what was found.
        running: running statistics of batch normalisations, if they are not in the trace.
        drawn: the random numbers that were drawn, where their keys are known (JAX).
        exact: whether each derivative names its own forward step, not only one on the same line.
    """

    step: int
    trace: Trace = field(default_factory=Trace)
    signals: dict[int, Signal] = field(default_factory=dict)
    parameters: tuple[ParameterSeen, ...] = ()
    recurrences: tuple[Recurrence, ...] = ()
    out_of_range: dict[int, str] = field(default_factory=dict)
    running: tuple[Running, ...] = ()
    drawn: tuple[Drawn, ...] = ()
    exact: bool = True

    def rise(self) -> float:
        """Return the cosine of the angle between the changes of all parameters and their gradients, without
        weight decay: positive if the step goes uphill; NaN if nothing moved or has a gradient."""
        known = [p for p in self.parameters if not math.isnan(p.rise)]
        changes, gradients = (
            math.sqrt(math.fsum(size * size * p.size for p, size in zip(known, sizes, strict=True)))
            for sizes in ([p.update for p in known], [p.gradient for p in known])
        )
        both = changes * gradients
        return math.fsum(p.rise * p.size for p in known) / both if both > 0 else math.nan

    def promised(self) -> float:
        """Return by how much the loss changes to first order in the step, without weight decay."""
        return math.fsum(p.rise * p.size for p in self.parameters if not math.isnan(p.rise))

    def pull(self) -> float:
        """Return the norm of the gradients of all parameters."""
        known = [p for p in self.parameters if not math.isnan(p.gradient)]
        return math.sqrt(math.fsum(p.gradient * p.gradient * p.size for p in known))


class Loss(NamedTuple):
    """A number from which a backward pass started, in which step and on which line."""

    step: int
    value: float
    place: Place | None = None


class Copy(NamedTuple):
    """A model of the same shapes as a trained one that no optimizer has, such as a moving average of it.

    Attributes:
        name, of: its name in the script, and that of the trained model; "" if it is not known.
        equal: whether both had the same parameters when the training began.
        moved: whether its parameters have changed since.
        still: names of its running statistics that have not changed although those of the trained model have.
        runs: whether it was called in a measured step.
    """

    name: str
    of: str
    equal: bool
    moved: bool
    still: tuple[str, ...]
    runs: bool


class OverDevices(NamedTuple):
    """A gradient that was summed over devices when it was made.

    Attributes:
        axes: the axes of the mesh over which it was summed.
        then: what the script does with it: "vmap" if it is one of many, one for each example; "pmean" or
            "psum" if it is combined over these axes once more.
        place: the user's line.
    """

    axes: tuple[str, ...]
    then: str
    place: Place | None


class Clip(NamedTuple):
    """One clipping of gradients by norm: the norm before, the bound, and the user's line."""

    step: int
    norm: float
    bound: float
    place: Place | None = None


@dataclass(slots=True, kw_only=True)
class Course:
    """A training, as far as it was watched.

    Attributes:
        framework: "torch" or "jax".
        steps: the number of optimizer steps.
        losses: the loss from which gradients were computed: the step, the value and the user's line.
        probes: the steps that were measured in full, in order.
        rates: the step and the largest learning rate.
        clips: how gradients were clipped.
        scales: the step and the loss scale, where there is one.
        numbers: of the measured steps, the step and the single floating-point numbers that the script gave to
            it, by name (JAX).
        bad_state: what is wrong with the optimizers' states and settings, in words, the worst first.
        bad_state_since: before which step the states were read; None for after the last.
        kept: the steps that began with the gradients of an earlier step.
        kept_place: where the gradients were computed then.
        renewed: the steps that a new optimizer took with parameters of an earlier one of its kind.
        renewed_places: where the optimizer was made again, the innermost line first.
        outside: names of parameters that gradients reached and that no optimizer has.
        inside: names of the parameters that an optimizer has, in order.
        strangers: the number of parameters of an optimizer that belong to no module and that no gradient
            ever reached.
        groundless: where a backward pass started at a loss without a graph.
        settings: of each optimizer, its name and its settings.
        guarded: whether one of the optimizers has a guard.
        step_place: where the script takes its steps.
        made: where the script made its optimizers.
        scheduled: where it made the schedules of their rates.
        loaded: whether the script has loaded parameters.
        loaded_state: where it has loaded the state of an optimizer.
        initialised: name of a parameter -> where the script gave it its first values.
        captured: names of the parameters that a compiled step has as constants.
        unchanged_state: the number of measured steps, if all began with the same optimizer state, else 0.
        constructed: name of a parameter -> where the script made the outermost module that has it.
        initialisers: where it made initialisers, if it is not known for which parameters.
        custom: functions with a derivative that the script has written, and what was found of them.
        summed_twice: the steps in which a backward pass started at a loss of which an earlier one is a part:
            the step, and both lines.
        cut: where reentrant checkpoints were given nothing that needs a gradient (PyTorch).
        copies: models that look like a moving average of a trained one, or like a target network.
        over_devices: gradients of replicated parameters that ``shard_map`` has summed over devices (JAX).
    """

    framework: str
    steps: int = 0
    losses: list[Loss] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    rates: list[tuple[int, float]] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    scales: list[tuple[int, float]] = field(default_factory=list)
    numbers: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    bad_state: tuple[str, ...] = ()
    bad_state_since: int | None = None
    kept: list[int] = field(default_factory=list)
    kept_place: Place | None = None
    renewed: list[int] = field(default_factory=list)
    renewed_places: tuple[Place, ...] = ()
    outside: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    strangers: int = 0
    groundless: Place | None = None
    settings: tuple[tuple[str, dict[str, float]], ...] = ()
    guarded: bool = False
    step_place: Place | None = None
    made: tuple[Place, ...] = ()
    scheduled: tuple[Place, ...] = ()
    loaded: bool = False
    loaded_state: Place | None = None
    initialised: dict[str, Place] = field(default_factory=dict)
    captured: tuple[str, ...] = ()
    unchanged_state: int = 0
    constructed: dict[str, Place] = field(default_factory=dict)
    initialisers: tuple[Place, ...] = ()
    custom: list[CustomDerivative] = field(default_factory=list)
    summed_twice: list[tuple[int, Place | None, Place | None]] = field(default_factory=list)
    over_devices: list[OverDevices] = field(default_factory=list)
    cut: tuple[Place, ...] = ()
    copies: tuple[Copy, ...] = ()

    @property
    def optimizer_place(self) -> Place | None:
        """Where the optimizer gets its settings, or else where it steps."""
        return self.made[0] if self.made else self.step_place

    @property
    def values(self) -> list[float]:
        """The losses of the line that has most of them (a GAN has two): the last of each step."""
        lines: dict[Any, dict[int, float]] = {}
        for loss in self.losses:
            lines.setdefault(loss.place, {})[loss.step] = loss.value
        return list(max(lines.values(), key=len, default={}).values())

    def fall(self) -> float:
        """Return how far the loss has come down, relative to where it began: 1 for all the way to 0, negative
        if it rose; NaN for fewer than four losses, for losses that change their sign, as in reinforcement
        learning, and for those that are constant by construction."""
        values = [v for v in self.values if math.isfinite(v)]
        if len(values) < _LEAST_LOSSES or min(values) < 0 < max(values) or self.is_surrogate():
            return math.nan
        part = max(1, len(values) // _PARTS)
        # A first step that is too large makes the losses after it larger than the one to compare with.
        first, last = min(values[0], median(values[:part])), median(values[-part:])
        return (first - last) / abs(first) if first else 0.0

    def is_constant(self) -> bool:
        """Return whether all losses are the same, but for rounding."""
        values = self.values
        size = median([abs(v) for v in values])
        return bool(values) and max(values) - min(values) <= _SAME * size

    def is_surrogate(self) -> bool:
        """Return whether the loss is constant by construction, as an objective that is made for its gradient:
        the measured steps have moved parameters along gradients that differ from step to step, and would have
        changed any other loss."""
        if not self.is_constant():
            return False
        size = _SAME * median([abs(v) for v in self.values])
        sums = [(abs(probe.promised()), probe.pull()) for probe in self.probes]
        moved = [pull for promised, pull in sums if promised > size]
        # Of a forward pass that is not repeated, all gradients are the same.
        return len(moved) > 1 and max(moved) - min(moved) > _SAME * max(moved)

    def began_at_zero(self) -> frozenset[str]:
        """Return the names of the parameters that were 0 when they were first measured."""
        first: dict[str, float] = {}
        for probe in self.probes:
            for p in probe.parameters:
                first.setdefault(p.name, p.weight)
        return frozenset(name for name, weight in first.items() if weight == 0)

    def history(self, name: str) -> list[tuple[int, ParameterSeen]]:
        """Return what was measured of one parameter, step by step."""
        return [(probe.step, p) for probe in self.probes for p in probe.parameters if p.name == name]

    def names(self) -> list[str]:
        """Return the names of all parameters that were measured."""
        return list(dict.fromkeys(p.name for probe in self.probes for p in probe.parameters))


def relative_change(p: ParameterSeen, step: int, from_zero: Collection[str]) -> float:
    """Return the size of a change relative to the parameter.

    Of a parameter that began at 0, it is divided by how many times ``LARGE_CHANGE`` it may be whatever the
    size of the steps.

    Example:
        >>> adapter = ParameterSeen("b", (4, 4), "float32", weight=0.02, update=0.01)
        >>> round(relative_change(adapter, 2, {"b"}), 4), relative_change(adapter, 2, set())
        (0.0236, 0.5)
    """
    beside = max(1.0, _FROM_ZERO / math.sqrt(max(1, step)) / LARGE_CHANGE)
    return p.relative / (beside if p.name in from_zero else 1.0)


def median(values: Sequence[float]) -> float:
    """Return the median of the numbers that are not NaN; NaN if there are none."""
    ordered = sorted(v for v in values if not math.isnan(v))
    if not ordered:
        return math.nan
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
