"""Where a training step waits for the device. Reading ``loss_scale``, ``last`` or ``history`` waits, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import GuardState
from stablenum.guard.halting import check_halted

__all__ = ["BackgroundRead", "HaltWatch", "LevelWatch", "capturing", "wait_for_bool"]


def capturing() -> bool:
    """Return whether a CUDA graph is being captured. During a capture nothing may wait, and a replay of the
    graph runs no Python code."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def wait_for_bool(flag: Tensor) -> bool:
    """Return the value of a () bool tensor.

    Raises:
        RuntimeError: a CUDA graph is being captured, so there is no value yet.
    """
    if flag.is_cuda and capturing():
        raise RuntimeError(
            "optimizer must be able to skip a step on the device while a CUDA graph is captured; this one "
            "needs the host to decide. Use fused=True (Adam, AdamW, SGD without dampening, Adagrad), and "
            "take some steps before the capture."
        )
    return bool(flag)


class BackgroundRead:
    """Reads a small tensor without waiting, by a copy in the background.

    The copy runs on the tensor's own device, on that device's current stream. That stream has written the
    tensor itself, or waits for the stream that has.
    """

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def begin(self, tensor: Tensor) -> None:
        """Begin to copy, unless a copy is under way or a graph is being captured."""
        if self._done is not None or capturing():
            return
        stream = torch.cuda.current_stream(tensor.device)
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        # The guard may drop the tensor before the copy runs (if the model is moved or a parameter is added).
        tensor.record_stream(stream)
        self._done = torch.cuda.Event()
        self._done.record(stream)

    def result(self) -> int | None:
        """Return the value, once, if the copy is complete; otherwise None."""
        if self._done is None or self._copy is None or capturing() or not self._done.query():
            return None
        value = int(self._copy)
        self._copy = self._done = None
        return value


class LevelWatch:
    """Reads the escalation level that the guard has decided on, without waiting for CUDA.

    On CUDA the level is copied in the background, and is usually known before the next step begins. A host
    that is far ahead of its device sees a new level some steps late, and a captured graph keeps its level.
    """

    def __init__(self) -> None:
        self._level = 0
        self._read = BackgroundRead()

    def read(self, level: Tensor) -> int:
        """Return the level; on CUDA the last one that has reached the host."""
        if level.device.type != "cuda":
            return int(level)
        arrived = self._read.result()
        if arrived is not None:
            self._level = arrived
        self._read.begin(level)
        return self._level


class HaltWatch:
    """Notices that the guard has halted the training, without waiting in any step.

    On a CPU the flag is read at once. On an accelerator it is copied in the background and read in the next
    step, which the device skips anyway, because a halted guard applies nothing. Replays of a captured graph
    do not read the flag, because they run no Python code.
    """

    def __init__(self) -> None:
        self._read = BackgroundRead()

    def after_step(self, state: GuardState, names: Callable[[], Sequence[str]], config: GuardConfig) -> None:
        """Raise if the flag is known to be set. The flag is cleared, so that a caller who catches the error
        can continue.

        Raises:
            NonFiniteError: the guard has halted.
        """
        if state.halted.device.type == "cuda":
            arrived = self._read.result()
            if not arrived:
                self._read.begin(state.halted)
                return
        elif not state.halted.item():
            return
        try:
            check_halted(state, names(), config=config)
        finally:
            state.halted.zero_()
            self._read = BackgroundRead()
