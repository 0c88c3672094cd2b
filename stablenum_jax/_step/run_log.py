"""The log of a run: the record in the guard's state, read every 64 steps for a file.

A reading begins with a copy on the device, because a step may donate the state's buffers to the next one.
The copy goes to the host in the background and is written once it is there, so that no step waits.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import weakref
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stablenum
from stablenum.guard.readout import StepRecord, history
from stablenum.runlog.lines import Rewind
from stablenum.runlog.writing import LogFile, Pace
from stablenum_jax._step.readout import check_readable
from stablenum_jax._step.sampled import Sample, sample, update_between
from stablenum_jax._trees.names import known_names
from stablenum_jax._trees.settings import known_settings
from stablenum_jax._trees.state import GuardOptState, find_guard, places_in_windows

__all__ = ["RunLog", "write_logs"]

PyTree: TypeAlias = Any

_logger = logging.getLogger("stablenum")
_open: weakref.WeakSet[_Readings] = weakref.WeakSet()


def write_logs() -> None:
    """Write what all logs have yet to write, before a run goes back: those steps will not be seen again."""
    for readings in list(_open):
        readings.flush()
        readings.forget_sample()


class RunLog:
    """Writes the record of each step to a file as the run goes, for ``stablenum report``.

    Call it after each step, outside of jit, with the state that the step returned::

        log = stablenum_jax.RunLog("run.jsonl")
        for batch in batches:
            params, opt_state, loss = train_step(params, opt_state, batch)
            log(opt_state, params)

    No call waits for the device: once in 64 steps the record is copied on the device, and the copy is written
    when it has reached the host. A step may donate its state. The record holds 128 steps, so a call must not
    stand for more of them (a ``lax.scan`` over 200 steps leaves 72 out, with a warning).

    The last steps are written by :meth:`close`, by leaving a ``with`` block, or when the program ends. A
    process that is killed loses the steps since the last copy that had arrived. Of several processes, the
    first writes. A file that is there is continued if it is such a log. If the file cannot be written later
    on, a warning is logged and the log ends, not the run.

    Args:
        path: the file.

    Raises:
        TypeError: ``path`` is not a path.
        ValueError: ``path`` is in a folder that does not exist, or is a file of another kind.

    Example:
        >>> import pathlib, tempfile, jax.numpy as jnp, optax, stablenum_jax
        >>> file = pathlib.Path(tempfile.mkdtemp(), "run.jsonl")
        >>> tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
        >>> params, grads = {"w": jnp.zeros(2)}, {"w": jnp.asarray([3.0, 4.0])}
        >>> with RunLog(file) as log:
        ...     params, opt_state = stablenum_jax.step(tx, params, tx.init(params), grads)
        ...     log(opt_state, params)
        >>> file.read_text().splitlines()[1]
        '{"step":0,"grad_norm":5.0,"reason":"OK","worst":"w"}'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._readings = _Readings(LogFile(path, argument="path"))
        # At the end of a program, JAX's own clean-up must come after the last reading. Functions that are
        # registered later run earlier, and those of weakref may have been registered before JAX's.
        atexit.register(self._readings.close)
        weakref.finalize(self, self._readings.close).atexit = False

    def __call__(self, opt_state: PyTree, params: PyTree = None) -> None:
        """Take note of a step.

        Args:
            opt_state: the state after the step: a pytree with one guard's state in it.
            params: the parameters after the step, for the size of the updates: every 64th update is measured
                on a sample of the elements. Without them updates are not logged.

        Raises:
            ValueError: ``opt_state`` has no guard or more than one, or is stacked or traced.
        """
        found = find_guard(opt_state)
        check_readable(found)
        if jax.process_index() == 0:
            self._readings.after_step(found, params, opt_state)

    def close(self) -> None:
        """Write what is still to be written, which waits for the device. Later steps can still be logged."""
        self._readings.flush()

    def _go_back(self, rewind: Rewind, records: Sequence[StepRecord]) -> None:
        """Write that the run went back, and why, when all steps so far are written.

        Args:
            rewind: from where, to where, and why.
            records: what the guard has recorded, now that its state is put back.
        """
        self._readings.go_back(rewind, records)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Reading(NamedTuple):
    """A reading that is under way: copies of the record, of samples before and after the last step, and of
    its place in the window of each ``MultiSteps``, which is 0 at the end of a window."""

    call: int
    guard: GuardOptState
    samples: tuple[Sample, ...]
    windows: tuple[jax.Array, ...] = ()

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return (self.guard.floats, self.guard.ints, *self.windows, *(s.elements for s in self.samples))

    @property
    def arrived(self) -> bool:
        return all(array.is_ready() for array in self.arrays)

    @property
    def only_accumulated(self) -> bool:
        """Whether the last step only added its gradients to a window of ``MultiSteps``."""
        return any(np.any(np.asarray(place)) for place in self.windows)


