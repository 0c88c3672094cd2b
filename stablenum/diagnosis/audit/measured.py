"""The measurements for one parameter: a pure function of a block of its elements, and how blocks are joined.

Arrays are float64, so that squares and roots of v = 3e38 or v = 1e-45 neither overflow nor vanish. Elements
are divided by the block's largest element before their squares are summed, so that float64 itself does not
overflow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stablenum.diagnosis.audit.update_formulas import Moments, Role, UpdateFormula, update_of

__all__ = ["Measured", "join_blocks", "measure_block", "poisoned"]

Array = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Counts and extremes of one parameter; None for values that could not be determined.

    Attributes:
        size: the number of elements measured. All other counts are also numbers of elements.
        parameter_bad: parameters that are not finite.
        parameter_rms: the RMS of the finite parameters.
        moment_nan: elements with NaN in an entry of the state.
        second_inf: elements with an infinite second moment (or maximum, norm, accumulator).
        second_negative: elements in which one of these is negative.
        first_inf: elements with inf in any other entry.
        poisoned: elements with any of these four problems in the state.
        vanished: elements with v == 0 and m != 0.
        largest_vanished: the largest abs(m) among these.
        alive: elements where m or v is not zero.
        below_eps: those among them with sqrt(v) < eps.
        gradient_ratio: the root of the mean of g^2 / v, where v is an average (divided by 1 - beta2^step).
        gradient_bad: gradients that are not finite.
        update_rms: the RMS of the update.
        update_max: the largest magnitude of the update.
        update_bad: elements whose update or updated parameter is not finite although state and parameter are.
        update_relative: the largest abs(dw) / abs(w) where w is not 0.
        moved: elements with dw != 0.
        stalled: those among them with w + dw == w in the parameter's format.
    """

    size: int = 0
    parameter_bad: int = 0
    parameter_rms: float | None = None
    moment_nan: int | None = None
    second_inf: int | None = None
    second_negative: int | None = None
    first_inf: int | None = None
    poisoned: int | None = None
    vanished: int | None = None
    largest_vanished: float | None = None
    alive: int | None = None
    below_eps: int | None = None
    gradient_ratio: float | None = None
    gradient_bad: int | None = None
    update_rms: float | None = None
    update_max: float | None = None
    update_bad: int | None = None
    update_relative: float | None = None
    moved: int | None = None
    stalled: int | None = None


# How the parts of blocks are joined: counts by their sum, extremes by their maximum, and root mean squares
# from three parts each.
_COUNTS = (
    "size", "parameter_bad", "moment_nan", "second_inf", "second_negative", "first_inf", "poisoned",
    "vanished", "alive", "below_eps", "gradient_bad", "update_bad", "moved", "stalled",
)  # fmt: skip
_LARGEST = ("largest_vanished", "update_max", "update_relative")
_MEANS = ("parameter_rms", "gradient_ratio", "update_rms")


def poisoned(entries: Sequence[tuple[Role, Array]], *, xp: Any) -> Array:
    """Return the elements whose state no later gradient repairs: NaN, inf, or a negative second moment.

    Args:
        entries: at least one role and array; the arrays have one shape. Entries of unknown meaning are
            ignored.
        xp: the array namespace.

    Example:
        >>> import array_api_compat.numpy as np
        >>> poisoned([(Role.SECOND, np.asarray([1.0, -1.0, np.inf]))], xp=np)
        array([False,  True,  True])
    """
    found = None
    for role, values in entries:
        if role is Role.OTHER:
            continue
        bad = xp.logical_not(xp.isfinite(values))
        if role.squared:
            bad = xp.logical_or(bad, _real(values, xp) < 0)
        found = bad if found is None else xp.logical_or(found, bad)
    return found


