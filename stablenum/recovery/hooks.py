"""What an adapter does for the loop of a recovery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from stablenum.guard.readout import StepRecord
from stablenum.recovery.buffers import Noted
from stablenum.recovery.logged import Why
from stablenum.recovery.parameters import Measures
from stablenum.recovery.positions import Generators
from stablenum.recovery.settings import Response
from stablenum.recovery.snapshots import Snapshot
from stablenum.recovery.symptoms import Finding, Symptom

__all__ = ["Easing", "Hooks"]


class Easing(NamedTuple):
    """How carefully steps are taken for a while after a rewind.

    Attributes:
        rate: a factor on the learning rate.
        clip_at: the largest gradient norm; None leaves the threshold alone.
        wider: whether to compute one format wider.
        until: the last step that it applies to.
    """

    rate: float
    clip_at: float | None
    wider: bool
    until: int


class Hooks(Protocol):
    """What an adapter does for the loop."""

    @property
    def generators(self) -> Generators:
        """The random generators of the process."""

    def check_beginning(self) -> None:
        """Check that the training begins with a good state; called by all ranks.

        Raises:
            ValueError: it does not, on any rank.
        """

    def capture(self) -> Any:
        """Return a copy of the whole state in host memory."""

    def restore(self, state: Any) -> None:
        """Put a captured state back; it may be put back again later."""

    def log(self, why: Why, before: Sequence[StepRecord]) -> None:
        """Write into the log of the run, if it has one, why a state has just been put back.

        ``before`` is what the guard's history was. All of it must be in the log by then.
        """

    def rows(self) -> Sequence[StepRecord]:
        """Return the guard's history, oldest first."""

    def counts(self) -> Any:
        """Return an array of the fields of :class:`stablenum.recovery.pairing.Counts`, without a wait.

        None if the guard gets the gradients of each step by themselves.
        """

    def findings(self) -> list[Finding]:
        """Return what is not finite in the state."""

    def measures(self) -> Mapping[str, Measures]:
        """Return what is measured of each parameter that is trained, by name."""

    def note_buffers(self, step: int) -> None:
        """Measure the buffers after a step, without a wait."""

    def noted_buffers(self) -> list[Noted]:
        """Return what was measured of the buffers since the last call."""

    def possible(self, response: Response) -> Response:
        """Return a response without what the training has no place for; that is logged, once."""

    def ease(self, easing: Easing | None) -> None:
        """Take the next steps more carefully, or as usual again."""

    def agree(self, symptoms: list[Symptom]) -> list[Symptom]:
        """Return the symptoms of all ranks; called by all at the same steps."""

    def shared(self, value: Any) -> Any:
        """Return the value of the first of several ranks; called by all."""

    def save(self, snapshot: Snapshot, held: Sequence[int]) -> None:
        """Write a snapshot to the disk, if there is a folder, in place of one of the same step.

        Those of steps that are not in ``held`` are removed there.
        """

    def load(self) -> list[Snapshot]:
        """Return the snapshots on the disk that are whole, oldest first; none if there is no folder."""
