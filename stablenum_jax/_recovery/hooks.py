"""What the loop of a recovery needs of JAX."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

import stablenum
from stablenum.checkpoints.finiteness import listed
from stablenum.recovery.buffers import Noted
from stablenum.recovery.hooks import Easing
from stablenum.recovery.logged import Why
from stablenum.recovery.parameters import Measures
from stablenum.recovery.positions import Generators
from stablenum.recovery.settings import Response
from stablenum.recovery.snapshots import Snapshot
from stablenum.recovery.spilled import Spilled
from stablenum.recovery.symptoms import Finding, Symptom, SymptomCode
from stablenum_jax._recovery.buffers import BufferSizes
from stablenum_jax._recovery.captured import Captured
from stablenum_jax._recovery.easing import eased_state, possible
from stablenum_jax._recovery.findings import Findings
from stablenum_jax._recovery.generators import ProcessGenerators
from stablenum_jax._recovery.snapshot_folder import SnapshotFolder
from stablenum_jax._recovery.together import Processes
from stablenum_jax._step.readout import history
from stablenum_jax._step.run_log import RunLog, write_logs
from stablenum_jax._trees.state import GuardOptState, find_guard, multisteps_around_guard

__all__ = ["JaxHooks"]

_logger = logging.getLogger("stablenum")
PyTree: TypeAlias = Any


_NOT_ASSIGNED = (
    "recovery.state must be assigned what each step returns; it still is an earlier state. Write "
    "recovery.state, loss = train_step(recovery.state, batch)."
)


class JaxHooks:
    """Copies, puts back, measures and eases the state of one training.

    Args:
        state: the first state.
        on_ease: called after each change of the easing.
        folder: where snapshots are written, too; None for nowhere.
        run_log: the log of the run; None if it has none.
    """

    def __init__(
        self,
        state: PyTree,
        on_ease: Callable[[Easing | None], object] | None,
        folder: Path | None = None,
        run_log: RunLog | None = None,
    ) -> None:
        self.generators: Generators = ProcessGenerators()
        self.processes = Processes()
        self.state = state
        self._on_ease, self._log = on_ease, run_log
        self._findings = Findings(state)
        self._buffers = BufferSizes()
        self._last_guard: Any = find_guard(state).ints  # at the last check
        self._easing: Easing | None = None
        self._told: set[str] = set()
        self._spilled = None if folder is None else self._in(folder)

    def _in(self, folder: Path) -> Spilled:
        return Spilled(
            folder,
            self.processes,
            SnapshotFolder(),
            to_plain=Captured.to_plain,
            from_plain=lambda plain: Captured.from_plain(plain, self.state),
        )

    def check_beginning(self) -> None:
        """Check that the training begins with numbers; called by all processes.

        Raises:
            ValueError: a parameter or a moment is NaN.
        """
        names = self._findings.poisoned_at_first(self.state)
        if names:
            raise ValueError(
                f"state must have no NaN before the first step; {listed(names)} is NaN, so there is no good "
                "state to go back to."
            )

    def capture(self) -> Captured:
        """Return a copy of the whole state in host memory, which may still be under way."""
        return Captured.of(self.state, self.generators.read())

    def restore(self, state: Captured) -> None:
        """Put a captured state back."""
        write_logs()
        self.state = state.put_into(self.state)
        self.generators.write(state.generators)

    def log(self, why: Why, before: Sequence[stablenum.typing.StepRecord]) -> None:
        """Write why the run went back into its log, if it has one."""
        if self._log is not None:
            now = self.rows()
            self._log._go_back(why.rewind(before, now), now)

    def rows(self) -> list[stablenum.typing.StepRecord]:
        """Return the guard's history, oldest first."""
        self._check_alive()
        return history(self.state)

    def counts(self) -> jax.Array | None:
        """Return how far a guard inside ``optax.MultiSteps`` is: (3,) int32, the fields of ``Counts``.

        None elsewhere. Inside two of them it is not known which gradients make a sum, and None as well: the
        loop then finds that rows and steps do not match.
        """
        around = multisteps_around_guard(self.state)
        if len(around) != 1:
            return None
        (sums,) = jax.tree.leaves(around[0].gradient_step)
        (summed,) = jax.tree.leaves(around[0].mini_step)
        return _stacked(self._check_alive().guard.step, sums, summed)

    def findings(self) -> list[Finding]:
        """Return what is not finite in the state.

        Raises:
            RuntimeError: no step has been made since the last check.
        """
        ints = self._check_alive().ints
        if ints is self._last_guard:
            raise RuntimeError(_NOT_ASSIGNED)
        self._last_guard = ints
        return [*self._halts(), *self._findings.of(self.state)]

    def _halts(self) -> list[Finding]:
        """Say whether the guard has halted: a compiled step cannot raise, and skips all that follow."""
        if not int(find_guard(self.state).guard.halted):
            return []
        return [Finding(SymptomCode.SKIPS_IN_A_ROW, "the guard has halted the training", ())]

    def _check_alive(self) -> GuardOptState:
        """Return the guard's state.

        Raises:
            RuntimeError: it was donated to a step.
        """
        found = find_guard(self.state)
        if found.ints.is_deleted():
            raise RuntimeError(_NOT_ASSIGNED)
        return found

    def measures(self) -> dict[str, Measures]:
        """Return what is measured of each parameter."""
        return self._findings.measures(self.state)

    def note_buffers(self, step: int) -> None:
        """Measure the buffers after a step, without a wait."""
        if not find_guard(self.state).ints.is_deleted():  # otherwise the next check says so
            self._buffers.note(step, self.state)

    def noted_buffers(self) -> list[Noted]:
        """Return what was measured of the buffers since the last call."""
        return self._buffers.noted()

    def possible(self, response: Response) -> Response:
        """Return a response without what the state has no place for."""
        if self._on_ease is not None:
            return response
        response, missing = possible(self.state, response)
        for what in set(missing) - self._told:
            self._told.add(what)
            _logger.warning("Recovery cannot ease the next steps by %s.", what)
        return response

    def ease(self, easing: Easing | None) -> None:
        """Take the next steps more carefully, or as usual again."""
        ended = self._easing
        self.state = eased_state(self.state, easing, was_wider=ended is not None and ended.wider)
        self._easing = easing
        if self._on_ease is not None:
            self._on_ease(easing)

    def agree(self, symptoms: list[Symptom]) -> list[Symptom]:
        """Return the symptoms of all processes."""
        return [symptom for of_process in self.processes.gathered(symptoms) for symptom in of_process]

    def shared(self, value: Any) -> Any:
        """Return the value of the first process."""
        return self.processes.gathered(value)[0]

    def save(self, snapshot: Snapshot, held: Sequence[int]) -> None:
        """Write a snapshot to the disk, if there is a folder."""
        if self._spilled is not None:
            self._spilled.save(snapshot, held)

    def load(self) -> list[Snapshot]:
        """Return the snapshots on the disk that all processes have, oldest first."""
        return [] if self._spilled is None else self._spilled.load()


@jax.jit
def _stacked(*counts: jax.Array) -> jax.Array:
    """Return a copy, which outlives the state when that is donated to a step."""
    return jnp.stack(counts)
