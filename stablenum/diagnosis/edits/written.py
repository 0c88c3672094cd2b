"""A source with edits as its author would write them: imports on lines of their own, and no empty lines."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from stablenum.diagnosis.edits.edit import Edit, StaleEditError, end_of_imports, imports

__all__ = ["written"]


def written(source: str, edits: Sequence[Edit]) -> str:
    """Return a source with edits, each of which is for the source with those before it.

    Raises:
        StaleEditError: the source does not have an expression where an edit says.

    Example:
        >>> edit = Edit(file="a.py", span=(2, 2, 4, 9), before="a / n", after="m.divide(a, n)", module="m")
        >>> print(written("import a\\nx = a / n\\n", [edit]))
        import a
        import m
        x = m.divide(a, n)
        <BLANKLINE>
    """
    ending = "\r\n" if "\r\n" in source else "\n"
    source = source.replace("\r\n", "\n")  # as Python reads it
    text = source
    try:
        # From the last line to the first, so that no edit moves the lines of the next one.
        for edit in sorted(edits, key=lambda e: -e.span[0]):
            text = edit.replaced(text, edit.after)
    except StaleEditError:  # edits within one another
        text = source
        for edit in edits:
            text = edit.applied(text)
        return text.replace("\n", ending)
    for module in dict.fromkeys(e.module for e in edits if e.module):
        if not imports(text, module):
            text = _with_import(text, module)
    return text.replace("\n", ending)


def _with_import(source: str, module: str) -> str:
    """Return a source that imports a module: after the last import, or else after its docstring."""
    lines, end = source.splitlines(keepends=True), end_of_imports(source)
    if end is not None:
        line = end[0]
    else:
        body = ast.parse(source).body
        first = body[0] if body and ast.get_docstring(ast.parse(source)) is not None else None
        comments = next((i for i, text in enumerate(lines) if not text.startswith("#")), len(lines))
        line = comments if first is None or first.end_lineno is None else first.end_lineno
    if line and not lines[line - 1].endswith("\n"):
        lines[line - 1] += "\n"
    lines.insert(line, f"import {module}\n")
    return "".join(lines)
