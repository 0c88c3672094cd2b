"""What the loop of a recovery needs of JAX."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import stablenum
from stablenum.recovery.loop import Easing, Finding
from stablenum.recovery.snapshots import Snapshot
from stablenum.recovery.symptoms import Symptom
from stablenum_jax._recovery.copies import Copy, copy_of
from stablenum_jax._recovery.easing import eased_state, not_applied
from stablenum_jax._recovery.findings import Findings
from stablenum_jax._recovery.generators import ProcessGenerators
from stablenum_jax._recovery.states import flattened, put_back
from stablenum_jax._recovery.together import first_of_all, symptoms_of_all
from stablenum_jax._step.readout import history
from stablenum_jax._trees.state import find_guard

__all__ = ["JaxHooks"]

_logger = logging.getLogger("stablenum")
PyTree: TypeAlias = Any


class _Captured(NamedTuple):
    leaves: list[Copy]
    structure: Any
    generators: dict[str, Any]


class JaxHooks:
    """Copies, puts back, measures and eases the state of one training.

    Args:
        state: the first state.
        on_ease: called after each change of the easing.
    """

    def __init__(self, state: PyTree, on_ease: Callable[[Easing | None], object] | None) -> None:
        self.generators = ProcessGenerators()
        self.state = state
        self._on_ease = on_ease
        self._findings = Findings(state)
        self._last_step: Any = None  # the guard's own count at the last check, an array
        self._told: set[str] = set()

    def capture(self) -> _Captured:
        """Return a copy of the whole state in host memory, which may still be under way."""
        leaves, structure = flattened(self.state)
        return _Captured([copy_of(leaf) for leaf in leaves], structure, self.generators.read())

    def restore(self, state: _Captured) -> None:
        """Put a captured state back."""
        self.state = put_back(self.state, [copy.again() for copy in state.leaves], state.structure)
        self.generators.write(state.generators)

    def rows(self) -> list[stablenum.StepRecord]:
        """Return the guard's history, oldest first."""
        return history(self.state)

    def findings(self, *, audit: bool) -> list[Finding]:
        """Return what is bad in the state.

        Raises:
            RuntimeError: no step has been made since the last check.
        """
        self._check_moved()
        return self._findings.of(self.state, audit=audit)

    def _check_moved(self) -> None:
        step = find_guard(self.state).guard.step
        if step.is_deleted() or step is self._last_step:
            raise RuntimeError(
                "recovery.state must be assigned what each step returns; it still is an earlier state. Write "
                "recovery.state, loss = train_step(recovery.state, batch)."
            )
        self._last_step = step

    def ease(self, easing: Easing | None) -> None:
        """Take the next steps more carefully, or as usual again."""
        self.state = eased_state(self.state, easing)
        if self._on_ease is not None:
            self._on_ease(easing)
        elif easing is not None:
            for missing in set(not_applied(self.state, easing)) - self._told:
                self._told.add(missing)
                _logger.warning("Recovery cannot ease the next steps by %s.", missing)

    def agree(self, symptoms: list[Symptom]) -> list[Symptom]:
        """Return the symptoms of all processes."""
        return symptoms_of_all(symptoms)

    def shared(self, value: Any) -> Any:
        """Return the value of the first process: a string, or None."""
        return first_of_all(value)

    def save(self, snapshot: Snapshot, held: Sequence[int]) -> None:
        """Keep nothing on the disk."""

    def load(self) -> list[Snapshot]:
        """Return nothing: nothing is on the disk."""
        return []
