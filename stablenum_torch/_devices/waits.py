"""Where a training step waits for the device. Reading ``loss_scale``, ``last`` or ``history`` waits, too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stablenum.guard.clip_log import ClipLog
from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import GuardState
from stablenum.guard.faults import BadSetting
from stablenum.guard.halting import check_halted
from stablenum.guard.readout import Metrics, Names, metrics
from stablenum.guard.recorder import Recorder
from stablenum.guard.skip_log import SkipLog

__all__ = ["BackgroundRead", "HaltWatch", "LevelWatch", "StepWatch", "capturing", "wait_for_bool"]


def capturing() -> bool:
    """Return whether a CUDA graph is being captured. During a capture nothing may wait, and a replay of the
    graph runs no Python code."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _on_cuda(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


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
    """Reads small tensors of one device without waiting, by copies in the background.

    The copies run on the tensors' own device, on that device's current stream. That stream has written the
    tensors itself, or waits for the stream that has.
    """

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._done: torch.cuda.Event | None = None

    def begin(self, *tensors: Tensor) -> None:
        """Begin to copy, unless a copy is under way or a graph is being captured."""
        if self._done is not None or capturing():
            return
        stream = torch.cuda.current_stream(tensors[0].device)
        self._copies = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
            # The guard may drop the tensor before the copy runs (if the model is moved or a parameter is
            # added).
            tensor.record_stream(stream)
        self._done = torch.cuda.Event()
        self._done.record(stream)

    def result(self, *, wait: bool = False) -> list[Tensor] | None:
        """Return the copies, once, if they are complete; otherwise None, or wait for them."""
        if self._done is None or capturing():
            return None
        if wait:
            self._done.synchronize()
        if not self._done.query():
            return None
        copies, self._copies, self._done = self._copies, [], None
        return copies


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
        if not _on_cuda(level):
            return int(level)
        arrived = self._read.result()
        if arrived is not None:
            self._level = int(arrived[0])
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

    def after_step(
        self,
        state: GuardState,
        names: Callable[[], Names],
        config: GuardConfig,
        setting: BadSetting | None,
    ) -> None:
        """Raise if the flag is known to be set. The flag is cleared, so that a caller who catches the error
        can continue.

        Raises:
            NonFiniteError: the guard has halted.
        """
        if _on_cuda(state.halted):
            arrived = self._read.result()
            if arrived is None or not arrived[0]:
                self._read.begin(state.halted)
                return
        elif not state.halted.item():
            return
        try:
            check_halted(state, names(), config=config, setting=setting)
        finally:
            state.halted.zero_()
            self._read = BackgroundRead()


class StepWatch:
    """Logs that steps are skipped in a row, or clipped by other code, without waiting in any step.

    On CUDA the state is copied in the background every 16 steps, so the message comes some steps late. For
    steps on other accelerators, without a copy in the background, and for compiled steps, whose graph it
    would break, the message comes when the user reads the state.

    Attributes:
        by_hand: whether gradients were unscaled for the user, who then clips them where that is sound.
    """

    def __init__(self) -> None:
        self.by_hand = False
        self._skips, self._clips = SkipLog(), ClipLog()
        self._read, self._read_elements = BackgroundRead(), BackgroundRead()
        self._steps = self._seen = 0
        self._look_closer = _FIRST_LOOK

    def looks_closer(self) -> bool:
        """Return whether the step in progress is one of the few whose gradients are looked at if other code
        has changed them."""
        return not self.by_hand and self._steps + 1 >= self._look_closer and not capturing()

    def looked_closer(self, elements: Tensor | None) -> None:
        """Log a warning if other code clipped elements.

        Args:
            elements: (3,) float64: the largest size of an element, how many have it, and the loss scale; None
                if no other code has changed the gradients.
        """
        self._look_closer = 10 * (self._steps + 1)
        if elements is not None and _on_cuda(elements):
            self._read_elements.begin(elements)
        elif elements is not None and elements.is_cpu:
            self._log_elements(elements)

    def _log_elements(self, elements: Tensor) -> None:
        largest, reached, scale = elements.tolist()
        self._clips.after_change(largest, int(reached), scale)

    def after_step(self, state: GuardState, names: Callable[[], Names], *, decided_on_host: bool) -> None:
        """Log a warning if one is due, after a step that is not compiled."""
        if not (decided_on_host or _on_cuda(state.step)):
            return
        self._steps += 1
        seen = state if decided_on_host else self._arrived(state)
        if seen is not None:
            # NumPy reads a number without an operation of torch.
            counts = int(seen.skipped_in_a_row.numpy()), int(seen.step.numpy())
            self._log(seen, *counts, lambda: metrics(seen, names()))

    def after_read(self, state: GuardState, last: Metrics) -> None:
        """Log a warning if one is due, now that the user has waited for ``state``."""
        step = last["step"] + 1
        # A copy that is under way to the host would look like another run if it came after this state.
        seen = self._steps > 0 if _on_cuda(state.step) else step == self._seen
        if not seen and not torch.compiler.is_compiling():
            self._log(state, last["skipped_in_a_row"], step, lambda: last)

    def _log(self, state: GuardState, in_a_row: int, step: int, last: Callable[[], Metrics]) -> None:
        self._seen = step
        self._skips.after_step(in_a_row, step, last)
        if not self.by_hand:
            self._clips.after_step(step, state)

    def _arrived(self, state: GuardState) -> GuardState | None:
        for elements in self._read_elements.result() or ():
            self._log_elements(elements)
        copies = self._read.result()
        if self._steps % _WATCHED == 0:
            self._read.begin(*(getattr(state, name) for name in _COUNTERS), *state.recorder)
        if copies is None:
            return None
        counters = dict(zip(_COUNTERS, copies, strict=False))
        return state._replace(**counters, recorder=Recorder(*copies[len(_COUNTERS) :]))


_WATCHED = 16  # every so many steps
_FIRST_LOOK = 3  # then at ten times as many steps, and so on
_COUNTERS = ("step", "skipped_total", "skipped_in_a_row")
