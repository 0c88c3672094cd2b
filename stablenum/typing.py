"""Types for annotations: what functions return, and parts of what they take.

>>> from stablenum.typing import Metrics
>>> def is_bad(last: Metrics) -> bool:
...     return not last["applied"]

``stablenum_torch.typing`` and ``stablenum_jax.typing`` have the types of the adapters.
"""

from stablenum._support.public_names import present
from stablenum.guard.readout import Metrics, StepRecord, Worst
from stablenum.precision.delayed_scaling import DelayedScalingState
from stablenum.recovery.settings import Response
from stablenum.rules.clipping import Units

__all__ = ["DelayedScalingState", "Metrics", "Response", "StepRecord", "Units", "Worst"]

__dir__ = present(globals())
