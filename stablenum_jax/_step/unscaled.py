"""A warning about gradients that cannot have been multiplied by a dynamic loss scale."""

from __future__ import annotations

import stablenum
from stablenum._support.user_warnings import warn
from stablenum_jax._trees.scale_reads import note_scale_read, scale_was_read

__all__ = ["warn_if_unscaled"]


def warn_if_unscaled(config: stablenum.GuardConfig) -> None:
    """Warn, once in a process, if gradients reach a guard with a dynamic scale that nobody has read.

    A fixed scale is known without reading it, so there nothing can be said.
    """
    rule = config.loss_scale
    if isinstance(rule, stablenum.DynamicLossScale) and not scale_was_read():
        note_scale_read()  # once is enough
        warn(
            "The guard divides the gradients by its dynamic loss scale, but they seem not to have been "
            "multiplied by it: this program has not read any loss scale yet. Plain jax.value_and_grad does "
            f"not scale, so its gradients become too small by the factor {rule.init_scale:g} (at first). "
            "Compute them with stablenum_jax.value_and_grad(loss_fn, opt_state), or multiply the loss or the "
            "gradients by stablenum_jax.loss_scale(opt_state)."
        )
