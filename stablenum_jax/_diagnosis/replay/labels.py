"""Labels and other indices that are out of range."""

from __future__ import annotations

from typing import Any

import numpy as np

from stablenum_jax._diagnosis.replay.interpreter import Kept

__all__ = ["outside_indices"]


def outside_indices(kept: Kept | None) -> str:
    """Describe what is wrong with the indices of a gather that returned NaN; "" if nothing is."""
    if kept is None or kept.eqn.primitive.name != "gather" or "FILL" not in str(kept.eqn.params.get("mode")):
        return ""
    operand, indices = kept.inputs[:2]
    params: dict[str, Any] = kept.eqn.params
    picked = np.asarray(indices)
    for column, axis in enumerate(params["dimension_numbers"].start_index_map):
        last = operand.shape[axis] - params["slice_sizes"][axis]
        values = picked[..., column]
        outside = values[(values < 0) | (values > last)]
        if outside.size:
            return (
                f"{outside.size} of {values.size} indices are outside 0..{last}, "
                f"the first of them is {int(outside.flat[0])}; "
                "JAX fills in NaN for each of them"
            )
    return ""
