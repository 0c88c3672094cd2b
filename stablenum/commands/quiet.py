"""Work whose log messages are expected, and would only hide what a command prints."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["without_log"]


@contextlib.contextmanager
def without_log(name: str = "stablenum") -> Iterator[None]:
    """Leave out the messages of a logger below ``CRITICAL``."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
