"""The guard: its settings and state, the decision about a step, and reading and saving the state.

The functions below are for adapters to further frameworks; ``stablenum_torch`` and ``stablenum_jax`` have
their own functions on top of them.
"""

from stablenum._support.public_names import present
from stablenum.guard.halting import check_halted
from stablenum.guard.readout import history, metrics
from stablenum.guard.reasons import explain_reason
from stablenum.guard.statedict import state_from_dict, state_to_dict

__all__ = ["check_halted", "explain_reason", "history", "metrics", "state_from_dict", "state_to_dict"]

__dir__ = present(globals())
