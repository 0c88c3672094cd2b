"""A warning about gradients that cannot have been multiplied by a dynamic loss scale."""

from __future__ import annotations

import stablenum
from stablenum.user_warnings import warn
from stablenum_jax._trees.scale_reads import note_scale_read, scale_was_read

__all__ = ["warn_if_unscaled"]


def warn_if_unscaled(config: stablenum.GuardConfig) -> None:
    """Warn, once in a process, if gradients reach a guard with a dynamic scale that nobody has read.

    A fixed scale is known without reading it, so there nothing can be said.
    """
    if isinstance(config.loss_scale, stablenum.DynamicLossScale) and not scale_was_read():
        note_scale_read()  # once is enough
        warn(
            "The guard divides the gradients by its dynamic loss scale, but they have not been multiplied by "
            "it: no loss scale has been read so far. Plain jax.value_and_grad does not scale, and the "
            "updates are then about 65536 times too small. Compute the gradients with "
            "stablenum_jax.value_and_grad(loss_fn, opt_state), or multiply the loss or the gradients by "
            "stablenum_jax.loss_scale(opt_state)."
        )
