"""Types for annotations: what functions of ``stablenum_torch`` return.

The core's types are in ``stablenum.typing``.
"""

from stablenum._support.public_names import present
from stablenum_torch._precision import PolicyHandle

__all__ = ["PolicyHandle"]

__dir__ = present(globals())
