"""Run the user's programs: what fails there is named, and generators of random numbers stay as they were."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from stablenum._support.interrupts import and_restore
from stablenum.diagnosis.diff.sides.play import Program
from stablenum.diagnosis.replay.source_files import folders_of, is_the_scripts
from stablenum.errors import ProgramError

__all__ = ["ended", "recorded", "undisturbed"]

T = TypeVar("T")

_OURS = ("stablenum", "stablenum_jax", "stablenum_torch")


def recorded(program: Program, side: str, steps: int) -> None:
    """Record a program, whose side is "left" or "right".

    Raises:
        ProgramError: the program failed.
    """
    try:
        program.record(steps)
    except Exception as error:
        stack = traceback.extract_tb(error.__traceback__)
        lines = [frame for frame in stack if is_the_scripts(frame.filename)]
        if not lines and stack[-1].filename.startswith(folders_of(_OURS)):
            raise  # an argument was refused
        at = f" at {lines[-1].filename}:{lines[-1].lineno} ({lines[-1].line})" if lines else ""
        raise ProgramError(
            f"the {side} program failed{at}: {ended(error)} "
            "Call its loss function with the same arguments to see the whole traceback."
        ) from error


def ended(error: Exception) -> str:
    """Return an error in words that end in one full stop."""
    return f"{type(error).__name__}: {error}".rstrip().rstrip(".:") + "."


def undisturbed(body: Callable[[], T]) -> T:
    """Return ``body()``; the generators of Python and NumPy are then as they were."""
    python, numpy = random.getstate(), np.random.get_state()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)

    return and_restore(body, restore)
