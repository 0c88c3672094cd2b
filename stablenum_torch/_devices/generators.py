"""Read, restore and remember the states of random number generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stablenum.errors import bad_type

__all__ = ["Beginnings", "RngState", "check_rng_state", "rng_state", "set_rng_state"]


class RngState(NamedTuple):
    """The generators' states; None for a generator that was not read."""

    cpu: Tensor
    cuda: Mapping[int, Tensor] | None = None
    numpy: Any = None
    python: Any = None


def rng_state(*, torch_only: bool = False) -> RngState:
    """Read the default generators of torch on the CPU and all GPUs, of NumPy and of Python.

    This never waits for a device, because a CUDA generator's seed and offset are kept on the host.

    Args:
        torch_only: read only torch's generators for the CPU and the current GPU, which is cheap.
    """
    cuda = None
    if torch.cuda.is_initialized():
        # The generator of a stream that is being captured cannot be read.
        current = [torch.cuda.current_device()]
        devices = current if torch_only else range(torch.cuda.device_count())
        capturing = torch.cuda.is_current_stream_capturing()
        cuda = None if capturing else {i: torch.cuda.get_rng_state(i) for i in devices}
    cpu = torch.get_rng_state()
    if torch_only:
        return RngState(cpu, cuda)
    numpy = sys.modules.get("numpy")
    return RngState(cpu, cuda, numpy.random.get_state() if numpy else None, random.getstate())


def check_rng_state(state: object) -> None:
    """Check the argument ``rng_state`` of a replay.

    Raises:
        TypeError: it is neither an :class:`RngState` nor a tensor of bytes.
    """
    if isinstance(state, Tensor) and state.dtype != torch.uint8:
        raise TypeError(
            f"rng_state must be a tensor of uint8, as torch.get_rng_state() returns; got {state.dtype}."
        )
    if not isinstance(state, (RngState, Tensor)):
        raise bad_type("rng_state", "the tensor that torch.get_rng_state() returns, or None", state)


def set_rng_state(state: RngState | Tensor) -> None:
    """Restore generators; those without a saved state stay as they are."""
    if isinstance(state, Tensor):
        state = RngState(state)
    torch.set_rng_state(state.cpu)
    if state.cuda is not None:
        for device, kept in state.cuda.items():
            torch.cuda.set_rng_state(kept, device)
    if state.numpy is not None:
        sys.modules["numpy"].random.set_state(state.numpy)
    if state.python is not None:
        random.setstate(state.python)


class Beginnings:
    """The generators' states at the moments at which a step may have begun, for ``explain``.

    A step begins when the gradients are cleared or when the step before ends; which of the two comes last
    depends on the training loop. In compiled code no states are read, because that would break the graph.

    Attributes:
        of_last_step: the states at the beginning of the last step.
    """

    def __init__(self) -> None:
        self._cleared: RngState | None = None
        self._ended = _states_now()
        self.of_last_step: tuple[RngState, ...] = ()

    def gradients_cleared(self) -> None:
        """Remember the states of this moment for the step that follows."""
        self._cleared = _states_now()

    def step_ended(self) -> None:
        """Give the step that ends what was remembered, and remember this moment for the next."""
        now = _states_now()
        if now is not None:
            self.of_last_step = tuple(s for s in (self._cleared, self._ended) if s is not None)
            self._cleared, self._ended = None, now


def _states_now() -> RngState | None:
    return None if torch.compiler.is_compiling() else rng_state(torch_only=True)
