"""The guard: its settings, its state, the decision about one step, and how both are read and saved."""

from stablenum.guard.decide import Decision, GuardState, Observation

__all__ = ["Decision", "GuardState", "Observation"]
