"""The one module of this adapter that makes the host wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stablenum.config import GuardConfig
from stablenum.guard import GuardState
from stablenum.readout import check_halted

__all__ = ["HaltWatch", "LevelWatch", "wait_for_bool"]


def wait_for_bool(flag: Tensor) -> bool:
    """The value of a () bool tensor."""
    return bool(flag)


class LevelWatch:
    """Tells the host the level that the guard has decided, without a wait on CUDA.

    There the level is copied in the background and read when it has arrived, mostly before the next step
    begins: a host far ahead of its device follows some steps late.
    """

    def __init__(self) -> None:
        self._level = 0
        self._copy: Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def read(self, level: Tensor) -> int:
        """The level, or on CUDA the last one that is known here."""
        if level.device.type != "cuda":
            return int(level)
        if self._done is not None and self._copy is not None and self._done.query():
            self._level, self._done = int(self._copy), None
        if self._done is None:
            self._copy = torch.empty_like(level, device="cpu", pin_memory=True)
            self._copy.copy_(level, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        return self._level


class HaltWatch:
    """Tells the host that the guard has stopped the training, without a wait in any step.

    On a CPU the flag is read at once. On an accelerator it is copied in the background and looked at
    in the next step, which the device refuses anyway: a halted guard applies nothing.
    """

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def after_step(self, state: GuardState, names: Callable[[], Sequence[str]], config: GuardConfig) -> None:
        """Raise if the flag is known to be set, and clear it: to go on after the error is the user's word.

        Raises:
            NonFiniteError: the guard has halted.
        """
        if state.halted.device.type == "cuda":
            if not self._seen(state.halted):
                return
        elif not state.halted.item():
            return
        try:
            check_halted(state, names(), config=config)
        finally:
            state.halted.zero_()
            self._copy = self._done = None

    def _seen(self, flag: Tensor) -> bool:
        """Whether the copy begun in an earlier step has arrived and is set; begins the next one."""
        arrived = self._done is not None and self._done.query()
        if arrived and self._copy is not None and bool(self._copy):
            return True
        if arrived or self._done is None:
            self._copy = torch.empty_like(flag, device="cpu", pin_memory=True)
            self._copy.copy_(flag, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        return False
