"""The batch and the weights of the small programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["WEIGHTS", "X", "Y"]

_DRAWS = np.random.default_rng(5)
X = _DRAWS.normal(size=(12, 8)).astype(np.float32)
Y = _DRAWS.integers(0, 5, 12)
WEIGHTS: Mapping[str, Any] = {
    name: (_DRAWS.normal(size=shape) / 3).astype(np.float32)
    for name, shape in {"up": (16, 8), "up_bias": (16,), "gain": (16,), "head": (5, 16)}.items()
}
