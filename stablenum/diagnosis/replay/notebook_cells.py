"""How a line in a notebook is called: by the number of its cell, as in IPython's own tracebacks."""

from __future__ import annotations

import sys

__all__ = ["shown_file"]


def shown_file(file: str) -> str:
    """Return a file as a report names it: a cell that IPython ran by its number, any other as it is.

    IPython compiles each cell as a file of a temporary folder, which says nothing to the reader.

    Example:
        >>> shown_file("train.py")
        'train.py'
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    name = getattr(getattr(shell, "compile", None), "format_code_name", None)  # IPython 8 and later
    cell = None if name is None else name(file)
    return file if cell is None else str(cell[1])
