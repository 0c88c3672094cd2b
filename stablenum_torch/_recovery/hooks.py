"""What the loop of a recovery asks of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from stablenum.guard.readout import StepRecord
from stablenum.recovery.loop import Easing, Finding
from stablenum.recovery.positions import Generators
from stablenum.recovery.snapshots import Snapshot
from stablenum.recovery.symptoms import Symptom
from stablenum_torch._recovery.easing import Eased
from stablenum_torch._recovery.findings import Search
from stablenum_torch._recovery.random_states import ProcessGenerators
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
    """

    def __init__(
        self, model: nn.Module, opt: GuardedOptimizer, others: Mapping[str, Any], ranks: Together
    ) -> None:
        self.generators: Generators = ProcessGenerators()
        self._opt, self._ranks = opt, ranks
        self._state, self._search, self._eased = RunState(model, opt, others), Search(model, opt), Eased(opt)

    def capture(self) -> Captured:
        return self._state.capture()

    def restore(self, state: Captured) -> None:
        self._state.restore(state)

    def rows(self) -> Sequence[StepRecord]:
        return self._opt.history()

    def findings(self, *, audit: bool) -> list[Finding]:
        return self._search.findings(with_audit=audit)

    def ease(self, easing: Easing | None) -> None:
        self._eased.ease(easing)

    def agree(self, symptoms: list[Symptom]) -> list[Symptom]:
        return [symptom for of_rank in self._ranks.gathered(symptoms) for symptom in of_rank]

    def save(self, snapshot: Snapshot) -> None:
        pass

    def load(self) -> list[Snapshot]:
        return []
