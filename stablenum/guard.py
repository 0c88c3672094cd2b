"""The guard: one pure function that decides what becomes of a training step.

    measure (adapter)   one read of the gradients  ->  Observation
    decide  (here)      Observation + GuardState   ->  Decision, next GuardState
    apply   (adapter)   fold the multiplier into the optimizer's own pass, or skip the step whole

``decide`` works on 0-d and 1-d arrays of any array namespace ``xp``; it has no branch on an
array's value, so it runs eagerly, compiled, inside a scan and on arrays without data, and never
makes the host wait for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, TypeVar

from stablenum.bounds import at_least, at_most
from stablenum.config import GuardConfig
from stablenum.errors import check_int
from stablenum.formats import FLOAT32_MAX, FLOAT32_TINY
from stablenum.loss_scale import LossScaleState, StaticLossScale
from stablenum.norms import combine_norms
from stablenum.recorder import Recorder, init_recorder, record
from stablenum.status import Reason
from stablenum.trees import map_leaves

__all__ = ["Decision", "GuardState", "Observation", "decide", "init_guard", "select"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any
Tree = TypeVar("Tree")


class Observation(NamedTuple):
    """What an adapter measured of one step.

    Attributes:
        norms: (n,) float32, the L2 norm of each parameter's gradient as the optimizer gets it
            (still multiplied by the loss scale). Non-finite if and only if an element is; 0 for
            a parameter without gradient.
        loss: () float32, the unscaled loss, or None if it is not known.
        found_inf: () bool, something outside ``norms`` was non-finite (another rank, an outer
            wrapper), or None.
    """

    norms: Array
    loss: Array | None = None
    found_inf: Array | None = None


class Decision(NamedTuple):
    """What to do with the step.

    Attributes:
        apply: () bool. If False, parameters and optimizer state stay as they are.
        multiplier: the factor on the raw gradients, clipping and unscaling in one: () float32,
            or (n,) float32 if ``config.per_tensor``. Always finite and above 0; 1 if not ``apply``.
        reason: () int32, see :class:`stablenum.status.Reason`.
        grad_norm: () float32, L2 norm of the unscaled gradients before clipping.
        clip_coefficient: () float32, the smallest factor that clipping applies, 1 for none.
        worst: () int32, index of the first non-finite norm, else of the largest; -1 if n = 0.
    """

    apply: Array
    multiplier: Array
    reason: Array
    grad_norm: Array
    clip_coefficient: Array
    worst: Array


class GuardState(NamedTuple):
    """What the guard carries from step to step. Structure, shapes and dtypes never change.

    Attributes:
        step: () int32, steps decided so far, the skipped ones included.
        loss_scale: the loss-scale rule's state.
        clip: one state a clip rule.
        skipped_total: () int32.
        skipped_in_a_row: () int32.
        halted: () int32, 1 once ``config.skip_limit`` was reached. A halted guard refuses every
            further step and changes nothing, so that a host that looks later finds all as it
            was when training should have stopped.
        recorder: the last 128 steps.
    """

    step: Array
    loss_scale: LossScaleState
    clip: tuple[Any, ...]
    skipped_total: Array
    skipped_in_a_row: Array
    halted: Array
    recorder: Recorder


# "No scaling" is scaling by 1, with the arithmetic left out.
_UNSCALED = StaticLossScale(scale=1.0)


def init_guard(config: GuardConfig, n_tensors: int, *, xp: Namespace, device: Any = None) -> GuardState:
    """The state before the first step.

    Args:
        config: the guard's settings.
        n_tensors: how many parameters an observation will have norms for; may be 0.
        xp: the array namespace, as ``array_api_compat.numpy``.
        device: where the state lives, in the namespace's own terms.

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
        halted=zero(),
        recorder=init_recorder(xp=xp, device=device),
    )


