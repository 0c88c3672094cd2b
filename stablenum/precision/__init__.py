"""Number formats: which module computes in which, fp8 scaling, and exact sums in 16 bits."""

from stablenum.faces import present
from stablenum.precision.rounding import (
    compensated_value,
    compensation_of,
    kahan_add,
    round_stochastically,
    round_to_nearest,
)

__all__ = [
    "compensated_value",
    "compensation_of",
    "kahan_add",
    "round_stochastically",
    "round_to_nearest",
]

__dir__ = present(globals())
