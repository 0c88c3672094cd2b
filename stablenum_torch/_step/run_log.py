"""The log of a run: the guard's record and a sample of the parameters, read every 64 steps for a file.

On CUDA the reads are copies in the background, so that no step waits. A copy contains the rows of the steps
up to the one after which it began, however far the host is ahead of the device, so none is lost.
"""

from __future__ import annotations

import logging
import math
import platform
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

import stablenum
from stablenum.guard.decide import GuardState
from stablenum.guard.readout import Names, StepRecord, history
from stablenum.guard.recorder import Recorder
from stablenum.runlog.lines import Rewind
from stablenum.runlog.writing import EVERY, LogFile
from stablenum_torch._devices.ranks import is_first_rank
from stablenum_torch._devices.waits import BackgroundRead, capturing
from stablenum_torch._step.sampled import counts_of, sample, update_between

__all__ = ["Logged", "StepLog"]

_logger = logging.getLogger("stablenum")


class Logged(NamedTuple):
    """What the log needs of a guard; what takes time is called when it is needed.

    Attributes:
        state: the guard's state.
        names: returns the names in the record.
        own_names: returns the names of ``params``.
        params: the parameters.
        settings: returns the guard's settings as plain values.
        optimizer: the inner optimizer.
    """

    state: GuardState
    names: Callable[[], Names]
    own_names: Callable[[], Sequence[str]]
    params: Sequence[Tensor]
    settings: Callable[[], Mapping[str, Any]]
    optimizer: Optimizer


class _Reading(NamedTuple):
    """A reading that is under way: of the record, and of the samples before and after the last step."""

    copies: BackgroundRead
    counts: Sequence[int]


class StepLog:
    """Gives the record of one guard to the file of its run. Of several ranks, the first one has the file.

    Args:
        file: the file.
    """

    def __init__(self, file: LogFile) -> None:
        self._file = file
        self._steps = 0  # the number of the next one
        self._begun = self._mine = False
        self._state: GuardState | None = None
        self._names: Names | None = None
        self._own_names: Sequence[str] = ()
        self._readings: deque[_Reading] = deque()
        self._before: Tensor | None = None

    def after_step(self, state: GuardState, look: Callable[[], Logged]) -> None:
        """Read what is due after a step, and write what has arrived.

        Args:
            state: the guard's state.
            look: returns all that the log may need, which takes longer.
        """
        if capturing() or not self._goes_on(look):
            return
        self._state = state
        self._steps += 1
        self._write_arrived(wait=False)
        if self._steps % EVERY == EVERY - 1:
            self._before = _sampled(look().params)
        elif self._steps % EVERY == 0:
            seen = look()
            self._names, self._own_names = seen.names(), seen.own_names()
            self._read(seen.params)

    def flush(self, seen: Logged) -> None:
        """Write all steps so far. On an accelerator this waits."""
        if self._mine and not capturing():
            self._state, self._names, self._own_names = seen.state, seen.names(), seen.own_names()
            self.close()

    def close(self) -> None:
        """Write all steps so far, with the names that were known at the last reading.

        It is called when the guard is dropped and when the program ends, so it raises nothing.
        """
        if self._state is None or self._file.over:
            return
        try:
            self._write_arrived(wait=True)
            self._file.write(history(self._state, self._names))
        except RuntimeError as error:  # the device has failed
            _logger.warning(f"The last steps are missing in {self._file.path}: {error}")

    def went_to(self, step: int) -> None:
        """Take note that a state was loaded in which ``step`` steps had been taken."""
        self._steps = step
        self._before = None  # the next update begins elsewhere

    def go_back(self, rewind: Rewind, records: Sequence[StepRecord]) -> None:
        """Write that the run went back, and why, when all steps so far are written.

        Args:
            rewind: from where, to where, and why.
            records: what the guard has recorded, now that its state is put back.
        """
        if self._mine and not capturing():
            self._file.go_back(rewind, records)

    def settings_changed(self, seen: Logged) -> None:
        """Write the steps so far and a header with other settings."""
        if self._mine and not self._file.over:
            self.flush(seen)
            self._write_header(seen)

    def _goes_on(self, look: Callable[[], Logged]) -> bool:
        if not self._begun:
            self._begun = True
            self._mine = is_first_rank()  # ranks may have been joined only after the optimizer was wrapped
            if self._mine:
                seen = look()
                self._names, self._own_names = seen.names(), seen.own_names()
                self._write_header(seen)
        return self._mine and not self._file.over

    def _write_header(self, seen: Logged) -> None:
        self._file.begin(
            framework="torch",
            settings=seen.settings(),
            optimizer=_settings_of(seen.optimizer),
            versions={
                "stablenum": stablenum.__version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
        )

    def _read(self, params: Sequence[Tensor]) -> None:
        assert self._state is not None
        before, self._before = self._before, None
        after = None if before is None else _sampled(params)
        samples = [] if before is None or after is None else [before, after]
        counts = counts_of(params)
        if in_background(self._state):
            copies = BackgroundRead()
            copies.begin(*self._state.recorder, *samples)
            self._readings.append(_Reading(copies, counts))
        else:  # on a CPU nothing waits; on other accelerators the host does, once in 64 steps
            self._write(self._state.recorder, samples, counts)

    def _write_arrived(self, *, wait: bool) -> None:
        while self._readings:
            arrived = self._readings[0].copies.result(wait=wait)
            if arrived is None:
                return
            self._write(Recorder(*arrived[:2]), arrived[2:], self._readings.popleft().counts)

    def _write(self, recorder: Recorder, samples: Sequence[Tensor], counts: Sequence[int]) -> None:
        assert self._state is not None
        records = history(self._state._replace(recorder=recorder), self._names)
        if records and samples:
            update = update_between(records[-1]["step"], samples, counts, self._own_names)
        else:
            update = None
        self._file.write(records, [] if update is None else [update])


def _sampled(params: Sequence[Tensor]) -> Tensor | None:
    """Return a sample of the parameters; None of those that cannot be sampled, so that a log ends no run."""
    try:
        return sample(params)
    except RuntimeError:
        return None


def in_background(state: GuardState) -> bool:
    """Return whether a copy of the state to the host needs no wait."""
    return state.step.is_cuda


def _settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's class and the settings of its groups that are plain values.

    A setting that is not the same in all groups is an object with the list ``by_group``; None stands for a
    group without a plain value.
    """
    groups = [_plain_settings(group) for group in optimizer.param_groups]
    names = dict.fromkeys(name for group in groups for name in group)
    merged = {name: _merged([group.get(name) for group in groups]) for name in names}
    return {"class": type(optimizer).__name__} | merged


def _merged(values: list[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else {"by_group": values}


def _plain_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: _number_of(value) for name, value in group.items()}
    plain = {k: _in_json(v) for k, v in known.items() if isinstance(v, (bool, int, float, str)) or v is None}
    several = {
        k: [_in_json(x) for x in v] for k, v in known.items() if isinstance(v, tuple) and _are_numbers(v)
    }
    return plain | several


def _number_of(value: Any) -> Any:
    """Return the number in a tensor on the host; to read one on an accelerator, the host would wait."""
    on_host = isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu"
    return value.item() if on_host else value


def _in_json(value: Any) -> Any:
    """Return a plain value, a number that is not finite by its name."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _are_numbers(values: tuple[Any, ...]) -> bool:
    return all(isinstance(value, (int, float)) for value in values)
