"""The states of random generators as plain values and tensors, which can be saved and loaded safely."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stablenum_torch._devices.generators import RngState, rng_state, set_rng_state

__all__ = ["ProcessGenerators", "from_plain", "to_plain"]


class ProcessGenerators:
    """The random generators of this process: those of torch, NumPy and Python."""

    def read(self) -> dict[str, Any]:
        """Return their states."""
        return to_plain(rng_state())

    def write(self, states: Any) -> None:
        """Put states back."""
        set_rng_state(from_plain(states))


def to_plain(state: RngState) -> dict[str, Any]:
    """Return a state as plain values and tensors."""
    numpy = state.numpy
    version, internal, spare = state.python
    return {
        "cpu": state.cpu,
        "cuda": None if state.cuda is None else dict(state.cuda),
        "numpy": None if numpy is None else [numpy[0], torch.from_numpy(numpy[1]), *numpy[2:]],
        # 625 numbers of 32 bits
        "python": [version, torch.tensor(internal), spare],
    }


def from_plain(plain: Mapping[str, Any]) -> RngState:
    """Return the state that :func:`to_plain` described."""
    numpy = plain["numpy"]
    version, internal, spare = plain["python"]
    return RngState(
        plain["cpu"],
        plain["cuda"],
        None if numpy is None else (numpy[0], numpy[1].numpy(), *numpy[2:]),
        (version, tuple(internal.tolist()), spare),
    )
