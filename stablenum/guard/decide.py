"""The guard: a pure function that decides whether and how a training step is applied.

    measure (adapter)   one read of the gradients  ->  Observation
    decide  (here)      Observation + GuardState   ->  Decision, next GuardState
    apply   (adapter)   fold the multiplier into the optimizer's own pass, or skip the step entirely

``decide`` works on 0-d and 1-d arrays of any array namespace ``xp``. It never branches on an
array's value, so it runs eagerly, compiled, inside a scan and on arrays without data, and never
makes the host wait for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, TypeVar

from stablenum.arrays import at_least, at_most, combine_norms, map_leaves
from stablenum.formats import FLOAT32_MAX, FLOAT32_TINY
from stablenum.guard.config import GuardConfig
from stablenum.guard.finiteness import finiteness, reason_code, worst_index
from stablenum.guard.recorder import Recorder, init_recorder, record, recorded_loss
from stablenum.rules.clipping import PER_TENSOR_STATES, Clipped, FlatUnits, Units, clip_in_order
from stablenum.rules.loss_scale import LossScaleState, StaticLossScale
from stablenum.rules.spikes import Verdict
from stablenum.settings_checks import check_int

__all__ = ["Decision", "GuardState", "Observation", "decide", "init_guard", "select"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any
Tree = TypeVar("Tree")


class Observation(NamedTuple):
    """What an adapter measures of one step.

    Attributes:
        norms: (n,) float32, the L2 norm of each parameter's gradient as the optimizer gets it
            (still multiplied by the loss scale). A norm is non-finite if and only if an element of the
            gradient is; it is 0 for a parameter without gradient.
        loss: () float32, the unscaled loss, or None if it is not known.
        found_inf: () bool, whether something outside ``norms`` was non-finite (on another rank, in an
            outer wrapper), or None.
        units: the norms that :class:`stablenum.AdaptiveGradClip` needs; None without that rule.
        amax: () float32, the largest magnitude of an element of the gradients as the optimizer gets them;
            needed only if ``"amax"`` is in ``config.needs``. For a non-finite step it may have any value.
        tiny: () float32, the fraction of the non-zero elements whose magnitude is at most 2^-24, or 0 if
            there are no non-zero elements; needed only if ``"tiny"`` is in ``config.needs``.
    """

    norms: Array
    loss: Array | None = None
    found_inf: Array | None = None
    units: Units | None = None
    amax: Array | None = None
    tiny: Array | None = None


class Decision(NamedTuple):
    """What to do with the step.

    Attributes:
        apply: () bool. If False, parameters and optimizer state stay as they are.
        multiplier: the factor on the raw gradients, for clipping and unscaling together: () float32,
            or (n,) float32 if ``config.per_tensor``. It is always finite and at least float32's smallest
            normal number, 1.2e-38 (clipping and 1 / scale together), and is 1 if ``apply`` is False.
        reason: () int32, see :class:`stablenum.Reason`.
        grad_norm: () float32, the L2 norm of the unscaled gradients before clipping.
        clip_coefficient: () float32, the smallest factor that clipping applies; 1 for no clipping.
        worst: () int32, the index of the first non-finite norm, otherwise of the largest; -1 if n = 0.
        unit_multipliers: with :class:`stablenum.AdaptiveGradClip`, for each parameter the (u_i,) float32
            factors on the raw gradients of its units, which replace ``multiplier``; (0,) for a parameter
            that the rule leaves unchanged. () without that rule.
    """

    apply: Array
    multiplier: Array
    reason: Array
    grad_norm: Array
    clip_coefficient: Array
    worst: Array
    unit_multipliers: tuple[Array, ...] = ()


class GuardState(NamedTuple):
    """The state that the guard carries from step to step. Its structure, shapes and dtypes never change.

    Attributes:
        step: () int32, the number of steps decided so far, including the skipped ones.
        loss_scale: the loss-scale rule's state.
        clip: one state per clip rule.
        skipped_total: () int32, the number of steps skipped so far.
        skipped_in_a_row: () int32, the number of steps skipped since the last applied one.
        nonfinite_in_a_row: () int32, how many of ``skipped_in_a_row`` were not finite. This count is compared
            with ``config.skip_limit``; a step skipped as a spike leaves it unchanged.
        halted: () int32, 1 once ``config.skip_limit`` has been reached. A halted guard skips every
            further step and changes nothing, so a host that checks later finds parameters and state
            as they were when training should have stopped.
        recorder: the last 128 steps.
        spike: the spike rule's state; () without a spike rule.
        escalation: the state of :class:`stablenum.EscalatePrecision`; () without it. Its ``level`` is how
            many formats wider than its policy the next step computes.
    """

    step: Array
    loss_scale: LossScaleState
    clip: tuple[Any, ...]
    skipped_total: Array
    skipped_in_a_row: Array
    nonfinite_in_a_row: Array
    halted: Array
    recorder: Recorder
    spike: Any = ()
    escalation: Any = ()


# No scaling is represented as scaling by 1; the arithmetic is left out.
_UNSCALED = StaticLossScale(scale=1.0)


def init_guard(config: GuardConfig, n_tensors: int, *, xp: Namespace, device: Any = None) -> GuardState:
    """Return the state before the first step.

    Args:
        config: the guard's settings.
        n_tensors: the number of parameters, which is the length of ``Observation.norms``; may be 0.
        xp: the array namespace, for example ``array_api_compat.numpy``.
        device: the device of the state, as ``xp`` names it; None for the namespace's default.

    Raises:
        ValueError: ``n_tensors`` is not a whole number of 0 or more.

    Example:
        >>> import numpy as np
        >>> state = init_guard(GuardConfig(loss_scale="dynamic"), 2, xp=np)
        >>> float(state.loss_scale.scale)
        65536.0
    """
    n_tensors = check_int("n_tensors", n_tensors, at_least=0)

    def zero() -> Array:
        return xp.asarray(0, dtype=xp.int32, device=device)

    return GuardState(
        step=zero(),
        loss_scale=(config.loss_scale or _UNSCALED).init(xp=xp, device=device),
        clip=tuple(rule.init(n_tensors, xp=xp, device=device) for rule in config.clip_rules),
        skipped_total=zero(),
        skipped_in_a_row=zero(),
        nonfinite_in_a_row=zero(),
        halted=zero(),
        recorder=init_recorder(xp=xp, device=device),
        spike=() if config.spike_rule is None else config.spike_rule.init(xp=xp, device=device),
        escalation=() if config.escalate is None else config.escalate.init(xp=xp, device=device),
    )


def decide(
    config: GuardConfig, state: GuardState, observation: Observation, *, xp: Namespace
) -> tuple[Decision, GuardState]:
    """Decide whether a step is applied and with which factor, and what the guard remembers of it.

    A step is applied if every gradient norm is finite, the loss (if known) is finite, ``found_inf`` is not
    set, and the spike rule (if there is one) does not skip it. Only applied steps enter the statistics
    of a rule.

    Args:
        config: the guard's settings.
        state: the guard's state before the step.
        observation: the measurements.
        xp: the array namespace of ``state`` and ``observation``.

    Returns:
        The decision and the next state.

    Raises:
        ValueError: a measurement that a rule needs is missing, or a rule keeps statistics per parameter and
            the observation has a different number of parameters.

    Example:
        >>> import numpy as np
        >>> config = GuardConfig(clip=1.0)
        >>> state = init_guard(config, 2, xp=np)
        >>> seen = Observation(norms=np.asarray([3.0, 4.0], np.float32))
        >>> decision, state = decide(config, state, seen, xp=np)
        >>> bool(decision.apply), round(float(decision.multiplier), 3)
        (True, 0.2)
    """
    _check_observation(config, state, observation)
    scale = state.loss_scale.scale
    raw_total = combine_norms(observation.norms, xp=xp)
    parts = finiteness(raw_total, observation.loss, observation.found_inf, xp=xp)
    finite = parts.gradients & parts.loss & parts.others

    grad_norm = raw_total if config.loss_scale is None else _unscale(raw_total, scale, xp=xp)
    spike, spike_state = _judge(config, state, observation, grad_norm, finite, xp=xp)
    applied = finite if spike is None or config.shrinks_spikes else finite & xp.logical_not(spike.any)
    clipped, multiplier, unit_multipliers = _clip(
        config, state, observation, grad_norm, spike, applied=applied, xp=xp
    )
    one = xp.ones_like(grad_norm)
    decision = Decision(
        apply=applied,
        multiplier=multiplier,
        reason=reason_code(
            parts,
            raw_total,
            clipped.smallest,
            spike,
            shrinks_spikes=config.shrinks_spikes,
            stuck_at_floor=_stuck_at_floor(config, state, xp=xp),
            xp=xp,
        ),
        grad_norm=grad_norm,
        clip_coefficient=xp.where(applied, clipped.smallest, one),
        worst=worst_index(observation.norms, state.step, xp=xp),
        unit_multipliers=unit_multipliers,
    )
    after = _advance(
        config,
        state,
        observation,
        decision,
        clipped.states,
        spike_state,
        finite=finite,
        overflow=parts.loss & xp.logical_not(finite),
        xp=xp,
    )
    return _hold_if_halted(config, state, decision, after, xp=xp)


def _check_observation(config: GuardConfig, state: GuardState, observation: Observation) -> None:
    """Check that the observation has what the rules need. Of arrays, only the shapes are checked.

    Raises:
        ValueError: a measurement is missing, or the number of parameters differs from the state's.
    """
    for name in config.needs:
        if getattr(observation, name) is None:
            rule = type(config.loss_scale).__name__
            raise ValueError(f"observation.{name} must be measured for {rule}; got None.")
    n = observation.norms.shape[0]
    for part in state.clip:
        if isinstance(part, PER_TENSOR_STATES) and part[0].shape[0] != n:
            raise ValueError(
                f"observation.norms must have one entry for each of the {part[0].shape[0]} parameters that "
                f"the guard's state was made for; got {n}. Create a new state (init_guard, tx.init)."
            )
    if config.unit_rule is not None and (observation.units is None or len(observation.units.norms) != n):
        raise ValueError(
            f"observation.units must be measured for AdaptiveGradClip: one array for each of {n} parameters."
        )


def _unscale(norm: Array, scale: Array, *, xp: Namespace) -> Array:
    """Return ``norm / scale``, kept finite if ``norm`` is finite. (A scale below 1 enlarges the norm.)"""
    unscaled = norm / scale
    return xp.where(xp.isfinite(norm), at_most(unscaled, FLOAT32_MAX, xp=xp), norm)


def _with_unscaling(coefficient: Array, scale: Array, grad_norm: Array, *, xp: Namespace) -> Array:
    """Return ``coefficient / scale``, bounded so that it makes no gradient zero or infinite.

    The lower bound is float32's smallest normal number for the quotient, not for the coefficient: with a
    scale of 2^16, coefficients below 2^-110 are applied as 2^-110.

    A scale below 1 enlarges the gradients; where they could leave float32's range, they are not enlarged.
    """
    multiplier = at_least(coefficient / scale, FLOAT32_TINY, xp=xp)
    return xp.where(grad_norm > FLOAT32_MAX / 2, at_most(multiplier, 1.0, xp=xp), multiplier)


def _judge(
    config: GuardConfig,
    state: GuardState,
    observation: Observation,
    grad_norm: Array,
    finite: Array,
    *,
    xp: Namespace,
) -> tuple[Verdict | None, Any]:
    """Return the spike rule's verdict (None without a spike rule) and its next state."""
    if config.spike_rule is None:
        return None, state.spike
    return config.spike_rule.judge(state.spike, observation.loss, grad_norm, finite=finite, xp=xp)


