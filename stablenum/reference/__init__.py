"""The NumPy adapter: an executable specification of the guarded step."""

from stablenum.reference.guarded import Guarded

__all__ = ["Guarded"]
