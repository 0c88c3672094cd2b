"""Which arrays may be masks, by their names, where nothing else tells masks from parameters."""

from __future__ import annotations

import re

__all__ = ["may_be_mask"]

# What the arrays are called that frameworks' layers train.
_TRAINED = frozenset(("bias", "beta", "embedding", "gamma", "kernel", "scale", "weight"))


def may_be_mask(name: str) -> bool:
    """Return whether the name of an entry allows it to be a mask.

    Example:
        >>> may_be_mask("model.attention.mask"), may_be_mask("params.dense.kernel")
        (True, False)
    """
    return re.split(r"[./]", name)[-1] not in _TRAINED
