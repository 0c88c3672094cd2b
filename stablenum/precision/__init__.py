"""Number formats: precision policies, fp8 scaling, and 16-bit updates without rounding losses."""

from stablenum._support.public_names import present
from stablenum.precision.blocks.law import BlockLaw, Quantized, block_law
from stablenum.precision.rounding import (
    compensated_value,
    kahan_add,
    round_stochastically,
    round_to_nearest,
)

__all__ = [
    "BlockLaw",
    "Quantized",
    "block_law",
    "compensated_value",
    "kahan_add",
    "round_stochastically",
    "round_to_nearest",
]

__dir__ = present(globals())
