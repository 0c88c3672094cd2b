"""Types for annotations and for ``isinstance``: states in which ``stablenum_jax`` keeps what it knows.

The core's types are in ``stablenum.typing``.
"""

from stablenum._support.public_names import present
from stablenum_jax._precision.fp8 import Fp8State
from stablenum_jax._trees.state import GuardOptState

__all__ = ["Fp8State", "GuardOptState"]

__dir__ = present(globals())
