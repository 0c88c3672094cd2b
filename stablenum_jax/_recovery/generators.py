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
        """Return their states."""
        states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
        torch = sys.modules.get("torch")
        return states if torch is None else states | {"torch": torch.get_rng_state()}

    def write(self, states: Any) -> None:
        """Put states back."""
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch = sys.modules.get("torch")
        if torch is not None and "torch" in states:
            torch.set_rng_state(states["torch"])
