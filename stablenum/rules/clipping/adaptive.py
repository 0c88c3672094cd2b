"""Adaptive gradient clipping: clips each unit's gradient relative to the unit's weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, TypeAlias

from stablenum._support.settings_checks import check_choice, check_field
from stablenum.arrays import at_least
from stablenum.errors import bad_field
from stablenum.norms.wide import Wide, choose, quotient, recorded
from stablenum.rules.clipping.common import Stateless, no_change

__all__ = ["AdaptiveGradClip", "OutputAxis"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any
OutputAxis: TypeAlias = Literal["first", "last"]

# Avoids division by zero, as in optax and NFNets. It has an effect only for tiny ``clipping`` and ``eps``.
_DIV_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveGradClip(Stateless):
    """Shrink each unit's gradient to at most ``clipping`` times the norm of the unit's weights (AGC).

    ``g <- g * clipping * max(|w|, eps) / max(|g|, 1e-6)`` where ``|g| >= clipping * max(|w|, eps)``. A unit
    is the set of weights that feed one output, such as a row of a linear layer or a filter of a convolution;
    a vector (bias, gain) or a scalar is one unit. Brock et al. 2021 (arXiv 2102.06171) do not clip the last
    linear layer; to do the same, name it in ``exclude``. The formula is that of ``optax.adaptive_grad_clip``.

    The norms of the units are computed in the same read of the gradients as the norms of the tensors; the
    weights are read once more. A unit whose weights are not finite is left unchanged; a zero gradient stays
    zero. Of gradients that are DTensors, whole units count, wherever their parts are, and so they do inside
    ``shard_map`` with ``guard(axis_name=..., specs=...)``. Plain shards (``process_group``, or ``axis_name``
    without ``specs``) are rejected, because it is not known which part of a unit they hold.

    Args:
        clipping: the largest ratio of gradient norm to weight norm, above 0.
        eps: the smallest value used for a weight norm, so that zero-initialised weights can move; above 0.
        exclude: patterns of the names of parameters that are not clipped (``fnmatch``: ``"head.*"``,
            ``"*.bias"``). Each must match a parameter.
        output_axis: the axis of a weight that indexes the outputs: ``"first"`` (PyTorch: out x in, and
            out x in x height x width) or ``"last"`` (JAX: in x out, height x width x in x out). None means
            the framework's own convention, which is ``"last"`` for NumPy too. With None, as in optax, a JAX
            or NumPy weight with three axes is taken as in x heads x features, where all axes but the first
            index outputs; set ``"last"`` for 1-d convolutions.

    Raises:
        ValueError: a field is out of its range; at init, a pattern matches no parameter.

    Example:
        >>> AdaptiveGradClip(exclude="head.*").exclude
        ('head.*',)
    """

    clipping: float = 0.01
    eps: float = 1e-3
    exclude: tuple[str, ...] = ()
    output_axis: OutputAxis | None = None
    per_tensor: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_field(self, "clipping", above=0.0)
        check_field(self, "eps", above=0.0)
        given = self.exclude
        patterns = (given,) if isinstance(given, str) else given
        if not isinstance(patterns, (tuple, list)) or not all(isinstance(p, str) and p for p in patterns):
            raise bad_field("AdaptiveGradClip.exclude", "a pattern or a sequence of patterns", given)
        object.__setattr__(self, "exclude", tuple(patterns))
        if self.output_axis is not None:
            check_choice("AdaptiveGradClip.output_axis", self.output_axis, ("first", "last"))

    def included(self, names: Sequence[str]) -> tuple[bool, ...]:
        """Return, for each parameter name, whether the rule applies to that parameter.

        Raises:
            ValueError: a pattern of ``exclude`` matches no name.
        """
        for pattern in self.exclude:
            if not any(fnmatchcase(name, pattern) for name in names):
                known = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
                raise bad_field(
                    "AdaptiveGradClip.exclude",
                    "patterns that each match a parameter",
                    pattern,
                    hint=f"The parameters are {known or 'none'}. In PyTorch, pass names=model to use "
                    "the model's own names.",
                )
        return tuple(not any(fnmatchcase(name, pattern) for pattern in self.exclude) for name in names)

    def unit_axes(self, shape: Sequence[int], *, default: OutputAxis) -> tuple[int, ...]:
        """Return the axes of a tensor that belong to one unit, over which its norm is taken.

        Args:
            shape: the shape of the tensor.
            default: the framework's output axis, used if ``output_axis`` is None.

        Example:
            >>> rule = AdaptiveGradClip()
            >>> rule.unit_axes((8, 3, 5, 5), default="first"), rule.unit_axes((5, 5, 3, 8), default="last")
            ((1, 2, 3), (0, 1, 2))
        """
        axes = tuple(range(len(shape)))
        if sum(n != 1 for n in shape) <= 1:  # a vector, however many axes of length 1 it has
            return axes
        if (self.output_axis or default) == "first":
            return axes[1:]
        return axes[:1] if self.output_axis is None and len(shape) == 3 else axes[:-1]

    def unit_shape(self, shape: Sequence[int], axes: Sequence[int]) -> list[int]:
        """Return the shape in which one number per unit broadcasts over the tensor.

        Args:
            shape: the shape of the tensor.
            axes: the axes that :meth:`unit_axes` returns for that shape.

        Example:
            >>> rule = AdaptiveGradClip()
            >>> rule.unit_shape((8, 3, 5, 5), (1, 2, 3)), rule.unit_shape((7,), (0,))
            ([8, 1, 1, 1], [1])
        """
        return [1 if axis in axes else n for axis, n in enumerate(shape)]

    def unit_factors(self, norms: Wide, weights: Array, *, xp: Namespace) -> Wide:
        """Return the (u,) factors on the units, from the norms of their gradients and of their
        weights."""
        limit = self.clipping * at_least(weights, self.eps, xp=xp)
        shrink = xp.isfinite(limit) & xp.isfinite(norms.value) & (recorded(norms, xp=xp) >= limit)
        factor = quotient(limit, Wide(at_least(norms.value, _DIV_EPS, xp=xp), norms.power), xp=xp)
        return choose(shrink, factor, no_change(factor, xp=xp), xp=xp)
