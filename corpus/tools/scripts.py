"""Running a whole script inside a tool, and where it ended."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

__all__ = ["innermost", "run_script"]


def run_script(path: Path) -> BaseException | None:
    """Run a script as ``python script.py`` does; the exception that ended it, if any."""
    with _as_main(path):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            return ended if ended.code else None
        except Exception as error:  # noqa: BLE001 - whatever ends the script is what the user sees
            return error
    return None


@contextlib.contextmanager
def _as_main(path: Path) -> Iterator[None]:
    """The arguments and the path of modules that the script expects; nothing of what it prints."""
    argv, path_before = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [str(path)], [str(path.parent)]
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        sys.argv, sys.path[:] = argv, path_before


def innermost(error: BaseException | None, path: Path) -> int:
    """The last line of the program's file in a traceback, 0 for none; the error's cause comes first."""
    while error is not None:
        if error.__cause__ is not None and (line := innermost(error.__cause__, path)):
            return line
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).name == path.name]
        if lines:
            return int(lines[-1] or 0)
        error = error.__cause__
    return 0
