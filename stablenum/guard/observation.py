"""What passes between an adapter and ``decide``: the measurements of a step, and the decision about it."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from stablenum.guard.ranks import Ranks
from stablenum.norms.wide import Wide
from stablenum.rules.clipping import Units

__all__ = ["Decision", "Fault", "Observation"]

Array: TypeAlias = Any


class Fault(NamedTuple):
    """Why a step must not be applied, whatever its gradients are, as far as the adapter knows.

    Attributes:
        reason: () int32, ``NONFINITE_SETTING`` or ``NONFINITE_UPDATE``; 0 for no fault.
        worst: () int32, the index of the parameter at fault; -1 if it is none in particular.
    """

    reason: Array
    worst: Array


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
        exponents: (n,) int32, multiples of 64: the norms are ``norms * 2**exponents``. An exponent is 0 for
            a norm in float32's range, and for one that is not finite; above that range it is the smallest
            for which the entry of ``norms`` is in that range. With None, norms and factors outside that range
            saturate, and ``Decision.shift`` is ().
        ranks: where several ranks decide together, what each of them measured. The joint norm, the loss and
            the worst parameter are then taken from it, its ``found_inf`` counts besides the one here, and
            ``norms`` (of the joint gradients) counts only for rules that treat each parameter by itself, and
            for a clip rule that follows another. None if ``norms`` are all there is.
        fault: why the step must not be applied, whatever its gradients are; None if nothing is known. Only
            where one process decides alone: the ranks that decide together have ``found_inf``.
        total: the joint norm, () float32 with its exponent, where it was computed without rounding; None to
            compute it from ``norms`` or ``ranks``.
    """

    norms: Array
    loss: Array | None = None
    found_inf: Array | None = None
    units: Units | None = None
    amax: Array | None = None
    tiny: Array | None = None
    exponents: Array | None = None
    ranks: Ranks | None = None
    total: Wide | None = None
    fault: Fault | None = None


class Decision(NamedTuple):
    """What to do with the step.

    Attributes:
        apply: () bool. If False, parameters and optimizer state stay as they are.
        multiplier: the factor on the raw gradients, for clipping and unscaling together: () float32,
            or (n,) float32 if ``config.per_tensor``. It is always finite and at least float32's smallest
            normal number, 1.2e-38 (clipping and 1 / scale together), and is 1 if ``apply`` is False. For a
            factor below that, it is to be multiplied by ``2**shift``.
        reason: () int32, see :class:`stablenum.Reason`.
        grad_norm: () float32, the L2 norm of the unscaled gradients before clipping.
        clip_coefficient: () float32, the smallest factor that clipping applies; 1 for no clipping.
        worst: () int32, the index of the first non-finite norm, otherwise of the largest; -1 if n = 0. With
            ``Observation.ranks`` it has the rank too, see ``stablenum.guard.ranks``.
        unit_multipliers: with :class:`stablenum.AdaptiveGradClip`, for each parameter the (u_i,) float32
            factors on the raw gradients of its units, which replace ``multiplier``; (0,) for a parameter
            that the rule leaves unchanged. () without that rule.
        shift: int32 in the shape of ``multiplier``, at most 0: the factor on the raw gradients is
            ``multiplier * 2**shift``; a multiple of 64. It is 0 unless the factor is below float32's
            smallest normal number, and () if the observation has no ``exponents``.
        unit_shifts: the same for ``unit_multipliers``.
    """

    apply: Array
    multiplier: Array
    reason: Array
    grad_norm: Array
    clip_coefficient: Array
    worst: Array
    unit_multipliers: tuple[Array, ...] = ()
    shift: Any = ()
    unit_shifts: tuple[Array, ...] = ()