def decide(
    config: GuardConfig, state: GuardState, observation: Observation, *, xp: Namespace
) -> tuple[Decision, GuardState]:
    """Decide one step: apply or skip, by what factor, and what the guard remembers of it.

    A step is applied if every gradient norm is finite, the loss (if known) is finite and nobody
    else found an inf. Only applied steps enter the statistics of a rule.

    Args:
        config: the guard's settings.
        state: the guard's state before the step.
        observation: the measurements.
        xp: the array namespace of ``state`` and ``observation``.

    Returns:
        The decision and the next state.

    Example:
        >>> import numpy as np
        >>> config = GuardConfig(clip=1.0)
        >>> state = init_guard(config, 2, xp=np)
        >>> seen = Observation(norms=np.asarray([3.0, 4.0], np.float32))
        >>> decision, state = decide(config, state, seen, xp=np)
        >>> bool(decision.apply), round(float(decision.multiplier), 3)
        (True, 0.2)
    """
    norms = observation.norms
    scale = state.loss_scale.scale
    raw_total = combine_norms(norms, xp=xp)
    gradients_ok, loss_ok, others_ok = _finiteness(raw_total, observation, xp=xp)
    applied = gradients_ok & loss_ok & others_ok

    scaled = config.loss_scale is not None
    norms, grad_norm = (
        (_unscale(norms, scale, xp=xp), _unscale(raw_total, scale, xp=xp)) if scaled else (norms, raw_total)
    )
    coefficient, clip_state = _clip(config, state.clip, norms, grad_norm, applied, xp=xp)
    multiplier = _with_unscaling(coefficient, scale, grad_norm, xp=xp) if scaled else coefficient
    smallest = coefficient
    if config.per_tensor:
        smallest = xp.min(coefficient) if norms.shape[0] else xp.ones_like(grad_norm)

    decision = Decision(
        apply=applied,
        multiplier=xp.where(applied, multiplier, xp.ones_like(multiplier)),
        reason=_reason(raw_total, smallest, gradients_ok, loss_ok, others_ok, xp=xp),
        grad_norm=grad_norm,
        clip_coefficient=xp.where(applied, smallest, xp.ones_like(smallest)),
        worst=_worst(observation.norms, state.step, xp=xp),
    )
    after = _advance(
        config, state, observation, decision, clip_state, overflow=loss_ok & xp.logical_not(applied), xp=xp
    )
    return _hold_if_halted(config, state, decision, after, xp=xp)


def _finiteness(total: Array, observation: Observation, *, xp: Namespace) -> tuple[Array, Array, Array]:
    """Whether the gradients, the loss and everything else are finite: three () bool."""
    gradients_ok = xp.isfinite(total)
    loss, found_inf = observation.loss, observation.found_inf
    yes = xp.ones_like(gradients_ok)
    return (
        gradients_ok,
        yes if loss is None else xp.isfinite(loss),
        yes if found_inf is None else xp.logical_not(found_inf),
    )


def _unscale(norm: Array, scale: Array, *, xp: Namespace) -> Array:
    """``norm / scale`` that stays finite if ``norm`` is (a scale below 1 enlarges)."""
    unscaled = norm / scale
    return xp.where(xp.isfinite(norm), at_most(unscaled, FLOAT32_MAX, xp=xp), norm)


def _with_unscaling(coefficient: Array, scale: Array, grad_norm: Array, *, xp: Namespace) -> Array:
    """``coefficient / scale``, kept from zeroing gradients and from making them infinite.

    A scale below 1 enlarges them; where that would leave float32's range they stay as they are.
    """
    multiplier = at_least(coefficient / scale, FLOAT32_TINY, xp=xp)
    return xp.where(grad_norm > FLOAT32_MAX / 2, at_most(multiplier, 1.0, xp=xp), multiplier)


def _clip(
    config: GuardConfig, states: tuple[Any, ...], norms: Array, total: Array, applied: Array, *, xp: Namespace
) -> tuple[Array, tuple[Any, ...]]:
    """The joint factor of all clip rules, each seeing the norms that the ones before it leave."""
    coefficient, left, after = xp.ones_like(norms if config.per_tensor else total), norms, []
    for i, (rule, state) in enumerate(zip(config.clip_rules, states, strict=True)):
        if i > 0:
            left = norms * coefficient
            total = combine_norms(left, xp=xp)
        factor, state = rule.multiplier(state, left, total, applied=applied, xp=xp)
        # A factor that flushed to zero would silently zero finite gradients. The floor stands here, so that
        # the rules to come see what will really be left.
        factor = at_least(factor, FLOAT32_TINY, xp=xp)
        coefficient = at_least(coefficient * factor, FLOAT32_TINY, xp=xp)
        after.append(state)
    return coefficient, tuple(after)


