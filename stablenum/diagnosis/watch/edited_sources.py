"""Run sources with changes that no file on the disk gets."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

from stablenum.diagnosis.edits.edit import Edit

__all__ = ["compiled", "edited", "install"]


def compiled(path: str, edits: Sequence[Edit]) -> CodeType:
    """Return the code of a file with the edits that are for it.

    Raises:
        StaleEditError: the file has changed since an edit was made for it.
    """
    with open(path, "rb") as file:
        source: bytes | str = file.read()
    for edit in edits:
        if _same(edit.file, path):
            text = importlib.util.decode_source(source) if isinstance(source, bytes) else source
            source = edit.applied(text)
    return _compiled(source, path)


def install(edits: Sequence[Edit]) -> None:
    """Give modules that are imported from now on the edits that are for them."""
    plain = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        if any(_same(edit.file, path) for edit in edits):
            return compiled(path, edits)
        return plain(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


@contextmanager
def edited(texts: Mapping[str, str]) -> Iterator[None]:
    """Give modules that are imported meanwhile other texts, by the real path of their file."""
    plain = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        text = texts.get(os.path.realpath(path))
        return plain(self, fullname) if text is None else _compiled(text, path)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    try:
        yield
    finally:
        importlib.machinery.SourceFileLoader.get_code = plain  # type: ignore[method-assign]


def _compiled(source: bytes | str, path: str) -> CodeType:
    # Without the __future__ imports of this file.
    return compile(source, path, "exec", dont_inherit=True)


def _same(one: str, other: str) -> bool:
    return os.path.abspath(one) == os.path.abspath(other)
