"""Number formats: precision policies, fp8 scaling, and 16-bit updates without rounding losses."""

from stablenum.precision.rounding import (
    compensated_value,
    compensation_of,
    kahan_add,
    round_stochastically,
    round_to_nearest,
)
from stablenum.public_names import present

__all__ = [
    "compensated_value",
    "compensation_of",
    "kahan_add",
    "round_stochastically",
    "round_to_nearest",
]

__dir__ = present(globals())