def _clip(
    config: GuardConfig,
    state: GuardState,
    observation: Observation,
    grad_norm: Array,
    spike: Verdict | None,
    *,
    applied: Array,
    xp: Namespace,
) -> tuple[Clipped, Array, tuple[Array, ...]]:
    """Return the outcome of all clip rules, and the multipliers for tensors and for units (1 if the step is
    not applied)."""
    scaled, scale = config.loss_scale is not None, state.loss_scale.scale
    norms = _unscale(observation.norms, scale, xp=xp) if scaled else observation.norms
    units = None
    if config.unit_rule is not None and observation.units is not None and observation.units.norms:
        raw = xp.concat(list(observation.units.norms))
        units = FlatUnits(
            norms=_unscale(raw, scale, xp=xp) if scaled else raw,
            weights=xp.concat(list(observation.units.weights)),
            sizes=tuple(part.shape[0] for part in observation.units.norms),
        )
    clipped = clip_in_order(
        config.clip_rules,
        state.clip,
        norms,
        grad_norm,
        units,
        start=spike.factor if spike is not None and config.shrinks_spikes else None,
        applied=applied,
        per_tensor=config.per_tensor,
        xp=xp,
    )

    def multiplier(factor: Array) -> Array:
        whole = _with_unscaling(factor, scale, grad_norm, xp=xp) if scaled else factor
        return xp.where(applied, whole, xp.ones_like(whole))

    of_units: tuple[Array, ...] = ()
    if units is not None and clipped.unit_factors is not None:
        of_units = units.split(multiplier(clipped.unit_factors))
    return clipped, multiplier(clipped.coefficient), of_units


