"""The processes of a program (``jax.distributed``), and what they tell one another."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import numpy as np

__all__ = ["Processes"]


class Processes:
    """All processes of the program; usually one alone."""

    def __init__(self) -> None:
        self.position, self.size = jax.process_index(), jax.process_count()

    def gathered(self, value: Any) -> list[Any]:
        """Return what each process has, in the order of the processes; all must call at once."""
        if self.size == 1:
            return [value]
        from jax.experimental.multihost_utils import process_allgather

        text = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.asarray(process_allgather(np.asarray([text.size], np.int32))).reshape(-1)
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: text.size] = text
        rows = np.asarray(process_allgather(padded)).reshape(self.size, -1)
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]