def measure_block(
    parameter: Array,
    entries: Sequence[tuple[Role, Array]],
    gradient: Array | None,
    update: Array | None,
    formula: UpdateFormula,
    *,
    eps: float | None,
    narrow: Callable[[Array], Array],
    xp: Any,
) -> dict[str, Array]:
    """Return the parts that :func:`join_blocks` joins, as a dict of 0-d float64 arrays by name. Unknown parts
    are left out.

    Args:
        parameter: (n,) float64 or complex128 elements, n > 0.
        entries: the roles and the (n,) arrays of the state's entries.
        gradient: (n,) or None.
        update: (n,) what is added to the parameter, if known; None to compute it by the formula.
        formula: the optimizer's update formula.
        eps: the value that takes part in the division.
        narrow: rounds an array to the parameter's format and converts it back.
        xp: the array namespace.
    """
    parts: dict[str, Array] = {}
    ones = xp.ones_like(xp.abs(parameter))
    finite = xp.isfinite(parameter)

    def count(name: str, where: Array) -> None:
        parts[name] = xp.sum(xp.where(where, ones, 0.0 * ones))

    def largest(name: str, values: Array, where: Array) -> None:
        parts[name] = xp.max(xp.where(where, values, 0.0 * ones))

    def mean_square(name: str, values: Array, where: Array) -> None:
        kept = xp.where(where, values, 0.0 * ones)
        top = xp.max(kept)
        scale = xp.where(top > 0, top, xp.ones_like(top))
        parts[f"{name}.top"] = top
        parts[f"{name}.squares"] = xp.sum((kept / scale) ** 2)
        parts[f"{name}.count"] = xp.sum(xp.where(where, ones, 0.0 * ones))

    parts["size"] = xp.sum(ones)
    count("parameter_bad", xp.logical_not(finite))
    mean_square("parameter_rms", xp.abs(parameter), finite)

    known = [(role, values) for role, values in entries if role is not Role.OTHER]
    clean = xp.ones_like(finite)
    if known:
        bad = poisoned(known, xp=xp)
        clean = xp.logical_not(bad)
        count("poisoned", bad)
        count("moment_nan", _any([xp.isnan(v) for _, v in known], xp))
        squared = [_real(v, xp) for role, v in known if role.squared]
        others = [v for role, v in known if not role.squared]
        if squared:
            count("second_inf", _any([xp.isinf(v) for v in squared], xp))
            count("second_negative", _any([v < 0 for v in squared], xp))
        if others:
            count("first_inf", _any([xp.isinf(v) for v in others], xp))

    moments = _moments(known, gradient, clean, xp)
    root = moments.second if moments.second is not None else moments.norm
    if root is not None and moments.first is not None:
        gone = xp.logical_and(clean, xp.logical_and(root == 0, moments.first != 0))
        count("vanished", gone)
        largest("largest_vanished", xp.abs(moments.first), gone)

    correction = formula.second_correction
    if moments.second is not None:
        alive = moments.second != 0
        if moments.first is not None:
            alive = xp.logical_or(alive, moments.first != 0)
        alive = xp.logical_and(alive, clean)
        count("alive", alive)
        if correction is not None:
            corrected = moments.second / correction + formula.eps_root
            if formula.eps is not None:
                count("below_eps", xp.logical_and(alive, xp.sqrt(corrected) < formula.eps))
        average = formula.average_correction
        if average is not None and gradient is not None:
            _gradient_ratio(mean_square, gradient, moments.second / average, clean, formula.eps or 0.0, xp)
    if gradient is not None:
        count("gradient_bad", xp.logical_not(xp.isfinite(gradient)))

    if update is None:
        update = update_of(formula, moments, eps=eps, xp=xp)
    if update is not None:
        judged = xp.logical_and(finite, clean)
        if gradient is not None:  # the optimizer is not to blame for the effect of a bad gradient
            judged = xp.logical_and(judged, xp.isfinite(gradient))
        after = narrow(parameter + update)
        sound = xp.logical_and(judged, xp.logical_and(xp.isfinite(update), xp.isfinite(after)))
        count("update_bad", xp.logical_and(judged, xp.logical_not(sound)))
        size, weight = xp.abs(update), xp.abs(parameter)
        mean_square("update_rms", size, sound)
        largest("update_max", size, sound)
        nonzero = weight > 0
        relative = size / xp.where(nonzero, weight, ones)
        largest("update_relative", relative, xp.logical_and(sound, nonzero))
        moved = xp.logical_and(sound, size > 0)
        count("moved", moved)
        count("stalled", xp.logical_and(moved, after == parameter))
    return parts


