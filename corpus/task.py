"""What a tool is given, and what it answers."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from corpus.case import Program

__all__ = ["ROOT", "STEP_SETS", "Found", "Task"]

ROOT = Path(__file__).resolve().parent
STEP_SETS = ("failing", "healthy")  # one step each; the other sets hold whole scripts


@dataclass(frozen=True)
class Found:
    """The answer of a tool.

    Attributes:
        detected: whether anything is wrong with the program.
        line: the line at fault, 0 if none is named; of the program's own file if ``file`` is "".
        file: the path or the name of the file with that line.
        operation: the operation at fault, in the words of the framework or of the user.
        cause: a key of ``corpus.CAUSES``, or for the programs of ``silent`` a symptom.
        said: what the tool printed, in a few words; a result file leaves it out.

    Example:
        >>> Found(True, line=11, operation="sqrt").cause
        ''
    """

    detected: bool
    line: int = 0
    file: str = ""
    operation: str = ""
    cause: str = ""
    said: str = ""


@dataclass(frozen=True)
class Task:
    """A program to look at. ``name`` is framework, set and program: ``torch/failing/sqrt_at_zero``."""

    name: str

    @property
    def framework(self) -> str:
        """``torch`` or ``jax``."""
        return self.name.split("/")[0]

    @property
    def set(self) -> str:
        """``failing``, ``healthy``, ``unseen`` or ``silent``."""
        return self.name.split("/")[1]

    @property
    def is_step(self) -> bool:
        """Whether it is one step, which ``build`` returns; otherwise ``path`` is a script to be run."""
        return self.set in STEP_SETS

    @property
    def path(self) -> Path:
        """The file."""
        framework, kind, stem = self.name.split("/")
        return ROOT / kind / f"{stem}.py" if self.is_step else ROOT / kind / framework / f"{stem}.py"

    def build(self) -> Program:
        """The step and its arguments, new with each call.

        Raises:
            ValueError: the program is a script.
        """
        if not self.is_step:
            raise ValueError(f"{self.name} is a script: run {self.path}")
        framework, kind, stem = self.name.split("/")
        program: Program = getattr(importlib.import_module(f"corpus.{kind}.{stem}"), f"in_{framework}")()
        return program
