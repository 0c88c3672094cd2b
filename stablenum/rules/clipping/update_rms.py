"""Clipping the optimizer's update instead of the gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from stablenum._support.settings_checks import check_field
from stablenum.arrays import at_most
from stablenum.errors import bad_field
from stablenum.formats import FLOAT32_MAX
from stablenum.rules.clipping.common import Stateless

__all__ = ["ClipUpdateRMS"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

_FAR = 2.0**64  # an RMS so many times the limit has a factor in two parts


@dataclass(frozen=True, slots=True)
class ClipUpdateRMS(Stateless):
    """Shrink each tensor's update so that its root mean square is at most ``max_rms`` learning rates.

    ``u <- u / max(1, RMS(u) / (max_rms * lr))`` is Adafactor's update clipping (Shazeer & Stern 2018, arXiv
    1804.04235, d = 1), relative to the learning rate. For Adam, the rule bounds updates far above the
    learning rate, which occur when v lags behind a sudden increase of the gradients; StableAdamW (Wortsman et
    al. 2023, arXiv 2304.13013) bounds these by a mean over g^2/v. Weight decay added by the optimizer is part
    of the update.

    The rule acts after the optimizer, on applied steps, and is not included in ``clip_coefficient``. It needs
    a form of the guard with access to the inner optimizer's update: in JAX ``step``, ``chain`` or
    ``guard(inner)``, but not the chain form driven by plain ``tx.update``; in PyTorch any form, at the cost
    of a copy of the parameters. A zero update stays zero; a non-finite update is left unchanged. The rule
    must be the last one in ``clip``.

    Args:
        max_rms: the largest RMS, in learning rates if ``per_lr``, above 0.
        per_lr: whether the update contains the learning rate. In PyTorch it always does; the rate is read
            from the parameter groups. In JAX the rate is that of
            ``optax.inject_hyperparams(...)(learning_rate=...)``; use ``per_lr=False`` for an inner
            transformation without a learning rate (``optax.scale_by_adam()``).

    Raises:
        ValueError: a field is out of its range.

    Example:
        >>> ClipUpdateRMS(1.0)
        ClipUpdateRMS(max_rms=1.0, per_lr=True)
    """

    max_rms: float
    per_lr: bool = True
    per_tensor: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_field(self, "max_rms", above=0.0)
        if not isinstance(self.per_lr, bool):
            raise bad_field("ClipUpdateRMS.per_lr", "True or False", self.per_lr)

    def update_factors(self, rms: Array, lr: Array | float, *, xp: Namespace) -> tuple[Array, Array]:
        """Return two (n,) factors on the updates, to be applied one after the other.

        Their product may be smaller than any normal float32; the second one is 1 or 2**-64.

        Args:
            rms: (n,) float32, the root mean square of each tensor's update; float64 if some are float64
                updates, whose RMS may lie outside float32's range. Factors have the dtype of ``rms``.
            lr: the learning rate, as a number or as () or (n,) float32; 1 if ``per_lr`` is False.
            xp: the array namespace.
        """
        if rms.dtype == xp.float32:
            return self._factors(rms, lr, xp=xp)
        # Within float32's range, all backends decide in float32.
        finite = xp.isfinite(rms)
        narrow = xp.astype(xp.where(finite, at_most(rms, FLOAT32_MAX, xp=xp), rms), xp.float32)
        beyond = finite & (rms > FLOAT32_MAX)
        wide, ordinary = self._factors(rms, lr, xp=xp), self._factors(narrow, lr, xp=xp)
        first, second = (
            xp.where(beyond, w, xp.astype(o, rms.dtype)) for w, o in zip(wide, ordinary, strict=True)
        )
        return first, second

    def _factors(self, rms: Array, lr: Array | float, *, xp: Namespace) -> tuple[Array, Array]:
        one = xp.ones_like(rms)
        limit = self.max_rms * lr * one
        clipped = xp.isfinite(rms) & (rms > limit)
        far = clipped & (rms > limit * _FAR)
        first = xp.where(clipped, xp.where(far, limit * _FAR, limit) / rms, one)
        return first, xp.where(far, one / _FAR, one)
