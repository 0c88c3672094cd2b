"""The NumPy adapter: the executable specification of a guarded training step.

The adapter measures gradients and applies decisions in the simplest exact way, and leaves every decision to
:func:`stablenum.decide`. The other adapters are compared with it step by step. The optimizers follow the
order of operations of ``torch.optim``'s single-tensor implementations (SGD, Adam, AdamW) and keep their state
in the parameter's dtype, as in torch. The module favours clarity over speed throughout.

Importing this module loads NumPy; ``import stablenum`` alone does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias, Unpack

import array_api_compat.numpy as xp
import numpy as np

from stablenum.errors import bad_field
from stablenum.formats import FLOAT32_MAX, SMALLEST_FLOAT16
from stablenum.guard.config import GuardConfig, Settings, make_config
from stablenum.guard.decide import Decision, GuardState, Observation, decide, init_guard
from stablenum.guard.halting import check_halted
from stablenum.guard.readout import Metrics, StepRecord, history, metrics
from stablenum.guard.statedict import state_from_dict, state_to_dict
from stablenum.reference.optimizers import SGD, Adam, AdamW, Optimizer, wide_dtype
from stablenum.rules.clipping import AdaptiveGradClip, Units

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Guarded",
    "apply",
    "measure",
    "measure_extremes",
    "measure_loss",
    "measure_units",
    "tensor_norm",
    "unit_norms",
]

Array: TypeAlias = "np.ndarray[Any, Any]"
Params: TypeAlias = "dict[str, Array] | list[Array]"
Grads: TypeAlias = "Mapping[str, Array | None] | Sequence[Array | None]"


# ------------------------------------------------------------------------------------- measure


def exact_norm(gradient: Array) -> Decimal:
    """Return the L2 norm of one tensor, which may lie outside the range of every float.

    The norm is computed from an exact sum of the float64 squares of ``x / max|x|``, so no intermediate result
    overflows or underflows.

    Args:
        gradient: any shape, any real or complex floating-point dtype (including ml_dtypes' ``bfloat16``).

    Returns:
        exact to the last bit of float64. NaN if an element is NaN, otherwise inf if an element is infinite,
        otherwise a finite number; 0 for an empty tensor.

    Example:
        >>> float(exact_norm(np.asarray([3e200, 4e200]))) / 5e200
        1.0
    """
    elements = np.abs(_as_real(np.asarray(gradient)).astype(np.float64, copy=False).ravel())
    largest = elements.max(initial=0.0)  # NaN if an element is NaN, otherwise inf if an element is infinite
    if not np.isfinite(largest) or largest == 0:
        return Decimal(float(largest))
    ratio = elements / largest
    return Decimal(float(largest)) * Decimal(math.sqrt(math.fsum(ratio * ratio)))


def tensor_norm(gradient: Array) -> np.float32:
    """Return the L2 norm of one tensor, exact to the last bit of float32.

    A norm beyond float32's range saturates at the largest float32; otherwise as :func:`exact_norm`.

    Example:
        >>> round(float(tensor_norm(np.asarray([3e30, 4e30], np.float32))) / 5e30, 6)
        1.0
        >>> float(tensor_norm(np.asarray([300.0, 400.0], np.float16)))
        500.0
    """
    norm = float(exact_norm(gradient))
    return np.float32(min(norm, FLOAT32_MAX) if math.isfinite(norm) else norm)


def split_norms(norms: Sequence[Decimal]) -> tuple[Array, Array]:
    """Return ``Observation.norms`` and ``Observation.exponents`` for norms of any size.

    Example:
        >>> values, exponents = split_norms([Decimal(3), Decimal(2) ** 130])
        >>> values.tolist(), exponents.tolist()
        ([3.0, 7.378697629483821e+19], [0, 64])
    """
    values, exponents = [], []
    for norm in norms:
        exponent = 0
        while norm.is_finite() and norm >= Decimal(2) ** (128 + exponent):
            exponent += 64
        value = float(norm / Decimal(2) ** exponent)
        # Rounding to float32 must not turn a finite norm into inf.
        values.append(min(value, FLOAT32_MAX) if math.isfinite(value) else value)
        exponents.append(exponent)
    return np.asarray(values, np.float32), np.asarray(exponents, np.int32)


def measure(gradients: Sequence[Array | None]) -> Array:
    """Return the norms of all tensors, (n,) float32: ``Observation.norms``.

    A norm beyond float32's range saturates at the largest float32, see :func:`measure_wide`.

    Args:
        gradients: one per parameter; None (no gradient) gives norm 0.

    Example:
        >>> measure([np.ones((2, 2), np.float32), None]).tolist()
        [2.0, 0.0]
    """
    norms = [np.float32(0) if g is None else tensor_norm(g) for g in gradients]
    return np.asarray(norms, dtype=np.float32)


def measure_wide(gradients: Sequence[Array | None]) -> tuple[Array, Array]:
    """Return ``Observation.norms`` and ``Observation.exponents``: the norms of all tensors, of any size.

    Example:
        >>> norms, exponents = measure_wide([np.asarray([2.0**130]), None])
        >>> norms.tolist() == [2.0**66, 0.0], exponents.tolist()
        (True, [64, 0])
    """
    return split_norms([Decimal(0) if g is None else exact_norm(g) for g in gradients])


def measure_loss(loss: object) -> Array | None:
    """Return ``Observation.loss`` from a number or a 0-d array; None if the loss is not known.

    A finite loss beyond float32's range saturates, so that it does not count as non-finite.

    Example:
        >>> measure_loss(1e39).item() == float(np.finfo(np.float32).max)
        True
    """
    if loss is None:
        return None
    value = float(np.asarray(loss))
    if math.isfinite(value):
        value = max(-FLOAT32_MAX, min(FLOAT32_MAX, value))
    return np.asarray(value, dtype=np.float32)


def unit_norms(array: Array, axes: tuple[int, ...]) -> Array:
    """Return the L2 norm of each unit, (u,) float32: norms over ``axes``, with the remaining axes in C order.

    Args:
        array: any non-empty shape, any real or complex floating-point dtype.
        axes: the axes of one unit, see :meth:`stablenum.AdaptiveGradClip.unit_axes`.

    Example:
        >>> unit_norms(np.asarray([[3.0, 4.0], [0.0, 2.0]], np.float32), (1,)).tolist()
        [5.0, 2.0]
    """
    return _wide_unit_norms(array, axes, saturate=True)[0]


def _wide_unit_norms(array: Array, axes: tuple[int, ...], *, saturate: bool = False) -> tuple[Array, Array]:
    """Return the norms of units, and their powers of two, which are 0 if norms are to saturate."""
    elements = np.abs(array if array.dtype.kind == "c" else array.astype(np.float64))
    largest = elements.max(axis=axes, keepdims=True)
    ratio = elements / np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    root, largest = np.sqrt((ratio * ratio).sum(axis=axes)).ravel(), largest.ravel()
    norms = root * np.where(largest > 0, largest, 1.0)
    finite = np.isfinite(largest)
    exponents = np.zeros(norms.shape, np.int32)
    if not saturate:
        for i in np.flatnonzero(finite & (norms > FLOAT32_MAX)):
            (norms[i],), (exponents[i],) = split_norms([Decimal(float(root[i])) * Decimal(float(largest[i]))])
    norms = np.where(finite, np.minimum(norms, FLOAT32_MAX), largest)
    return norms.astype(np.float32), exponents


def measure_units(
    rule: AdaptiveGradClip, names: Sequence[str], gradients: Sequence[Array | None], params: Sequence[Array]
) -> Units:
    """Return ``Observation.units``: the unit norms of gradients and weights, empty for parameters that the
    rule excludes.

    Example:
        >>> units = measure_units(AdaptiveGradClip(), ["w"], [np.ones((4, 2))], [np.zeros((4, 2))])
        >>> units.norms[0].tolist(), units.weights[0].tolist()
        ([2.0, 2.0], [0.0, 0.0])
    """
    norms, exponents, weights = [], [], []
    for included, g, p in zip(rule.included(names), gradients, params, strict=True):
        if not included or g is None or g.size == 0:
            norms.append(np.zeros(0, np.float32))
            exponents.append(np.zeros(0, np.int32))
            weights.append(np.zeros(0, np.float32))
            continue
        axes = rule.unit_axes(p.shape, default="last")
        found, powers = _wide_unit_norms(g, axes)
        norms.append(found)
        exponents.append(powers)
        weights.append(unit_norms(p, axes))
    return Units(tuple(norms), tuple(weights), tuple(exponents))


def measure_extremes(gradients: Sequence[Array | None]) -> tuple[Array, Array]:
    """Return ``Observation.amax`` and ``Observation.tiny``: () float32 each.

    Example:
        >>> measure_extremes([np.asarray([0.0, 2.0**-30, -4.0], np.float32), None])
        (array(4., dtype=float32), array(0.5, dtype=float32))
    """
    largest, nonzero, tiny = 0.0, 0, 0
    for g in gradients:
        if g is None or g.size == 0:
            continue
        elements = np.abs(_as_real(g).astype(np.float64))
        largest = max(largest, float(elements.max()))
        nonzero += int((elements > 0).sum())
        tiny += int(((elements > 0) & (elements <= SMALLEST_FLOAT16)).sum())
    amax = min(largest, FLOAT32_MAX) if math.isfinite(largest) else largest
    fraction = np.float32(tiny) / np.float32(max(nonzero, 1))
    return np.asarray(amax, np.float32), np.asarray(fraction, np.float32)


# --------------------------------------------------------------------------------------- apply


def apply(config: GuardConfig, decision: Decision, gradients: Sequence[Array | None]) -> list[Array | None]:
    """Return the gradients for the optimizer: multiplied by the multiplier and clamped, in their own dtype.

    The product is computed in float32 or wider and rounded to the gradient's dtype once.

    Args:
        config: the settings, which give the element-wise bound ``max_value``, if any.
        decision: the decision with the multipliers; the caller has already checked ``decision.apply``.
        gradients: finite, still multiplied by the loss scale; None stays None.

    Example:
        >>> from stablenum import Observation
        >>> config = GuardConfig(clip=1.0)
        >>> grads = [np.asarray([3.0, 4.0], np.float32)]
        >>> decision, _ = decide(config, init_guard(config, 1, xp=xp), Observation(measure(grads)), xp=xp)
        >>> apply(config, decision, grads)[0].round(3).tolist()
        [0.6..., 0.8...]
    """
    n, plain = len(gradients), np.zeros((), np.int32)
    factors: list[Any] = list(np.broadcast_to(decision.multiplier, (n,)))
    shifts: list[Any] = list(
        np.broadcast_to(plain if isinstance(decision.shift, tuple) else decision.shift, (n,))
    )
    for i, of_units in enumerate(decision.unit_multipliers):
        g = gradients[i]
        if g is not None and config.unit_rule is not None and of_units.size:
            rule = config.unit_rule
            shape = rule.unit_shape(g.shape, rule.unit_axes(g.shape, default="last"))
            factors[i] = of_units.reshape(shape)
            shifts[i] = decision.unit_shifts[i].reshape(shape) if decision.unit_shifts else plain
    return [
        None if g is None else _scaled(g, factor, shift, config.max_value)
        for g, factor, shift in zip(gradients, factors, shifts, strict=True)
    ]


def _scaled(gradient: Array, factor: Array, shift: Array, max_value: float | None) -> Array:
    real = _as_real(gradient)
    wide = real.astype(wide_dtype(real.dtype))
    if gradient.dtype.kind == "c" and factor.ndim and factor.shape[-1] > 1:
        factor, shift = np.repeat(factor, 2, axis=-1), np.repeat(shift, 2, axis=-1) if shift.ndim else shift
    wide = np.ldexp(wide * factor.astype(wide.dtype), shift)
    if max_value is not None:
        wide = np.clip(wide, -max_value, max_value)
    return wide.astype(real.dtype).view(gradient.dtype).reshape(gradient.shape)


def _is_floating(dtype: np.dtype[Any]) -> bool:
    """Return whether the dtype is a real or complex floating-point dtype, including bfloat16."""
    return bool(np.issubdtype(dtype, np.inexact)) or dtype.name == "bfloat16"


def _as_real(array: Array) -> Array:
    """Return a complex array as its real and imaginary parts (torch's ``view_as_real``), a real one as is."""
    if array.dtype.kind != "c":
        return array
    return np.ascontiguousarray(array).view(array.real.dtype)


# -------------------------------------------------------------------------------------- driver


class Guarded:
    """A guarded NumPy training loop: parameters, an optimizer and a guard in one object.

    Args:
        params: a dict of arrays (whose keys are the parameters' names) or a sequence of arrays. The
            arrays are copied. There may be none.
        optimizer: :class:`SGD`, :class:`Adam` or any object with their ``init`` and ``update``.
        config: the guard's settings; None for the default.
        **overrides: fields of :class:`GuardConfig` that replace those of ``config``, such as ``clip=1.0``.

    Raises:
        TypeError: ``config`` is not a GuardConfig, or an override is not a field of GuardConfig.
        ValueError: a parameter does not have a floating-point dtype, or a setting is not allowed.

    Example:
        >>> train = Guarded([np.ones(2, np.float32)], SGD(lr=0.5), clip=1.0)
        >>> train.step([np.asarray([np.nan, 1], np.float32)])["applied"]
        False
        >>> train.params[0].tolist()
        [1.0, 1.0]
    """

    def __init__(
        self,
        params: Mapping[str, Array] | Sequence[Array],
        optimizer: Optimizer,
        config: GuardConfig | None = None,
        **overrides: Unpack[Settings],
    ) -> None:
        self.config = make_config(config, overrides)
        self.optimizer = optimizer
        self.names = list(params) if isinstance(params, Mapping) else None
        self._params = [
            np.array(p, copy=True, order="C")
            for p in (params.values() if isinstance(params, Mapping) else params)
        ]
        for i, param in enumerate(self._params):
            if not _is_floating(param.dtype):
                raise bad_field(
                    f"params[{self.names[i] if self.names else i}]", "of a floating-point dtype", param.dtype
                )
        if self.config.unit_rule is not None:
            self.config.unit_rule.included(self._known_names)  # raises if a pattern matches nothing
        self.opt_state = [optimizer.init(_as_real(p)) for p in self._params]
        self.state: GuardState = init_guard(self.config, len(self._params), xp=xp)

    @property
    def params(self) -> Params:
        """The current parameters, as a dict or list like the one given."""
        return list(self._params) if self.names is None else dict(zip(self.names, self._params, strict=True))

    @property
    def loss_scale(self) -> float:
        """The factor on the next loss; 1.0 without scaling."""
        return float(self.state.loss_scale.scale)

    @property
    def last(self) -> Metrics:
        """The record of the last step, see :func:`stablenum.guard.metrics`."""
        return metrics(self.state, self.names)

    def history(self) -> list[StepRecord]:
        """Return the last 128 steps, oldest first."""
        return history(self.state, self.names)

    def step(self, gradients: Grads, loss: object = None) -> Metrics:
        """Decide on one step, and apply it or skip it entirely.

        Args:
            gradients: the gradients of the *scaled* loss, as a dict or sequence like ``params``; None for a
                parameter without gradient, which then stays unchanged.
            loss: the unscaled loss, if known.

        Returns:
            The value of :attr:`last`.

        Raises:
            ValueError: the gradients do not match the parameters, or do not have a floating-point dtype.
            NonFiniteError: the limit of non-finite steps in a row is reached; the step was skipped.
        """
        listed = self._matched(gradients)
        observation = self._measure(listed, loss)
        with np.errstate(all="ignore"):  # the rules also compute inf and NaN results, which they discard
            decision, self.state = decide(self.config, self.state, observation, xp=xp)
            if decision.apply:
                self._update(apply(self.config, decision, listed))
        check_halted(self.state, self.names, config=self.config)
        return self.last

    def _measure(self, gradients: Sequence[Array | None], loss: object) -> Observation:
        rule, needs = self.config.unit_rule, self.config.needs
        amax, tiny = measure_extremes(gradients) if needs else (None, None)
        norms, exponents = measure_wide(gradients)
        return Observation(
            norms=norms,
            exponents=exponents,
            loss=measure_loss(loss),
            units=None if rule is None else measure_units(rule, self._known_names, gradients, self._params),
            amax=amax if "amax" in needs else None,
            tiny=tiny if "tiny" in needs else None,
        )

    @property
    def _known_names(self) -> list[str]:
        return self.names or [f"params[{i}]" for i in range(len(self._params))]

    def guard_state_dict(self) -> dict[str, Any]:
        """Return the guard's state as plain JSON values, the same for every framework."""
        return state_to_dict(self.state, self.names)

    def load_guard_state_dict(self, plain: Mapping[str, Any]) -> None:
        """Load a state written by any adapter's ``guard_state_dict``.

        Raises:
            ValueError: ``plain`` is not such a state, or does not fit this config; nothing is changed.
        """
        self.state = state_from_dict(plain, self.state, xp=xp, names=self.names)

    def _matched(self, gradients: Grads) -> list[Array | None]:
        if self.names is not None:
            if not isinstance(gradients, Mapping) or set(gradients) != set(self.names):
                raise bad_field("gradients", f"a dict with the keys {', '.join(self.names)}", gradients)
            listed = [gradients[name] for name in self.names]
        else:
            if isinstance(gradients, Mapping) or len(gradients) != len(self._params):
                raise bad_field("gradients", f"a sequence of {len(self._params)} arrays", gradients)
            listed = list(gradients)
        arrays = [None if g is None else np.asarray(g) for g in listed]
        for i, (g, p) in enumerate(zip(arrays, self._params, strict=True)):
            where = f"gradients[{self.names[i] if self.names else i}]"
            if g is not None and g.shape != p.shape:
                raise bad_field(where, f"of shape {p.shape}", g.shape)
            # If integers were multiplied and rounded back, nearly all would become 0.
            if g is not None and not _is_floating(g.dtype):
                hint = f"Convert the gradient to {p.dtype}."
                raise bad_field(where, "of a floating-point dtype", g.dtype, hint=hint)
        return arrays

    def _update(self, gradients: Sequence[Array | None]) -> None:
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            param = self._params[i]
            real, self.opt_state[i] = self.optimizer.update(
                _as_real(param), _as_real(gradient.astype(param.dtype, copy=False)), self.opt_state[i]
            )
            real = self._clipped_update(_as_real(param), real)
            self._params[i] = real.view(param.dtype).reshape(param.shape)

    def _clipped_update(self, before: Array, after: Array) -> Array:
        """Return ``after``, or a point between ``before`` and ``after`` if ``ClipUpdateRMS`` clips the
        update."""
        rule = self.config.update_rule
        if rule is None or before.size == 0:
            return after
        wide = wide_dtype(before.dtype)
        update = after.astype(wide) - before.astype(wide)
        rms = np.asarray([float(exact_norm(update) / Decimal(update.size).sqrt())])
        first, second = rule.update_factors(rms, self.optimizer.lr if rule.per_lr else 1.0, xp=xp)
        if first[0] == 1:
            return after
        return (before.astype(wide) + update * first[0] * second[0]).astype(before.dtype)
