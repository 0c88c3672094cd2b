"""Rules on state that should follow a training and does not move."""

from __future__ import annotations

RULES = ()
