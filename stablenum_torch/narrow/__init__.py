"""Running in narrow formats: policies on modules, 8-bit products, optimizers for narrow parameters."""

from stablenum_torch.narrow.casting import as_policy, cast_floating
from stablenum_torch.narrow.compensated import KahanUpdate, StochasticRounding
from stablenum_torch.narrow.islands import Precision, precision
from stablenum_torch.narrow.masters import MasterWeights

__all__ = [
    "KahanUpdate",
    "MasterWeights",
    "Precision",
    "StochasticRounding",
    "as_policy",
    "cast_floating",
    "precision",
]
