"""A change of the user's source that is offered as a remedy, and what shows that it is one."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Fix", "Rewrite", "lines_in", "patch_of", "texts_after"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A change of the user's source.

    Attributes:
        patch: the change as a unified diff. That of a later fix applies after those before it.
        explanation: what is changed, and which cause it mends.
        proven: whether the changed program was run in a process of its own, and did what ``evidence`` says.
        evidence: what that run has shown, or why there was none.
    """

    patch: str
    explanation: str
    proven: bool
    evidence: str


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A file before and after a change of one expression.

    Attributes:
        file: its path.
        line: the line of the expression, from 1.
        before, after: the texts.
        old, new: the expression.
        kind: the sort of change, such as "number".
    """

    file: str
    line: int
    before: str
    after: str
    old: str
    new: str
    kind: str


def texts_after(rewrites: Iterable[Rewrite]) -> dict[str, str]:
    """Return the last text of each file that is changed."""
    return {r.file: r.after for r in rewrites}


def lines_in(text: str) -> list[str]:
    """Return the lines of a text as Python counts them, with their ends; a form feed, at which ``splitlines``
    breaks, ends none.

    Example:
        >>> lines_in("a\\r\\n\\x0cb")
        ['a\\r\\n', '\\x0cb']
    """
    return re.findall(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+", text)


def patch_of(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the unified diff of some files, whose paths are given from the current folder where they lie in
    it.

    Example:
        >>> print(patch_of({"a.py": "x = 1\\n"}, {"a.py": "x = 2\\n"}))
        --- a/a.py
        +++ b/a.py
        @@ -1 +1 @@
        -x = 1
        +x = 2
        <BLANKLINE>
    """
    parts = list[str]()
    for file, old in before.items():
        new = after.get(file, old)
        if new == old:
            continue
        short = os.path.relpath(file)
        name = file if short.startswith("..") else short.replace(os.sep, "/")
        lines = difflib.unified_diff(lines_in(old), lines_in(new), f"a/{name}", f"b/{name}")
        parts += [x if x.endswith("\n") else f"{x}\n\\ No newline at end of file\n" for x in lines]
    return "".join(parts)
