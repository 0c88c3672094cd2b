"""Loss-scale rules: multiply the loss by a scale so that small half-precision gradients survive.

Each rule has its own file and is a frozen dataclass with ``init`` and ``update``; what changes during
training is in :class:`LossScaleState`. A rule's ``needs`` names what must be measured besides norms:
``"amax"`` (the largest gradient element) or ``"tiny"`` (the fraction of elements that float16 would lose).

Sources: Micikevicius et al. 2018 (arXiv 1710.03740), and the papers named in each rule.
"""

from typing import TypeAlias

from stablenum.rules.loss_scale.dynamic import DynamicLossScale
from stablenum.rules.loss_scale.log_max import LogMaxLossScale
from stablenum.rules.loss_scale.state import LARGEST_SCALE, SMALLEST_SCALE, LossScaleState, carried_over
from stablenum.rules.loss_scale.static import StaticLossScale
from stablenum.rules.loss_scale.underflow import UnderflowAwareLossScale

__all__ = [
    "LARGEST_SCALE",
    "LOSS_SCALES",
    "SMALLEST_SCALE",
    "DynamicLossScale",
    "LogMaxLossScale",
    "LossScale",
    "LossScaleState",
    "StaticLossScale",
    "UnderflowAwareLossScale",
    "carried_over",
]

LOSS_SCALES = (StaticLossScale, DynamicLossScale, LogMaxLossScale, UnderflowAwareLossScale)
LossScale: TypeAlias = StaticLossScale | DynamicLossScale | LogMaxLossScale | UnderflowAwareLossScale