def _reason(
    total: Array, coefficient: Array, gradients_ok: Array, loss_ok: Array, others_ok: Array, *, xp: Namespace
) -> Array:
    """The reason code, first cause first: a bad loss makes bad gradients, not the reverse."""

    def code(reason: Reason) -> Array:
        return xp.full_like(gradients_ok, int(reason), dtype=xp.int32)

    reason = xp.where(coefficient < 1, code(Reason.CLIPPED), code(Reason.OK))
    reason = xp.where(others_ok, reason, code(Reason.FOUND_INF))
    bad_gradient = xp.where(xp.isnan(total), code(Reason.NAN_GRADIENT), code(Reason.INF_GRADIENT))
    reason = xp.where(gradients_ok, reason, bad_gradient)
    return xp.where(loss_ok, reason, code(Reason.NONFINITE_LOSS))


def _worst(norms: Array, like: Array, *, xp: Namespace) -> Array:
    """Index of the first non-finite norm, else of the largest (the first of equals)."""
    if norms.shape[0] == 0:
        return xp.full_like(like, -1)
    infinite = xp.full_like(norms, float("inf"))
    return xp.astype(xp.argmax(xp.where(xp.isfinite(norms), norms, infinite)), xp.int32)


def _advance(
    config: GuardConfig,
    state: GuardState,
    observation: Observation,
    decision: Decision,
    clip_state: tuple[Any, ...],
    *,
    overflow: Array,
    xp: Namespace,
) -> GuardState:
    """The next state. ``overflow``: refused for a reason that a smaller loss scale may cure."""
    applied, zero = decision.apply, xp.zeros_like(state.step)
    one = xp.where(applied, zero, zero + 1)
    in_a_row = xp.where(applied, zero, state.skipped_in_a_row + 1)
    loss = observation.loss
    row = [
        xp.full_like(decision.grad_norm, float("nan")) if loss is None else loss,
        decision.grad_norm,
        state.loss_scale.scale,
        decision.clip_coefficient,
    ]
    scale_rule = config.loss_scale
    return GuardState(
        step=state.step + 1,
        loss_scale=state.loss_scale
        if scale_rule is None
        else scale_rule.update(state.loss_scale, overflow=overflow, applied=applied, xp=xp),
        clip=clip_state,
        skipped_total=state.skipped_total + one,
        skipped_in_a_row=in_a_row,
        halted=state.halted
        if config.skip_limit is None
        else xp.where(in_a_row >= config.skip_limit, zero + 1, state.halted),
        recorder=record(state.recorder, row, [state.step, decision.reason, decision.worst], xp=xp),
    )


def _hold_if_halted(
    config: GuardConfig, before: GuardState, decision: Decision, after: GuardState, *, xp: Namespace
) -> tuple[Decision, GuardState]:
    """A halted guard refuses the step and keeps its state."""
    if config.skip_limit is None:
        return decision, after
    halted = before.halted > 0
    # Field by field: torch.compile of torch 2.6 traces neither _replace nor a slice of a NamedTuple.
    refused = Decision(
        apply=decision.apply & xp.logical_not(halted),
        multiplier=xp.where(halted, xp.ones_like(decision.multiplier), decision.multiplier),
        reason=decision.reason,
        grad_norm=decision.grad_norm,
        clip_coefficient=decision.clip_coefficient,
        worst=decision.worst,
    )
    return refused, select(halted, before, after, xp=xp)


def select(condition: Array, chosen: Tree, other: Tree, *, xp: Namespace) -> Tree:
    """``chosen`` where the () bool ``condition`` holds, else ``other``, leaf by leaf of nested tuples.

    Example:
        >>> import numpy as np
        >>> select(np.asarray(True), (np.float32(1),), (np.float32(2),), xp=np)[0].item()
        1.0
    """
    return map_leaves(lambda a, b: xp.where(condition, a, b), chosen, other)
