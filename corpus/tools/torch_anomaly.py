"""``torch.autograd.detect_anomaly``."""

from __future__ import annotations

import re
import warnings

import torch

from corpus.plain import run_torch
from corpus.task import Found, Task
from corpus.tools.command import named_line
from corpus.tools.scripts import innermost, run_script

__all__ = ["detect_anomaly"]


def detect_anomaly(task: Task) -> Found:
    """The program with anomaly detection around all of it.

    The line is that of the forward pass in the warning's traceback. An exception that has nothing to do with
    anomaly detection counts as well: the user sees it.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly():
            error = _run(task)
    if error is None:
        return Found(False)
    said = "\n".join([str(error), *(str(w.message) for w in caught)])
    node = re.search(r"Function '(\w+?Backward\d*)'", said)
    forward = named_line(said, task.path.name) if node else 0
    return Found(
        True,
        line=forward or innermost(error, task.path),
        operation=node[1] if node else "",
        said=said,
    )


def _run(task: Task) -> BaseException | None:
    if not task.is_step:
        return run_script(task.path)
    try:
        run_torch(task.build())
    except Exception as error:  # noqa: BLE001 - whatever ends the step is what the user sees
        return error
    return None
