"""Train the digits network of the demo on one backend, without and with a guard, and print what happened.

``python -m stablenum.commands.demo.training BACKEND`` writes one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass

__all__ = ["SCENARIO", "Training", "trained"]

SCENARIO = "digits-mlp"


@dataclass(frozen=True, slots=True)
class Training:
    """A training without and with a guard on one backend.

    Attributes:
        plain: the losses without a guard.
        plain_score, score: the share of held-out digits that are right in the end.
        losses: those with a guard.
        reasons: why each guarded step was applied or skipped.
        scales: the loss scale of each guarded step.
        norms: the gradient norm of each guarded step.
        skipped: the guarded steps that were not applied.
    """

    plain: tuple[float, ...]
    plain_score: float
    losses: tuple[float, ...]
    score: float
    reasons: tuple[str, ...]
    scales: tuple[float, ...]
    norms: tuple[float, ...]
    skipped: tuple[int, ...]


def trained(name: str) -> Training:
    """Return both trainings on a backend, which is named as in ``stablenum compare``."""
    import numpy as np

    from stablenum.commands.compare.backends import BACKENDS
    from stablenum.commands.compare.builtin import SCENARIOS
    from stablenum.commands.compare.runner import run_guarded, run_plain

    scenario, backend = SCENARIOS[SCENARIO], BACKENDS[name]
    with np.errstate(all="ignore"):  # the plain run computes with NaN
        plain, guarded = run_plain(scenario, backend), run_guarded(scenario, backend)
    rows = guarded.rows
    return Training(
        plain=tuple(map(float, plain.losses)),
        plain_score=plain.score or 0.0,
        losses=tuple(row.loss for row in rows),
        score=guarded.score or 0.0,
        reasons=tuple(row.reason.name for row in rows),
        scales=tuple(row.loss_scale for row in rows),
        norms=tuple(row.grad_norm for row in rows),
        skipped=tuple(step for step, row in enumerate(rows) if not row.applied),
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the network is small
    sys.stdout.write(json.dumps(asdict(trained(sys.argv[1]))) + "\n")
