"""Log that steps are skipped, or that the guard has halted, though the caller never reads the state.

JAX builds what a compiled program returns on the host, where :class:`GuardOptState` shows each state to the
watch. Nothing is added to the program. A callback in it, even in the branch of a skip, would take JAX's fast
dispatch from every step (28 microseconds became 300 and more on a CPU) and the program from the compilation
cache.
"""

from __future__ import annotations

import atexit
import time
from collections import deque
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeAlias

import jax
import numpy as np

import stablenum
from stablenum.guard.skip_log import SkipLog
from stablenum_jax._step.readout import skip_log_of, tell_of_skips
from stablenum_jax._trees.state import GuardOptState, listen, plain_arrays

__all__ = ["begin"]

_SECONDS = 10.0  # between two looks; a look takes about a millisecond of the host (measured on a CPU)
_STATES = 32  # so many are kept, because several guards may take turns

# The fields of a state.
_Seen: TypeAlias = tuple[Any, ...]


class _Watch:
    """Looks at the states of all guards in this process. It waits for them only where a step is traced or a
    state is made, and at the end of the program."""

    def __init__(self) -> None:
        self._due: float | None = None
        self._last: deque[_Seen] = deque(maxlen=_STATES)
        self._copy: _Seen | None = None

    def begin(self) -> None:
        """Watch from now on, or look at what was trained before."""
        if self._due is not None:
            self.flush()
            return
        self._due = time.monotonic() + _SECONDS
        listen(self.see)
        atexit.register(self.flush)  # called before JAX's own, which was registered earlier

    def see(self, state: GuardOptState) -> None:
        """Remember a state, and look at one if it is time. This never waits."""
        if not _is_array(state.ints) or _is_traced(tuple(state)):
            return
        seen = tuple(state)  # not a state, whose building would be seen
        self._last.append(seen)
        now = time.monotonic()
        if self._due is not None and now >= self._due:
            self._due = now + _SECONDS
            self._look(seen)

    def _look(self, seen: _Seen) -> None:
        """Log what the copy of the last look shows, if it is there, and begin to copy this one, which the
        next step may donate."""
        copy = self._copy
        if copy is not None and not all(leaf.is_ready() for leaf in jax.tree.leaves(copy)):
            return
        self._copy = None
        with _quietly(), jax.ensure_compile_time_eval(), jax.debug_nans(False), jax.debug_infs(False):
            if copy is not None:
                state, number = _read(*copy)
                tell_of_skips(skip_log_of(state, number), state, number)
            self._copy = jax.tree.map(_copied, plain_arrays(seen))

    def flush(self) -> None:
        """Log what the last state of each training shows."""
        latest: dict[SkipLog, tuple[stablenum.GuardState, int]] = {}
        states = tuple(self._last)
        self._last.clear()
        for seen in states:
            with _quietly():
                state, number = _read(*plain_arrays(seen))
                log = skip_log_of(state, number)
                if log in latest and latest[log][0].step > state.step:  # it went back, or another run began
                    tell_of_skips(log, *latest[log])
                latest[log] = state, number
        for log, seen_last in latest.items():
            with _quietly():
                tell_of_skips(log, *seen_last)


def _quietly() -> AbstractContextManager[None]:
    """Suppress all errors: arrays may be donated, and the device may have failed, of which their reader
    learns; and a user may have made anything of a state."""
    return suppress(Exception)


def _is_array(leaf: Any) -> bool:
    """Return whether a leaf has a value: a JAX array, or a node of flax.nnx with one."""
    if not isinstance(leaf, jax.Array):
        found = jax.tree.leaves(leaf) if hasattr(leaf, "get_value") else []
        return len(found) == 1 and leaf is not found[0] and _is_array(found[0])
    return not isinstance(leaf, jax.core.Tracer)


def _is_traced(tree: Any) -> bool:
    """Return whether a leaf is traced: outside of jit, some leaves of a state may be so, and others not."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _copied(array: jax.Array) -> jax.Array:
    """Return a copy on the same device, without compiling anything; of an array that is on all processes'
    devices, of the own part."""
    array = array if array.is_fully_addressable else array.addressable_data(0)
    return jax.device_put(array, array.sharding, may_alias=False)


def _on_host(array: jax.Array) -> np.ndarray[Any, Any]:
    whole = array.is_fully_addressable or array.is_fully_replicated
    return np.asarray(jax.device_get(array if whole else array.addressable_data(0)))


def _read(*seen: Any) -> tuple[stablenum.GuardState, int]:
    """Return a state in NumPy; of several in one, as vmap stacks them, that with the most skips in a row."""
    read = GuardOptState(*jax.tree.map(_on_host, seen))
    guard, number = read.guard, read.names_id
    worst = np.unravel_index(np.argmax(guard.skipped_in_a_row), number.shape)
    return jax.tree.map(lambda leaf: leaf[worst], guard), int(number[worst])


_watch = _Watch()


def begin() -> None:
    """Note that a step is being traced, or that a state is made for a training."""
    _watch.begin()
