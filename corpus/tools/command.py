"""Any program that runs a script and prints ``file.py:LINE`` or a traceback."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from corpus.task import ROOT, Found, Task

__all__ = ["Command", "named_line"]

_STEP = """import sys
sys.path.insert(0, {root!r})
from corpus.plain import run_{framework}
from corpus.task import Task
run_{framework}(Task({name!r}).build())
"""


class Command:
    """A command line in which ``{script}`` stands for the path of a script.

    Something is detected if the exit status is not 0. The line is the one of the program's file that the
    output names first as ``file.py:LINE``, or else the innermost one of a traceback. Operation and cause
    cannot be read from any tool's output: write an entry in Python for these.

    Raises:
        ValueError: there is no ``{script}`` in the line.
    """

    def __init__(self, line: str) -> None:
        if "{script}" not in line:
            raise ValueError(
                f"command: expected {{script}} where the path of the script belongs, got {line!r}"
            )
        self._words = shlex.split(line)

    def __call__(self, task: Task) -> Found:
        """Run the command on the program; a step is run by a small script that imports it."""
        with tempfile.TemporaryDirectory() as folder:
            script = task.path
            if task.is_step:
                script = Path(folder) / "run_step.py"
                text = _STEP.format(root=str(ROOT.parent), framework=task.framework, name=task.name)
                script.write_text(text, encoding="utf-8")
            words = [word.replace("{script}", str(script)) for word in self._words]
            words = [sys.executable if word == "python" else word for word in words]
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr
        return Found(done.returncode != 0, line=named_line(said, task.path.name), said=said[-500:])


def named_line(said: str, file: str) -> int:
    """The line of this file that a text names.

    Example:
        >>> named_line("/home/me/train.py:20: the derivative of sqrt gives NaN", "train.py")
        20
        >>> named_line('File "/home/me/train.py", line 7, in <module>', "train.py")
        7
    """
    name = re.escape(file)
    if place := re.search(rf"(?<![\w.-]){name}:(\d+)", said):
        return int(place[1])
    lines = re.findall(rf'File "(?:[^"]*[/\\])?{name}", line (\d+)', said)
    return int(lines[-1]) if lines else 0
