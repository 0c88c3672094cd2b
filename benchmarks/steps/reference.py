"""The parameters expected at the end, computed in float64 from the optimizers' formulas alone.

The gradients of step k are ``FACTORS[k % 4]`` times those of a fixed set. Adam's update does not change if
all gradients are multiplied by one number, so equal steps would not show whether clipping took place; with
unequal steps the parameters move a fifth less without clipping than with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.steps.errors import WrongResultError
from benchmarks.steps.rows import UNCLIPPED, Row

__all__ = [
    "CLIP_AT",
    "FACTORS",
    "LEARNING_RATE",
    "SCALE",
    "TOLERANCE",
    "WEIGHT_DECAY",
    "check_against_each_other",
    "check_clipped_alike",
    "check_decided",
    "check_parameters",
    "distance",
    "expected",
]

FACTORS = (1.0, 0.25, 2.0, 0.5)  # powers of two: exact in every format
SCALE = 1024.0  # the loss scale of variants that have one
CLIP_AT = 0.1  # the norm to clip to, as a fraction of the norm at factor 1: every step is clipped
LEARNING_RATE = {"adamw": 1e-2, "sgd": 1.0}
WEIGHT_DECAY = 1e-2
MOMENTUM = 0.9
# The largest distance from the reference, relative to how far the parameters moved. bfloat16 has 8 bits of
# precision, to which each step rounds parameters and moments.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


def expected(
    row: Row, start: np.ndarray, gradient: np.ndarray, *, norm: float, steps: int, clipped: bool
) -> np.ndarray:
    """Parameters after ``steps`` steps, float64.

    AdamW as in Loshchilov & Hutter 2019 (arXiv 1711.05101), algorithm 2 with torch's and optax's defaults;
    SGD with heavy-ball momentum as torch and optax write it.

    Args:
        row: says which optimizer.
        start, gradient: some elements of parameters and of gradients at factor 1, float64.
        norm: the norm of all gradients at factor 1.
        steps: the number of steps.
        clipped: whether each step is clipped to ``CLIP_AT * norm``.
    """
    p, lr = start.copy(), LEARNING_RATE[row.optimizer]
    first, second = np.zeros_like(p), np.zeros_like(p)
    for k in range(steps):
        factor = FACTORS[k % len(FACTORS)]
        shortening = min(1.0, CLIP_AT * norm / (factor * norm)) if clipped else 1.0
        g = gradient * factor * shortening
        if row.optimizer == "sgd":
            first = MOMENTUM * first + g
            p = p - lr * first
            continue
        first = 0.9 * first + 0.1 * g
        second = 0.999 * second + 0.001 * g * g
        mean, square = first / (1 - 0.9 ** (k + 1)), second / (1 - 0.999 ** (k + 1))
        p = p - lr * WEIGHT_DECAY * p - lr * mean / (np.sqrt(square) + 1e-8)
    return p


def distance(found: np.ndarray, wanted: np.ndarray, start: np.ndarray) -> float:
    """RMS of the difference, relative to the RMS of the total movement; inf if anything is not finite."""
    way = math.sqrt(float(np.mean(np.square(wanted - start))))
    off = math.sqrt(float(np.mean(np.square(found - wanted))))
    return off / way if math.isfinite(off) and way > 0 else math.inf


def check_parameters(
    row: Row,
    name: str,
    *,
    start: np.ndarray,
    gradient: np.ndarray,
    found: np.ndarray,
    norm: float,
    steps: int,
) -> float:
    """The distance of a variant's parameters from the reference.

    Raises:
        WrongResultError: the distance is above the tolerance.
    """
    clipped = name not in UNCLIPPED
    wanted = expected(row, start, gradient, norm=norm, steps=steps, clipped=clipped)
    off = distance(found, wanted, start)
    if not off <= TOLERANCE[row.dtype]:
        raise WrongResultError(
            f"{row.name}: after {steps} steps the parameters of {name!r} differ from the float64 reference "
            f"by {off:.2g} of their movement; at most {TOLERANCE[row.dtype]} is allowed. Nothing is reported."
        )
    return off


def check_decided(
    name: str, last: Mapping[str, Any], *, norm: float, steps: int, clipped: bool, scale: float
) -> None:
    """Check the last step that a guard reports: all steps were applied, with the expected norm and factor.

    Adam's parameters do not show by which number all gradients were multiplied, and clipped gradients do not
    show what they were before; the reported norm and factor do.

    Args:
        name: the variant.
        last: the report, as from ``stablenum.guard.metrics``.
        norm: the norm of all gradients at factor 1.
        steps: the number of steps, all of which must have been applied.
        clipped: whether each step had to be clipped to ``CLIP_AT * norm``.
        scale: the loss scale.

    Raises:
        WrongResultError: the report differs.
    """
    factor = FACTORS[(steps - 1) % len(FACTORS)]
    shortened = CLIP_AT / factor if clipped else 1.0
    right = last["applied"] and last["skipped_total"] == 0 and last["step"] == steps - 1
    right = right and last["loss_scale"] == scale
    right = right and math.isclose(last["grad_norm"], factor * norm, rel_tol=1e-4)
    if not right or not math.isclose(last["clip_coefficient"], shortened, rel_tol=1e-4):
        raise WrongResultError(
            f"{name}: expected all {steps} steps to be applied, the last with norm {factor * norm:.6g}, "
            f"factor {shortened:.6g} and loss scale {scale}; got {last}."
        )


def check_clipped_alike(what: str, bare: np.ndarray, peers: np.ndarray, ours: np.ndarray) -> None:
    """Check that the two clipping variants moved the parameters alike, and not like the bare step.

    Args:
        what: what is measured, for the message.
        bare, peers, ours: the movement of each element of the parameters.

    Raises:
        WrongResultError: ours differs from the peer's, or the bare step does not.
    """
    start = np.zeros_like(peers)
    if not distance(ours, peers, start) <= 1e-3 or not distance(bare, peers, start) > 1e-2:
        raise WrongResultError(f"{what}: the guarded parameters differ from those of the clipping peer.")


def check_against_each_other(row: Row, distances: Mapping[tuple[str, str], float]) -> None:
    """Check the ``distances`` over all elements between pairs of variants that have to agree.

    Raises:
        WrongResultError: a distance is above twice the tolerance.
    """
    for (one, other), off in distances.items():
        if not off <= 2 * TOLERANCE[row.dtype]:
            raise WrongResultError(
                f"{row.name}: the parameters of {one!r} and {other!r} differ by {off:.2g} of their movement; "
                f"at most {2 * TOLERANCE[row.dtype]} is allowed. Nothing is reported."
            )
