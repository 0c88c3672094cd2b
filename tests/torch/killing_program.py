"""Kills processes that save tensors in a loop, and looks at what they leave: ``FOLDER FORMAT TIMES``."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import stablenum_torch as st
from tests.core.killing_program import killed_while_saving
from tests.torch.training_states import same_state


def state_of(step: int) -> dict[str, Any]:
    """A state that follows from its step."""
    draw = torch.Generator().manual_seed(step)
    weights = {f"w{i}": torch.randn(20, 50, generator=draw) for i in range(10)}
    return {"model": weights, "extra": {"step": step, "moments": torch.full((1000,), float(step))}}


def main(folder: str, format_name: Any, times: str) -> None:
    torch.set_num_threads(1)  # no threads, which would not be there after a fork
    checkpoints = st.Checkpoints(folder, format=format_name, keep=2)

    def good(step: int) -> None:
        state: dict[str, Any] = {"model": None, "extra": None}
        assert checkpoints.load(state) == step
        assert same_state(state, state_of(step))

    where = killed_while_saving(checkpoints, state_of, good, int(times), seed=0)
    sys.stdout.write(json.dumps(where))


if __name__ == "__main__":
    main(*sys.argv[1:])
