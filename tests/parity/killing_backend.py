"""A backend whose process ends, as one does that the system ends for lack of memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import NoReturn

__all__ = ["start"]


def start(setup: object, mode: str) -> NoReturn:
    """End this process at once, unless it is the main one."""
    if multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("run in the main process")
