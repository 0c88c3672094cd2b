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

from stablenum._support.settings_checks import check_int
from stablenum.arrays import at_least, at_most, map_leaves
from stablenum.errors import bad_field, bad_type
from stablenum.formats import FLOAT32_MAX
from stablenum.guard.config import GuardConfig
from stablenum.guard.finiteness import finiteness, reason_code, worst_index
from stablenum.guard.observation import Decision, Fault, Observation
from stablenum.guard.ranks import joint_found_inf, joint_loss, worst_of_ranks
from stablenum.guard.recorder import Recorder, init_recorder, record, record_fault, recorded_loss
from stablenum.norms.wide import Wide, choose, fold, join, over_scale, recorded, unscale
from stablenum.rules.clipping import PER_TENSOR_STATES, Clipped, FlatUnits, clip_in_order
from stablenum.rules.clipping.common import no_change, shortening
from stablenum.rules.loss_scale import LossScaleState, StaticLossScale
from stablenum.rules.spikes import Verdict

__all__ = ["Decision", "GuardState", "Observation", "after_fault", "decide", "init_guard", "select"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any
Tree = TypeVar("Tree")


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
        TypeError: ``config`` is no GuardConfig.
        ValueError: ``n_tensors`` is not a whole number of 0 or more.

    Example:
        >>> import numpy as np
        >>> state = init_guard(GuardConfig(loss_scale="dynamic"), 2, xp=np)
        >>> float(state.loss_scale.scale)
        65536.0
    """
    if not isinstance(config, GuardConfig):
        raise bad_type("config", "a GuardConfig", config)
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

    A step is applied if every gradient norm is finite, the loss (if known) is finite, neither ``found_inf``
    nor a ``fault`` is set, and the spike rule (if there is one) does not skip it. Only applied steps enter
    the statistics of a rule.

    Args:
        config: the guard's settings.
        state: the guard's state before the step.
        observation: the measurements.
        xp: the array namespace of ``state`` and ``observation``.

    Returns:
        The decision and the next state.

    Raises:
        TypeError: an argument is of another class.
        ValueError: a measurement that a rule needs is missing, the state was made for other settings, or a
            rule keeps statistics per parameter and the observation has a different number of parameters.

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
    observation, raw_total, worst = _joint(observation, state.step, xp=xp)
    parts = finiteness(raw_total.value, observation.loss, observation.found_inf, xp=xp)
    finite = parts.gradients & parts.loss & parts.others
    overflow = parts.loss & xp.logical_not(finite)
    fault = observation.fault
    if fault is not None:
        sound = fault.reason == 0
        finite = finite & sound
        worst = xp.where(sound | (fault.worst < 0), worst, fault.worst)

    total = raw_total if config.loss_scale is None else unscale(raw_total, scale, xp=xp)
    grad_norm = recorded(total, xp=xp)
    spike, spike_state = _judge(config, state, observation, grad_norm, finite, xp=xp)
    applied = finite if spike is None or config.shrinks_spikes else finite & xp.logical_not(spike.any)
    clipped, factor, unit_factors = _clip(
        config, state, observation, raw_total, total, spike, applied=applied, xp=xp
    )
    one = xp.ones_like(grad_norm)
    decision = Decision(
        apply=applied,
        multiplier=factor.value,
        reason=reason_code(
            parts,
            raw_total.value,
            clipped.smallest,
            spike,
            shrinks_spikes=config.shrinks_spikes,
            stuck_at_floor=_stuck_at_floor(config, state, xp=xp),
            fault=None if fault is None else fault.reason,
            xp=xp,
        ),
        grad_norm=grad_norm,
        clip_coefficient=xp.where(applied, clipped.smallest, one),
        worst=worst,
        unit_multipliers=tuple(part.value for part in unit_factors),
        shift=() if factor.power is None else factor.power,
        unit_shifts=() if factor.power is None else tuple(part.power for part in unit_factors),
    )
    after = _advance(
        config,
        state,
        observation,
        decision,
        clipped.states,
        spike_state,
        finite=finite,
        overflow=overflow,
        xp=xp,
    )
    return _hold_if_halted(config, state, decision, after, xp=xp)


def _joint(observation: Observation, like: Array, *, xp: Namespace) -> tuple[Observation, Wide, Array]:
    """Return the observation with the loss and ``found_inf`` of all ranks, the joint norm of the gradients as
    they were measured, and the worst parameter."""
    ranks, norms = observation.ranks, Wide(observation.norms, observation.exponents)
    if ranks is None:
        worst = worst_index(norms, like, xp=xp)
    else:
        norms, worst = Wide(ranks.norms, ranks.exponents), worst_of_ranks(ranks, xp=xp)
        found_inf = joint_found_inf(ranks, xp=xp)
        # Copied field by field, because torch.compile of torch 2.11 does not trace _replace.
        observation = Observation(
            norms=observation.norms,
            loss=joint_loss(ranks, xp=xp),
            found_inf=found_inf if observation.found_inf is None else found_inf | observation.found_inf,
            units=observation.units,
            amax=observation.amax,
            tiny=observation.tiny,
            exponents=observation.exponents,
            ranks=ranks,
            total=observation.total,
            fault=observation.fault,
        )
    return observation, join(norms, xp=xp) if observation.total is None else observation.total, worst


def _check_observation(config: GuardConfig, state: GuardState, observation: Observation) -> None:
    """Check that the observation has what the rules need. Of arrays, only the shapes are checked.

    Raises:
        TypeError: an argument is of another class.
        ValueError: a measurement is missing, norms are not in a row, the state was made for other settings,
            or for another number of parameters.
    """
    _check_classes(config, state, observation)
    for name in config.needs:
        if getattr(observation, name) is None:
            rule = type(config.loss_scale).__name__
            raise ValueError(f"observation.{name} must be measured for {rule}; got None.")
    if getattr(observation.norms, "ndim", None) != 1:
        got = f"shape {observation.norms.shape}" if hasattr(observation.norms, "shape") else observation.norms
        raise bad_field("observation.norms", "an array of shape (n,), one norm per parameter", got)
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


def _check_classes(config: GuardConfig, state: GuardState, observation: Observation) -> None:
    if not isinstance(config, GuardConfig):
        raise bad_type("config", "a GuardConfig", config)
    if not isinstance(state, GuardState):
        raise bad_type("state", "a GuardState (init_guard makes one)", state)
    if not isinstance(observation, Observation):
        raise bad_type("observation", "an Observation", observation)
    same = len(state.clip) == len(config.clip_rules)
    if not same or bool(len(state.spike)) != (config.spike_rule is not None):
        raise ValueError(
            "state must be one that init_guard made with these settings; got that of another config, with "
            f"{len(state.clip)} clip rules and {'a' if len(state.spike) else 'no'} spike rule."
        )


def _bounded(factor: Wide, norm: Wide, raw: Wide, clipped: Array, *, xp: Namespace) -> Wide:
    """Return the factor on raw gradients, bounded so that it makes no gradient zero or infinite.

    Without exponents, the lower bound is float32's smallest normal number for clipping and unscaling
    together: with a scale of 2^16, coefficients below 2^-110 are applied as 2^-110.

    A scale below 1 enlarges the gradients; where they could leave float32's range, they are not enlarged.
    """
    factor = fold(factor, xp=xp)
    beyond = recorded(norm, xp=xp) > FLOAT32_MAX / 2
    if norm.power is None:
        return Wide(xp.where(beyond, at_most(factor.value, 1.0, xp=xp), factor.value))
    # A clipped gradient is in range, whatever it was. The other ones are enlarged as far as float32 allows.
    most = at_least(FLOAT32_MAX / 2 / at_least(recorded(raw, xp=xp), 1.0, xp=xp), 1.0, xp=xp)
    value = xp.where(beyond & xp.logical_not(clipped), xp.minimum(factor.value, most), factor.value)
    return Wide(value, factor.power)


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
    raw_total: Wide,
    total: Wide,
    spike: Verdict | None,
    *,
    applied: Array,
    xp: Namespace,
) -> tuple[Clipped, Wide, tuple[Wide, ...]]:
    """Return the outcome of all clip rules, and the factors on raw gradients, of tensors and of units (1 if
    the step is not applied)."""
    scaled, scale = config.loss_scale is not None, state.loss_scale.scale
    raw = Wide(observation.norms, observation.exponents)
    norms, raw_units, units = unscale(raw, scale, xp=xp) if scaled else raw, raw, None
    if config.unit_rule is not None and observation.units is not None and observation.units.norms:
        seen = observation.units
        raw_units = Wide(
            xp.concat(list(seen.norms)),
            None if raw.power is None else xp.concat(list(seen.exponents)),
        )
        units = FlatUnits(
            norms=unscale(raw_units, scale, xp=xp) if scaled else raw_units,
            weights=xp.concat(list(seen.weights)),
            sizes=tuple(part.shape[0] for part in seen.norms),
        )
    shrinks = spike is not None and config.shrinks_spikes
    clipped = clip_in_order(
        config.clip_rules,
        state.clip,
        norms,
        total,
        units,
        start=shortening(total, spike.limit, xp=xp) if spike is not None and shrinks else None,
        applied=applied,
        per_tensor=config.per_tensor,
        partial=observation.ranks is not None,
        xp=xp,
    )

    def on_raw(factor: Wide, norm: Wide, raw: Wide) -> Wide:
        whole = factor
        if scaled:
            less = (factor.value < 1) if factor.power is None else (factor.value < 1) | (factor.power < 0)
            whole = _bounded(over_scale(factor, scale, xp=xp), norm, raw, less, xp=xp)
        else:
            whole = fold(factor, xp=xp)
        return choose(applied, whole, no_change(whole, xp=xp), xp=xp)

    of_units: tuple[Wide, ...] = ()
    if units is not None and clipped.unit_factors is not None:
        alone = raw.power is not None
        flat = on_raw(
            clipped.unit_factors, units.norms if alone else total, raw_units if alone else raw_total
        )
        values = units.split(flat.value)
        powers = (None,) * len(values) if flat.power is None else units.split(flat.power)
        of_units = tuple(map(Wide, values, powers))
    each = config.per_tensor and raw.power is not None
    of_all = on_raw(clipped.coefficient, norms if each else total, raw if each else raw_total)
    return clipped, of_all, of_units


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
        overflow: () bool, whether something was not finite that a smaller loss scale may make finite.
        xp: the array namespace.
    """
    applied, zero = decision.apply, xp.zeros_like(state.step)
    in_a_row = xp.where(applied, zero, _next(state.skipped_in_a_row, xp=xp))
    nonfinite = xp.where(finite, state.nonfinite_in_a_row, _next(state.nonfinite_in_a_row, xp=xp))
    nonfinite = xp.where(applied, zero, nonfinite)
    row = [
        # The mean over ranks is NO_LOSS where none of them has a loss.
        observation.loss
        if observation.ranks is not None
        else recorded_loss(observation.loss, decision.grad_norm, xp=xp),
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
        halted=_halted(config, state, nonfinite, _excused(overflow, observation.fault), xp=xp),
        recorder=record(state.recorder, row, [state.step, decision.reason, decision.worst, level], xp=xp),
        spike=spike_state,
        escalation=state.escalation
        if config.escalate is None
        else config.escalate.update(state.escalation, finite=finite, xp=xp),
    )


def after_fault(
    config: GuardConfig, before: GuardState, after: GuardState, fault: Fault, *, xp: Namespace
) -> GuardState:
    """Return the state after a step that is skipped because it is not finite, given a fault that was found
    after the decision. It is the state after a decision that knows the fault.

    Args:
        config: the guard's settings.
        before: the state before the step.
        after: the state after the step without the fault.
        fault: what was found; the reason 0 for nothing.
        xp: the array namespace.
    """
    # Of a guard that has halted before, nothing changes.
    reason = xp.where(before.halted > 0, xp.zeros_like(fault.reason), fault.reason)
    halted = after.halted
    if config.skip_limit is not None:
        stops = (after.nonfinite_in_a_row >= config.skip_limit) & (reason != 0)
        halted = xp.where(stops, xp.ones_like(halted), halted)
    return after._replace(recorder=record_fault(after.recorder, reason, fault.worst, xp=xp), halted=halted)


def _excused(overflow: Array, fault: Fault | None) -> Array:
    """Return () bool, whether a smaller loss scale may be all that the step lacks."""
    return overflow if fault is None else overflow & (fault.reason == 0)


def _next(count: Array, *, xp: Namespace) -> Array:
    """Return ``count + 1``, held at the largest int32: a negative counter would be an invalid state."""
    return at_most(count, 2**31 - 2, xp=xp) + 1


def _halted(
    config: GuardConfig, state: GuardState, nonfinite: Array, excused: Array, *, xp: Namespace
) -> Array:
    """Return the next ``state.halted``, given how many steps in a row were not finite, this one included."""
    if config.skip_limit is None:
        return state.halted
    stops = nonfinite >= config.skip_limit
    floor = None if config.loss_scale is None else config.loss_scale.min_scale
    if config.on_nonfinite == "raise" and floor is not None:
        # Every dynamic loss scale overflows now and then; it is an error where the scale cannot be lowered.
        stops = stops & xp.logical_not(excused & (state.loss_scale.scale > floor))
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

    def unshifted(part: Array) -> Array:
        return xp.where(halted, xp.zeros_like(part), part)

    skipped = Decision(
        apply=decision.apply & xp.logical_not(halted),
        multiplier=xp.where(halted, one, decision.multiplier),
        reason=decision.reason,
        grad_norm=decision.grad_norm,
        clip_coefficient=decision.clip_coefficient,
        worst=decision.worst,
        unit_multipliers=tuple(xp.where(halted, one, part) for part in decision.unit_multipliers),
        shift=map_leaves(unshifted, decision.shift),
        unit_shifts=map_leaves(unshifted, decision.unit_shifts),
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
