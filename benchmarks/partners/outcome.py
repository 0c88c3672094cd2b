"""What a partner's training loop left behind after one bad batch. No framework is imported here."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Fault", "Outcome", "Row", "State"]

State: TypeAlias = Mapping[str, np.ndarray[Any, Any]]
Row: TypeAlias = Mapping[str, float | str | bool]


class Fault(enum.StrEnum):
    """What is wrong with the bad batch; :mod:`benchmarks.partners.batches` has the values."""

    NAN_BATCH = "nan_batch"
    INF_GRADIENT = "inf_gradient"
    LOSS_SPIKE = "loss_spike"
    FP16_OVERFLOW = "fp16_overflow"
    NAN_IN_BATCHNORM = "nan_in_batchnorm"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a run, and what was seen on the way.

    Attributes:
        state: parameters, moments and counters of the optimizer, and buffers after the last step, by name;
            without the guard's own state.
        log: for each step, what the partner shows its user: a number, a word or a flag by name.
        schedule: after each step, how far the schedule of the learning rate has come: the number of its
            steps, or the rate itself.
        resumed: ``state`` of a run that was saved in the middle, loaded into new objects and trained to the
            end; None if it was not tried.
        reference: the same run without the bad batch; None if this is such a run.
    """

    state: State
    log: tuple[Row, ...]
    schedule: tuple[float, ...]
    resumed: State | None = None
    reference: Outcome | None = None
