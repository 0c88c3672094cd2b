"""Scenarios as data: what is trained, on what data, what goes wrong, and the expected result.

There are two kinds. A :class:`Stream` gives the gradients themselves, so that every backend gets the same
bits; a :class:`Training` gives a model and batches, and every backend differentiates the model itself.
The command ``stablenum compare`` and the tests run the same objects.
"""

from typing import TypeAlias

from stablenum.commands.compare.scenarios.shared import (
    DTYPES,
    OPTIMIZERS,
    Expected,
    OptimizerSpec,
    Outcome,
    Tolerance,
    check_guard_names,
    tensor_names,
)
from stablenum.commands.compare.scenarios.stream import Event, Stream, TensorSpec
from stablenum.commands.compare.scenarios.training import MODELS, Fault, Goal, Training

__all__ = [
    "DTYPES",
    "MODELS",
    "OPTIMIZERS",
    "Event",
    "Expected",
    "Fault",
    "Goal",
    "OptimizerSpec",
    "Outcome",
    "Scenario",
    "Stream",
    "TensorSpec",
    "Tolerance",
    "Training",
    "check_guard_names",
    "tensor_names",
]

Scenario: TypeAlias = Stream | Training
