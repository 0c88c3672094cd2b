"""jmp's names: after ``import stablenum_jax.policy as jmp``, code that was written for jmp runs.

Differences from jmp: a policy may have rules for modules by path, losses and gradients are scaled in float32,
and the floor of a dynamic loss scale is kept under ``jax.jit``.
"""

from stablenum._support.public_names import present
from stablenum_jax._precision.jmp_loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    all_finite,
    select_tree,
)
from stablenum_jax._precision.policy import (
    Policy,
    as_policy,
    cast_to_full,
    cast_to_half,
    dtype_to_names,
    get_policy,
    half_dtype,
)

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "all_finite",
    "as_policy",
    "cast_to_full",
    "cast_to_half",
    "dtype_to_names",
    "get_policy",
    "half_dtype",
    "select_tree",
]

__dir__ = present(globals())
