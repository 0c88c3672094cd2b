"""No tool at all: what a program's own exceptions tell."""

from __future__ import annotations

import warnings

from corpus.plain import run_jax, run_torch
from corpus.task import Found, Task
from corpus.tools.scripts import innermost, run_script

__all__ = ["python"]


def python(task: Task) -> Found:
    """An exception that ends the program, and the line of the program in its traceback."""
    error = _run(task)
    if error is None:
        return Found(False)
    return Found(True, line=innermost(error, task.path), said=str(error))


def _run(task: Task) -> BaseException | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not task.is_step:
            return run_script(task.path)
        program = task.build()
        try:
            (run_torch if task.framework == "torch" else run_jax)(program)
        except Exception as error:  # noqa: BLE001 - whatever ends the step is what the user sees
            return error
    return None