def _stuck_at_floor(config: GuardConfig, state: GuardState, *, xp: Namespace) -> Array | None:
    """Return () bool, whether the scale is at its smallest value and the previous step overflowed at that
    value too; None for a scale without a smallest value."""
    floor = None if config.loss_scale is None else config.loss_scale.min_scale
    if floor is None:
        return None
    row = state.recorder.floats[-1, :]  # the previous step
    before = (state.skipped_in_a_row > 0) & xp.logical_not(xp.isfinite(row[1])) & (row[2] <= floor)
    return before & (state.loss_scale.scale <= floor)


def _advance(
    config: GuardConfig,
    state: GuardState,
    observation: Observation,
    decision: Decision,
    clip_state: tuple[Any, ...],
    spike_state: Any,
    *,
    finite: Array,
    overflow: Array,
    xp: Namespace,
) -> GuardState:
    """Return the next state.

    Args:
        config: the guard's settings.
        state: the guard's state before the step.
        observation: the measurements.
        decision: the decision about the step.
        clip_state: the next states of the clip rules.
        spike_state: the next state of the spike rule.
        finite: () bool, whether all numbers of the step were finite, even if it was skipped as a spike. Of
            the two, the loss scale depends on this one.
        overflow: () bool, whether the step was skipped for a reason that a smaller loss scale may avoid.
        xp: the array namespace.
    """
    applied, zero = decision.apply, xp.zeros_like(state.step)
    in_a_row = xp.where(applied, zero, _next(state.skipped_in_a_row, xp=xp))
    nonfinite = xp.where(finite, state.nonfinite_in_a_row, _next(state.nonfinite_in_a_row, xp=xp))
    nonfinite = xp.where(applied, zero, nonfinite)
    row = [
        recorded_loss(observation.loss, decision.grad_norm, xp=xp),
        decision.grad_norm,
        state.loss_scale.scale,
        decision.clip_coefficient,
    ]
    level = zero if config.escalate is None else state.escalation.level
    scale_rule = config.loss_scale
    return GuardState(
        step=_next(state.step, xp=xp),
        loss_scale=state.loss_scale
        if scale_rule is None
        else scale_rule.update(
            state.loss_scale,
            overflow=overflow,
            good=finite,
            xp=xp,
            **{name: getattr(observation, name) for name in scale_rule.needs},
        ),
        clip=clip_state,
        skipped_total=xp.where(applied, state.skipped_total, _next(state.skipped_total, xp=xp)),
        skipped_in_a_row=in_a_row,
        nonfinite_in_a_row=nonfinite,
        halted=_halted(config, state, nonfinite, overflow, xp=xp),
        recorder=record(state.recorder, row, [state.step, decision.reason, decision.worst, level], xp=xp),
        spike=spike_state,
        escalation=state.escalation
        if config.escalate is None
        else config.escalate.update(state.escalation, finite=finite, xp=xp),
    )