class _Readings:
    """The readings of one run, in order."""

    def __init__(self, file: LogFile) -> None:
        _open.add(self)
        self._file = file
        self._pace = Pace()
        self._under_way: deque[_Reading] = deque()
        self._before: Sample | None = None
        self._last: GuardOptState | None = None  # not yet read
        self._begun = False

    def after_step(self, state: GuardOptState, params: PyTree, opt_state: PyTree) -> None:
        if self._file.over:
            return
        self._write(wait=False)
        due = self._pace.due()
        before, self._before = self._before, None
        self._last = state
        if due:
            after = None if before is None or params is None else sample(params)
            if before is None or after is None:
                self._read(state)
            else:
                self._read(state, (before, after), places_in_windows(opt_state))
        elif self._pace.due_next and self._pace.steps_singly and params is not None:
            self._before = sample(params)

    def _read(
        self,
        state: GuardOptState,
        samples: tuple[Sample, ...] = (),
        windows: tuple[jax.Array, ...] = (),
    ) -> None:
        self._last = None
        floats, ints, *places = (_copy(array) for array in (state.floats, state.ints, *windows))
        copied = state._replace(floats=floats, ints=ints)
        reading = _Reading(self._pace.calls, copied, samples, tuple(places))
        for array in reading.arrays:
            array.copy_to_host_async()
        self._under_way.append(reading)

    def flush(self) -> None:
        """Read the last state and write everything."""
        last = self._last
        if last is not None and not self._file.over:
            if any(array.is_deleted() for array in (last.floats, last.ints)):
                _logger.warning(
                    f"The last steps are missing in {self._file.path}, because the state after the last one "
                    "that was logged has been donated. Call the log after every step, or close it first."
                )
            else:
                self._read(last)
        self._write(wait=True)

    def forget_sample(self) -> None:
        """Measure no update from the parameters as they are: the next step begins elsewhere."""
        self._before = None

    def go_back(self, rewind: Rewind, records: Sequence[StepRecord]) -> None:
        """Write that the run went back; not in processes that do not write, nor before the first step."""
        if self._begun:
            self._pace.went_back(records[-1]["step"] if records else -1)
            self._file.go_back(rewind, records)

    def close(self) -> None:
        """Do as :meth:`flush`, when the log is dropped and when the program ends: nothing is raised."""
        atexit.unregister(self.close)
        try:
            self.flush()
        except RuntimeError as error:  # the device has failed
            _logger.warning(f"The last steps are missing in {self._file.path}: {error}")

    def _write(self, *, wait: bool) -> None:
        while self._under_way and (wait or self._under_way[0].arrived) and not self._file.over:
            self._write_one(self._under_way.popleft())

    def _write_one(self, reading: _Reading) -> None:
        ints, floats = np.asarray(reading.guard.ints), np.asarray(reading.guard.floats)
        read = reading.guard._replace(ints=ints, floats=floats)
        number = int(read.names_id)
        if not self._begun:
            self._begun = True
            self._write_header(number)
        records = history(read, known_names(number))  # type: ignore[arg-type]  # its recorder is read
        updates = []
        if records:
            self._pace.arrived(reading.call, records[-1]["step"])
            if reading.samples and not reading.only_accumulated:
                updates = [update_between(records[-1]["step"], *reading.samples)]
        self._file.write(records, [update for update in updates if update is not None])

    def _write_header(self, number: int) -> None:
        config = known_settings(number)
        self._file.begin(
            framework="jax",
            settings=None if config is None else config.to_dict(),
            versions={
                "stablenum": stablenum.__version__,
                "jax": jax.__version__,
                "optax": optax.__version__,
                "python": platform.python_version(),
            },
        )


def _copy(array: jax.Array) -> jax.Array:
    """Copy an array on its device; of one that every device has, the copy of this process alone."""
    return jnp.copy(array if array.is_fully_addressable else array.addressable_data(0))
