"""The interface of a backend: what it gets at the start of a run, and what the run provides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from stablenum.commands.compare.scenarios import OptimizerSpec, Training
from stablenum.commands.compare.scenarios.training_data import Batch
from stablenum.guard.config import GuardConfig
from stablenum.recovery.ledger import RecoveryEvent
from stablenum.recovery.settings import RecoveryPolicy

__all__ = ["Run", "Setup"]

Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a backend gets at the start of a run.

    Args:
        params: the parameters as NumPy arrays, each in its dtype.
        optimizer: the description of the optimizer, which the backend creates.
        guard: the guard's settings; None for a plain run.
        plain_clip: for a plain run, the norm at which the framework's own function clips.
        training: the model; None for a stream.
        device: the device of PyTorch's tensors.
        recovery: how a guarded run goes back; None if it does not.
    """

    params: list[Array]
    optimizer: OptimizerSpec
    guard: GuardConfig | None
    plain_clip: float | None = None
    training: Training | None = None
    device: str = "cpu"
    recovery: RecoveryPolicy | None = None

    @property
    def ladder(self) -> tuple[str, ...]:
        """The format in which the model computes, for each level of the guard's escalation."""
        return ("float32",) if self.training is None else self.training.ladder(self.guard)


class Run(Protocol):
    """A training in progress on one backend."""

    @property
    def loss_scale(self) -> float:
        """The guard's scale for the next loss; 1 in a plain run."""

    @property
    def last(self) -> Mapping[str, Any]:
        """What the guard reports of the last step, as ``stablenum.guard.metrics`` does.

        A plain run has only ``loss``, and that only if it differentiates a model.
        """

    @property
    def norms(self) -> Array | None:
        """The norms of all gradients in the last step; None if the backend does not know them."""

    def step(self, gradients: list[Array], loss: float) -> None:
        """Take a step, given the gradients of the scaled loss and the unscaled loss.

        Raises:
            NonFiniteError: the guard stops the training.
        """

    def train(self, batch: Batch) -> None:
        """Differentiate the model on a batch and take a step.

        Raises:
            NonFiniteError: the guard stops the training.
            ValueError: the run is of a stream, which has no model.
        """

    def batches(self, steps: int) -> Iterator[int]:
        """Yield the numbers of the batches to use for ``steps`` steps; a run with a recovery goes back when
        it is hurt.

        Raises:
            RecoveryStopped: it was hurt too often.
        """

    @property
    def rewinds(self) -> Sequence[RecoveryEvent]:
        """The rewinds of the last call of :meth:`batches`."""

    def params(self) -> list[Array]:
        """Return copies of the current parameters."""

    def guard_state_dict(self) -> dict[str, Any]:
        """Return the guard's state as plain JSON values."""

    def load_guard_state_dict(self, plain: Mapping[str, Any]) -> None:
        """Continue from another run's guard state.

        Raises:
            ValueError: this is a plain run, or the state does not fit.
        """
