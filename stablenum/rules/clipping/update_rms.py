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

    def update_factors(self, rms: Array, lr: Array | float, *, xp: Namespace) -> Array:
        """Return the (n,) float32 factors on the updates.

        Args:
            rms: (n,) float32, the root mean square of each tensor's update.
            lr: the learning rate, as a number or as () or (n,) float32; 1 if ``per_lr`` is False.
            xp: the array namespace.
        """
        limit = self.max_rms * lr * xp.ones_like(rms)
        return xp.where(xp.isfinite(rms) & (rms > limit), limit / rms, xp.ones_like(rms))