def _moments(known: Sequence[tuple[Role, Array]], gradient: Array | None, clean: Array, xp: Any) -> Moments:
    """Return the entries by their roles, with poisoned elements set to 0. With AMSGrad, the maximum is the
    second moment."""
    by_role = {role: xp.where(clean, v, xp.zeros_like(v)) for role, v in known}
    second = by_role.get(Role.SECOND_MAX, by_role.get(Role.SECOND))
    return Moments(
        first=by_role.get(Role.FIRST),
        second=None if second is None else _real(second, xp),
        norm=by_role.get(Role.NORM),
        mean=by_role.get(Role.MEAN),
        buffer=by_role.get(Role.BUFFER),
        gradient=gradient,
    )


def _gradient_ratio(
    mean_square: Callable[[str, Array, Array], None],
    gradient: Array,
    second: Array,
    clean: Array,
    eps: float,
    xp: Any,
) -> None:
    """Measure the RMS of g / sqrt(max(v, eps^2)), as in StableAdamW; 0 / 0 counts as 0."""
    size = xp.abs(gradient)
    below = xp.sqrt(second)
    below = xp.where(below < eps, xp.full_like(below, eps), below)
    used = xp.logical_and(clean, xp.isfinite(size))
    zero = size == 0
    ratio = xp.where(zero, xp.zeros_like(size), size / xp.where(zero, xp.ones_like(below), below))
    # Where the second moment and eps are both 0, the ratio is set to the largest number, which can still be
    # squared and joined.
    ratio = xp.where(xp.isinf(ratio), xp.full_like(ratio, _MAX), ratio)
    mean_square("gradient_ratio", ratio, used)


_MAX = 1.7976931348623157e308


def _any(masks: Sequence[Array], xp: Any) -> Array:
    found = masks[0]
    for mask in masks[1:]:
        found = xp.logical_or(found, mask)
    return found


def _real(values: Array, xp: Any) -> Array:
    return xp.real(values) if xp.isdtype(values.dtype, "complex floating") else values


def join_blocks(blocks: Sequence[Mapping[str, float]]) -> Measured:
    """Return the statistics of a parameter from those of its blocks, which have been read on the host.

    Example:
        >>> join_blocks([{"size": 2.0, "parameter_bad": 1.0}, {"size": 1.0, "parameter_bad": 0.0}]).size
        3
    """
    if not blocks:
        return Measured()
    known = blocks[0]
    found: dict[str, Any] = {n: int(sum(b[n] for b in blocks)) for n in _COUNTS if n in known}
    found |= {n: max(b[n] for b in blocks) for n in _LARGEST if n in known}
    for name in _MEANS:
        if f"{name}.top" in known:
            found[name] = _joined_mean(
                [(b[f"{name}.top"], b[f"{name}.squares"], b[f"{name}.count"]) for b in blocks]
            )
    return dataclasses.replace(Measured(), **found)


def _joined_mean(parts: Sequence[tuple[float, float, float]]) -> float | None:
    """Return the root mean square of several blocks, or None if they have no elements. Each block is given by
    its largest magnitude, the sum of (x / largest)^2, and its count."""
    count = sum(n for _, _, n in parts)
    if not count:
        return None
    top = max(t for t, _, _ in parts)
    if top == 0.0:
        return 0.0
    return top * math.sqrt(sum(squares * (t / top) ** 2 for t, squares, _ in parts) / count)
