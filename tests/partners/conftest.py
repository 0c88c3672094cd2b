"""What a partner keeps for the whole process is forgotten after each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_accelerate_state() -> Iterator[None]:
    """Accelerate allows one precision per process, and each Trainer sets it."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
