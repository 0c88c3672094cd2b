"""A backend that holds a lock in the folder ``mode`` and takes longer than any test waits.

The system releases a lock when the process ends, whoever reaps it.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

__all__ = ["start"]


def start(setup: object, mode: str) -> None:
    """Hold a lock, and sleep."""
    with (Path(mode) / f"{os.getpid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        time.sleep(1000)
