"""One training step replayed under instruments: see :func:`stablenum_torch.replay`."""

from __future__ import annotations
