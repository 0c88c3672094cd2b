"""Tools for the tests of the runner: one that knows every answer, one that says nothing, and bad ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from corpus import Found, Task
from corpus.labels import read

__all__ = ["crashing", "hanging", "knowing", "leaving", "mistaken", "raising", "silent"]


def knowing(task: Task) -> Found:
    """The label itself."""
    label = read()[task.name]
    if label["kind"] == "healthy":
        return Found(False)
    return Found(
        True,
        line=next(iter(label["lines"]), 0),
        file=str(task.path),
        operation=next(iter(label["operations"] or ()), ""),
        cause=next(iter(label["causes"] or ()), ""),
    )


def silent(task: Task) -> Found:
    """Nothing."""
    return Found(False)


def mistaken(task: Task) -> Found:
    """The same wrong answer to every program."""
    return Found(True, line=1, operation="teleport", cause="bad luck")


def raising(task: Task) -> Found:
    """An error, except about one program."""
    if task.path.stem == "log_of_zero":
        return Found(True)
    raise ValueError(f"cannot read {task.path}")


def leaving(task: Task) -> Found:
    """An end of the process, as a script may cause."""
    sys.exit(3)


def crashing(task: Task) -> Found:
    """An end that Python does not see."""
    os._exit(7)


def hanging(task: Task) -> Found:
    """No answer, and a process of its own that would go on."""
    if task.path.stem != "sqrt_at_zero":
        return Found(True)
    with subprocess.Popen(["sleep", "600"]) as started:
        started.wait()
    time.sleep(600)
    return Found(False)