def _next(count: Array, *, xp: Namespace) -> Array:
    """Return ``count + 1``, held at the largest int32: a negative counter would be an invalid state."""
    return at_most(count, 2**31 - 2, xp=xp) + 1


def _halted(
    config: GuardConfig, state: GuardState, nonfinite: Array, overflow: Array, *, xp: Namespace
) -> Array:
    """Return the next ``state.halted``, given how many steps in a row were not finite, this one included."""
    if config.skip_limit is None:
        return state.halted
    stops = nonfinite >= config.skip_limit
    floor = None if config.loss_scale is None else config.loss_scale.min_scale
    if config.on_nonfinite == "raise" and floor is not None:
        # Every dynamic loss scale overflows now and then; it is an error where the scale cannot be lowered.
        stops = stops & xp.logical_not(overflow & (state.loss_scale.scale > floor))
    return xp.where(stops, xp.ones_like(state.halted), state.halted)


def _hold_if_halted(
    config: GuardConfig, before: GuardState, decision: Decision, after: GuardState, *, xp: Namespace
) -> tuple[Decision, GuardState]:
    """Return the decision and the state after the step. If the guard is halted, return a skip and the state
    before the step."""
    if config.skip_limit is None:
        return decision, after
    halted = before.halted > 0
    # The decision is copied field by field, because torch.compile of torch 2.11 does not trace _replace.
    one = xp.ones_like(decision.grad_norm)
    skipped = Decision(
        apply=decision.apply & xp.logical_not(halted),
        multiplier=xp.where(halted, one, decision.multiplier),
        reason=decision.reason,
        grad_norm=decision.grad_norm,
        clip_coefficient=decision.clip_coefficient,
        worst=decision.worst,
        unit_multipliers=tuple(xp.where(halted, one, part) for part in decision.unit_multipliers),
    )
    return skipped, select(halted, before, after, xp=xp)


def select(condition: Array, chosen: Tree, other: Tree, *, xp: Namespace) -> Tree:
    """Return, for each leaf of nested tuples, ``chosen`` where the () bool ``condition`` holds and ``other``
    elsewhere.

    Example:
        >>> import numpy as np
        >>> select(np.asarray(True), (np.float32(1),), (np.float32(2),), xp=np)[0].item()
        1.0
    """
    return map_leaves(lambda a, b: xp.where(condition, a, b), chosen, other)
