"""Training loops of JAX partners, as their documentation writes them, alone and with a guard.

Each function of :data:`LOOPS` trains the model of :mod:`benchmarks.partners.batches` and returns an
:class:`~benchmarks.partners.outcome.Outcome`. The guarded variant differs by about two lines, which the
functions show side by side.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.partners.jax_equinox import equinox_filter_jit
from benchmarks.partners.jax_flax import flax_dynamic_scale, flax_train_state, nnx_optimizer
from benchmarks.partners.jax_optax import (
    apply_if_finite,
    jmp_loss_scale,
    multisteps,
    orbax_manager,
    plain_optax,
)
from benchmarks.partners.outcome import Fault, Outcome

__all__ = ["LOOPS"]


def keras_jax(fault: Fault | None, guarded: bool) -> Outcome:
    """See :func:`benchmarks.partners.keras_jax.keras_jax`; Keras is imported when the loop first runs."""
    from benchmarks.partners import keras_jax as found

    return found.keras_jax(fault, guarded)


LOOPS: dict[str, Callable[[Fault | None, bool], Outcome]] = {
    "optax": plain_optax,
    "flax TrainState": flax_train_state,
    "flax nnx.Optimizer": nnx_optimizer,
    "equinox": equinox_filter_jit,
    "optax.MultiSteps": multisteps,
    "Orbax": orbax_manager,
    "optax.apply_if_finite": apply_if_finite,
    "flax DynamicScale": flax_dynamic_scale,
    "jmp": jmp_loss_scale,
    "Keras on JAX": keras_jax,
}
