"""A change of one expression, as data."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Edit", "Span", "StaleEditError", "end_of_imports", "imports", "segment"]

Span = tuple[int, int, int, int]


class StaleEditError(Exception):
    """The file is not the one for which an edit was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of one expression of a file.

    Attributes:
        file: the path of the file.
        span: first and last line of the expression, and the columns at which it begins and ends, in bytes of
            UTF-8.
        before, after: the expression. The new one is a call.
        module: a module that the new expression needs; "" for none.

    Example:
        >>> edit = Edit(file="a.py", span=(1, 1, 4, 9), before="a / n", after="safe.divide(a, n)", module="")
        >>> edit.applied("x = a / n\\n")
        'x = safe.divide(a, n)\\n'
    """

    file: str
    span: Span
    before: str
    after: str
    module: str = ""

    def applied(self, source: str) -> str:
        """Return the source with the change. Every line keeps its number.

        Raises:
            StaleEditError: the source does not have the expression at this place.
        """
        first, last = self.span[:2]
        new, end = self.after, None
        if self.module and not imports(source, self.module):
            end = end_of_imports(source)
            if end is None:  # no line to put the import on
                new = new.replace(f"{self.module}.", f'__import__("{self.module}").')
        padded = f"{new[:-1]}{chr(10) * (last - first - new.count(chr(10)))}{new[-1:]}"
        lines = self.replaced(source, padded).splitlines(keepends=True)
        if end is not None:
            line, column = end
            whole = lines[line - 1].encode()
            lines[line - 1] = f"{whole[:column].decode()}; import {self.module}{whole[column:].decode()}"
        return "".join(lines)

    def replaced(self, source: str, new: str) -> str:
        """Return the source with another text in place of the expression.

        Raises:
            StaleEditError: the source does not have the expression at this place.
        """
        if segment(source, self.span) != self.before:
            raise StaleEditError(
                f"{self.file}:{self.span[0]} no longer reads {self.before!r}: the file has changed since the "
                "failure was recorded. Run the command again."
            )
        first, last = self.span[:2]
        lines = source.splitlines(keepends=True)
        lines[first - 1 : last] = [self._changed(source, new)]
        return "".join(lines)

    def shown(self, source: str) -> tuple[str, ...]:
        """Return the changed lines as in a patch, with a line for a module that is not imported yet."""
        first, last = self.span[:2]
        old, new = source.splitlines()[first - 1 : last], self._changed(source, self.after).splitlines()
        indent = min(len(text) - len(text.lstrip()) for text in (*old, *new) if text.strip())
        more = [f"+ import {self.module}"] if self.module and not imports(source, self.module) else []
        return (*more, *(f"- {text[indent:]}" for text in old), *(f"+ {text[indent:]}" for text in new))

    def _changed(self, source: str, new: str) -> str:
        """Return the lines of the expression with a new one in its place."""
        first, last, begin, end = self.span
        lines = [text.encode() for text in source.splitlines(keepends=True)[first - 1 : last]]
        return lines[0][:begin].decode() + new + lines[-1][end:].decode()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Edit:
        """Return the object from which :meth:`to_dict` made ``d``."""
        return cls(**{**d, "span": tuple(d["span"])})


def segment(source: str, span: Span) -> str:
    """Return the text of a span; "" if the source is too short."""
    line, last, begin, end = span
    lines = [text.encode() for text in source.splitlines(keepends=True)[line - 1 : last]]
    if len(lines) != last - line + 1:
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return b"".join(lines).decode(errors="replace")


def imports(source: str, module: str) -> bool:
    """Return whether a module is imported at the top, under its own name."""
    return any(
        isinstance(node, ast.Import) and any(a.name == module and a.asname is None for a in node.names)
        for node in ast.parse(source).body
    )


def end_of_imports(source: str) -> tuple[int, int] | None:
    """Return where the last import at the top of a file ends: line and column."""
    found = [
        (node.end_lineno, node.end_col_offset)
        for node in ast.parse(source).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    return next(((a, b) for a, b in reversed(found) if a is not None and b is not None), None)
