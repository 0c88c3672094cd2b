"""Clip rules: how far to shrink the gradients of one step.

A rule sees the per-tensor norms of the *unscaled* gradients, never the gradients, so clipping
costs no pass of its own. ``ClipByValue`` alone works on elements; it carries a bound that the
adapter applies, and therefore comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from stablenum.bounds import at_most
from stablenum.errors import bad_field, check_number

__all__ = ["ClipByGlobalNorm", "ClipByNorm", "ClipByValue", "ClipRule", "as_clip_rules"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

# torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6; we keep its constant.
_EPS = 1e-6


def _coefficient(norm: Array, max_norm: float, *, xp: Namespace) -> Array:
    """``min(1, max_norm / (norm + 1e-6))``; 1 where the norm is not finite (such a step is skipped)."""
    norm = xp.where(xp.isfinite(norm), norm, xp.zeros_like(norm))
    return at_most(max_norm / (norm + _EPS), 1.0, xp=xp)


@dataclass(frozen=True, slots=True)
class ClipByGlobalNorm:
    """Shrink all gradients by one factor so that their joint L2 norm is at most ``max_norm``.

    ``c = min(1, max_norm / (norm + 1e-6))``, as ``torch.nn.utils.clip_grad_norm_`` does;
    Pascanu et al. 2013 (arXiv 1211.5063). The norm is computed so that finite gradients of any
    size have a finite norm: they are clipped, never zeroed. A zero gradient stays zero. The factor
    stops at float32's smallest normal number, 1.2e-38: only beyond that is the result longer than
    ``max_norm``.

    Args:
        max_norm: above 0, in the units of the unscaled gradients.

    Raises:
        ValueError: ``max_norm`` is not a positive finite number.

    Example:
        >>> ClipByGlobalNorm(1.0)
        ClipByGlobalNorm(max_norm=1.0)
    """

    max_norm: float
    per_tensor: ClassVar[bool] = False

    def __post_init__(self) -> None:
        number = check_number("ClipByGlobalNorm.max_norm", self.max_norm, above=0.0)
        object.__setattr__(self, "max_norm", number)

    def init(self, n_tensors: int, *, xp: Namespace, device: Any = None) -> tuple[Array, ...]:
        """No state."""
        return ()

    def multiplier(
        self, state: tuple[Array, ...], norms: Array, total: Array, *, applied: Array, xp: Namespace
    ) -> tuple[Array, tuple[Array, ...]]:
        """The () float32 factor for all tensors, and the next state."""
        return _coefficient(total, self.max_norm, xp=xp), state


@dataclass(frozen=True, slots=True)
class ClipByNorm:
    """Shrink each tensor's gradient on its own so that its L2 norm is at most ``max_norm``.

    The law of :class:`ClipByGlobalNorm`, tensor by tensor; changes the gradient's direction.

    Args:
        max_norm: above 0, in the units of the unscaled gradients.

    Raises:
        ValueError: ``max_norm`` is not a positive finite number.

    Example:
        >>> ClipByNorm(0.5).max_norm
        0.5
    """

    max_norm: float
    per_tensor: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number = check_number("ClipByNorm.max_norm", self.max_norm, above=0.0)
        object.__setattr__(self, "max_norm", number)

    def init(self, n_tensors: int, *, xp: Namespace, device: Any = None) -> tuple[Array, ...]:
        """No state."""
        return ()

    def multiplier(
        self, state: tuple[Array, ...], norms: Array, total: Array, *, applied: Array, xp: Namespace
    ) -> tuple[Array, tuple[Array, ...]]:
        """The (n,) float32 factors, one a tensor, and the next state."""
        return _coefficient(norms, self.max_norm, xp=xp), state


@dataclass(frozen=True, slots=True)
class ClipByValue:
    """Clamp each element of the unscaled gradients to [-max_value, max_value].

    As ``torch.nn.utils.clip_grad_value_`` and ``optax.clip``. It costs a pass over the
    gradients. It does not cure NaN, and it would hide an overflow if it ran first: here the
    finiteness check comes before it, and a non-finite step is skipped.

    Args:
        max_value: above 0, in the units of the unscaled gradients.

    Raises:
        ValueError: ``max_value`` is not a positive finite number.

    Example:
        >>> ClipByValue(0.1)
        ClipByValue(max_value=0.1)
    """

    max_value: float
    per_tensor: ClassVar[bool] = False

    def __post_init__(self) -> None:
        number = check_number("ClipByValue.max_value", self.max_value, above=0.0)
        object.__setattr__(self, "max_value", number)

    def init(self, n_tensors: int, *, xp: Namespace, device: Any = None) -> tuple[Array, ...]:
        """No state."""
        return ()

    def multiplier(
        self, state: tuple[Array, ...], norms: Array, total: Array, *, applied: Array, xp: Namespace
    ) -> tuple[Array, tuple[Array, ...]]:
        """1: the clamp itself is the adapter's, see ``GuardConfig.max_value``."""
        return xp.ones_like(total), state


ClipRule: TypeAlias = ClipByValue | ClipByNorm | ClipByGlobalNorm


def as_clip_rules(value: object) -> tuple[ClipRule, ...]:
    """``GuardConfig.clip`` in its one stored form: a tuple of rules.

    Args:
        value: None, a number (the ``max_norm`` of a :class:`ClipByGlobalNorm`), a rule, or a
            sequence of rules, applied in order.

    Raises:
        ValueError: anything else, or a ``ClipByValue`` that is not the last rule.
    """
    allowed = "None, a positive number (a global norm), a clip rule or a sequence of clip rules"
    if value is None:
        return ()
    rules = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    made = tuple(_as_rule(rule, lambda r: bad_field("clip", allowed, r)) for rule in rules)
    if any(isinstance(rule, ClipByValue) for rule in made[:-1]):
        raise bad_field(
            "clip",
            "a sequence whose only ClipByValue, if any, stands last",
            value,
            hint="The norm after an element-wise clamp is not known without another pass over the gradients.",
        )
    return made


def _as_rule(value: object, error: Callable[[object], ValueError]) -> ClipRule:
    if isinstance(value, (ClipByValue, ClipByNorm, ClipByGlobalNorm)):
        return value
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise error(value)
    return ClipByGlobalNorm(check_number("clip", value, above=0.0))
