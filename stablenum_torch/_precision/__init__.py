"""Narrow formats: policies for modules, 8-bit products, optimizers for narrow parameters."""

from stablenum_torch._precision.casts import cast_floating
from stablenum_torch._precision.compensated import KahanUpdate, StochasticRounding
from stablenum_torch._precision.master_weights import MasterWeights
from stablenum_torch._precision.model import PolicyHandle, precision

__all__ = [
    "KahanUpdate",
    "MasterWeights",
    "PolicyHandle",
    "StochasticRounding",
    "cast_floating",
    "precision",
]
