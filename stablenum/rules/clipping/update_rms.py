"""Clipping the optimizer's update instead of the gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from stablenum.errors import bad_field
from stablenum.rules.clipping.common import Stateless
from stablenum.settings_checks import check_field

__all__ = ["ClipUpdateRMS"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class ClipUpdateRMS(Stateless):
    """Shrink each tensor's update so that its root mean square is at most ``max_rms`` learning rates.

    ``u <- u / max(1, RMS(u) / (max_rms * lr))``: Adafactor's update clipping (Shazeer & Stern 2018, arXiv
    1804.04235, d = 1), relative to the learning rate. For Adam it bounds what StableAdamW (Wortsman et
    al. 2023, arXiv 2304.13013) bounds by a mean over g^2/v: an update far above the learning rate, which
    occurs when v lags behind a sudden increase of the gradients. Weight decay added by the optimizer
    is part of the update.

    It acts after the optimizer, on applied steps, and is not included in ``clip_coefficient``. It needs a
    form of the guard with access to the inner optimizer's update: in JAX ``step``, ``chain`` or
    ``guard(inner)``, not the chain form driven by plain ``tx.update``; in PyTorch any form, at the cost of a
    copy of the parameters. A zero update stays zero; a non-finite one is left as it is. It must be the last
    rule in ``clip``.

    Args:
        max_rms: the largest RMS, in learning rates if ``per_lr``, above 0.
        per_lr: whether the update contains the learning rate. In PyTorch it always does; the rate is read
            from the parameter groups. In JAX the rate is that of
            ``optax.inject_hyperparams(...)(learning_rate=...)``; use ``per_lr=False`` for an inner
            transformation without learning rate (``optax.scale_by_adam()``).

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

    def update_factors(self, rms: Array, lr: Array | float, *, xp: Namespace) -> Array:
        """Return the (n,) float32 factors on the updates.

        Args:
            rms: (n,) float32, the root mean square of each tensor's update.
            lr: the learning rate, () or (n,), or a number; 1 if not ``per_lr``.
            xp: the array namespace.
        """
        limit = self.max_rms * lr * xp.ones_like(rms)
        return xp.where(xp.isfinite(rms) & (rms > limit), limit / rms, xp.ones_like(rms))
