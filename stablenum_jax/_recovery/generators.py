"""The random generators of the process, which the order of data may depend on."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np

__all__ = ["ProcessGenerators"]


class ProcessGenerators:
    """Python's and NumPy's global generators, and PyTorch's if the process has it: its ``DataLoader`` is
    used with JAX too, and shuffles with it."""

    def read(self) -> dict[str, Any]:
        """Return their states, as plain values and arrays."""
        version, internal, spare = random.getstate()
        name, keys, *rest = np.random.get_state()
        states: dict[str, Any] = {
            "python": [version, np.asarray(internal, np.uint32), spare],
            "numpy": [name, keys, *rest],
        }
        torch = sys.modules.get("torch")
        return states if torch is None else states | {"torch": torch.get_rng_state().numpy()}

    def write(self, states: Any) -> None:
        """Put states back."""
        version, internal, spare = states["python"]
        random.setstate((version, tuple(internal.tolist()), spare))
        np.random.set_state(tuple(states["numpy"]))
        torch = sys.modules.get("torch")
        if torch is not None and "torch" in states:
            torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
