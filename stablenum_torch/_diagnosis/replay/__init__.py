"""One training step replayed with every operation recorded: see :func:`stablenum_torch.replay`."""

from __future__ import annotations
