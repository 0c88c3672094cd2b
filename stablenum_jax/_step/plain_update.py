"""What can go wrong around a guard whose caller uses plain ``tx.update`` and not ``step``."""

from __future__ import annotations

import sys
from types import FrameType

import jax
import optax

from stablenum._support.user_warnings import warn
from stablenum_jax._step.warnings import NotATrueSkipWarning

__all__ = ["PlainUpdate"]

_INSIDE_MULTISTEPS = (
    "The guard is inside optax.MultiSteps, which is called through plain tx.update. MultiSteps adds up the "
    "gradients before the guard sees them, and keeps a NaN in its accumulator: after one bad micro-batch, "
    "every later update is skipped. Put the guard around it, guard(optax.MultiSteps(optimizer, k)), or call "
    "stablenum_jax.step(tx, params, opt_state, grads, value=loss)."
)
_ZEROS_ONLY = (
    "A guard called through plain tx.update can only zero the gradients of a bad step: momentum "
    "and weight decay still change the parameters. For a true skip, call "
    "stablenum_jax.step(tx, params, opt_state, grads, value=loss), or build the optimizer with "
    "stablenum_jax.chain(...) or stablenum_jax.guard(inner)."
)


class PlainUpdate:
    """Warns, at the first plain update of one transformation, of what the guard cannot do there.

    Args:
        skips: whether the transformation skips a bad step truly, as ``stablenum_jax.chain`` does.
    """

    def __init__(self, *, skips: bool) -> None:
        self.skips, self.checked = skips, False

    def check(self) -> None:
        """Warn if there is something to warn of, once."""
        if self.checked:
            return
        self.checked = True
        if _accumulates_anything():
            warn(_INSIDE_MULTISTEPS, NotATrueSkipWarning)
        elif not self.skips:
            warn(_ZEROS_ONLY, NotATrueSkipWarning)


def _accumulates_anything() -> bool:
    """Return whether a ``MultiSteps`` is calling that leaves no micro-batch out.

    An optax transformation does not learn what is around it, and its state does not show it, so the frames
    of the callers are looked through. A ``MultiSteps`` with ``should_skip_update_fn`` keeps bad gradients out
    by itself; what that function reports is in its state, which is empty without one.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is optax.MultiSteps.update.__code__:
            state = frame.f_locals.get("state")
            return not jax.tree.leaves(getattr(state, "skip_state", ()))
        frame = frame.f_back
    return False
