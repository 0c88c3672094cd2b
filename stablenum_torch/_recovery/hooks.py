"""What the loop of a recovery asks of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from stablenum.checkpoints.finiteness import listed
from stablenum.guard.readout import StepRecord, history
from stablenum.recovery.buffers import Noted
from stablenum.recovery.hooks import Easing
from stablenum.recovery.logged import Why
from stablenum.recovery.parameters import Measures
from stablenum.recovery.positions import Generators
from stablenum.recovery.settings import Response
from stablenum.recovery.snapshots import Snapshot
from stablenum.recovery.symptoms import Finding, Symptom
from stablenum_torch._recovery.buffers import BufferSizes
from stablenum_torch._recovery.easing import Eased
from stablenum_torch._recovery.findings import Search
from stablenum_torch._recovery.random_states import ProcessGenerators
from stablenum_torch._recovery.spilled import spilled
from stablenum_torch._recovery.state import Captured, RunState
from stablenum_torch._recovery.together import Together
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["TorchHooks"]


class TorchHooks:
    """Captures, measures and puts back the state of a training in PyTorch.

    Args:
        model: the model.
        opt: its guarded optimizer.
        others: other things with a state, by name.
        ranks: the ranks that go back together.
        folder: where snapshots are written, too; None for nowhere.
    """

    def __init__(
        self,
        model: nn.Module,
        opt: GuardedOptimizer,
        others: Mapping[str, Any],
        ranks: Together,
        folder: Path | None = None,
    ) -> None:
        self.generators: Generators = ProcessGenerators()
        self._opt, self._ranks = opt, ranks
        self._state, self._eased = RunState(model, opt, others), Eased(opt)
        self._search = Search(model, opt, others)
        self._buffers = BufferSizes(self._search.modules)
        self._spilled = None if folder is None else spilled(folder, ranks, opt)

    def check_beginning(self) -> None:
        """Check that the training begins with finite numbers; called by all ranks.

        Raises:
            ValueError: it does not, on any rank.
        """
        names = [name for of_rank in self._ranks.gathered(self._search.nonfinite()) for name in of_rank]
        if names:
            raise ValueError(
                f"model and opt must be finite before the first step; {listed(dict.fromkeys(names))} is not, "
                "so there is no good state to go back to."
            )

    def capture(self) -> Captured:
        return self._state.capture()

    def restore(self, state: Captured) -> None:
        self._state.restore(state)

    def log(self, why: Why, before: Sequence[StepRecord]) -> None:
        guard = self._opt._guard
        now = history(guard.state, guard.names())  # opt.history() would write it, as steps taken since
        guard.log_rewind(why.rewind(before, now), now)

    def rows(self) -> Sequence[StepRecord]:
        return self._opt.history()

    def counts(self) -> None:
        """Return None: the guard gets the gradients of each step."""

    def findings(self) -> list[Finding]:
        return self._search.findings()

    def measures(self) -> dict[str, Measures]:
        return self._search.measures()

    def note_buffers(self, step: int) -> None:
        self._buffers.note(step)

    def noted_buffers(self) -> list[Noted]:
        return self._buffers.noted()

    def possible(self, response: Response) -> Response:
        return self._eased.possible(response)

    def ease(self, easing: Easing | None) -> None:
        self._eased.ease(easing)

    def agree(self, symptoms: list[Symptom]) -> list[Symptom]:
        return [symptom for of_rank in self._ranks.gathered(symptoms) for symptom in of_rank]

    def shared(self, value: Any) -> Any:
        return self._ranks.gathered(value)[0]

    def save(self, snapshot: Snapshot, held: Sequence[int]) -> None:
        if self._spilled is not None:
            self._spilled.save(snapshot, held)

    def load(self) -> list[Snapshot]:
        return [] if self._spilled is None else self._spilled.load()
