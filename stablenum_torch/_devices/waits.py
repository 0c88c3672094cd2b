"""The one module of this adapter that makes the host wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import GuardState
from stablenum.guard.readout import check_halted

__all__ = ["HaltWatch", "LevelWatch", "capturing", "wait_for_bool"]


def capturing() -> bool:
    """Whether a CUDA graph is being captured: then nothing may wait, and what Python does is not replayed."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def wait_for_bool(flag: Tensor) -> bool:
    """The value of a () bool tensor.

    Raises:
        RuntimeError: a CUDA graph is being captured, where there is no value yet.
    """
    if flag.is_cuda and capturing():
        raise RuntimeError(
            "optimizer must be able to skip a step on the device while a CUDA graph is captured; this one "
            "needs the host to decide. Use fused=True (Adam, AdamW, SGD without dampening, Adagrad), and "
            "take some steps before the capture."
        )
    return bool(flag)


class _Letter:
    """A small tensor on its way to the host: copied in the background, read when it has arrived.

    Everything is of the tensor's own device and of the stream that is current there, which wrote it or waits
    for who did.
    """

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def send(self, tensor: Tensor) -> None:
        """Begin to copy, unless something is on its way or a graph is being captured."""
        if self._done is not None or capturing():
            return
        stream = torch.cuda.current_stream(tensor.device)
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        # The guard may drop its tensors (a model that was moved, a parameter that was added) before the copy.
        tensor.record_stream(stream)
        self._done = torch.cuda.Event()
        self._done.record(stream)

    def take(self) -> int | None:
        """What has arrived, once; else None."""
        if self._done is None or self._copy is None or capturing() or not self._done.query():
            return None
        value = int(self._copy)
        self._copy = self._done = None
        return value


class LevelWatch:
    """Tells the host the level that the guard has decided, without a wait on CUDA.

    There the level is copied in the background and read when it has arrived, mostly before the next step
    begins: a host far ahead of its device follows some steps late, and a captured graph keeps its level.
    """

    def __init__(self) -> None:
        self._level = 0
        self._letter = _Letter()

    def read(self, level: Tensor) -> int:
        """The level, or on CUDA the last one that is known here."""
        if level.device.type != "cuda":
            return int(level)
        arrived = self._letter.take()
        if arrived is not None:
            self._level = arrived
        self._letter.send(level)
        return self._level


class HaltWatch:
    """Tells the host that the guard has stopped the training, without a wait in any step.

    On a CPU the flag is read at once. On an accelerator it is copied in the background and looked at
    in the next step, which the device refuses anyway: a halted guard applies nothing. Nobody looks in the
    replays of a captured graph, which are no steps of the host.
    """

    def __init__(self) -> None:
        self._letter = _Letter()

    def after_step(self, state: GuardState, names: Callable[[], Sequence[str]], config: GuardConfig) -> None:
        """Raise if the flag is known to be set, and clear it: to go on after the error is the user's word.

        Raises:
            NonFiniteError: the guard has halted.
        """
        if state.halted.device.type == "cuda":
            arrived = self._letter.take()
            if not arrived:
                self._letter.send(state.halted)
                return
        elif not state.halted.item():
            return
        try:
            check_halted(state, names(), config=config)
        finally:
            state.halted.zero_()
            self._letter = _Letter()
