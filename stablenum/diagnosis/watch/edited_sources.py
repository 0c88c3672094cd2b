"""Run a script with an edit of its source, which no file on the disk gets."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from collections.abc import Sequence
from types import CodeType
from typing import Any

from stablenum.diagnosis.edits.edit import Edit

__all__ = ["compiled", "install"]


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
    # Without the __future__ imports of this file.
    return compile(source, path, "exec", dont_inherit=True)


def install(edits: Sequence[Edit]) -> None:
    """Give modules that are imported from now on the edits that are for them."""
    plain = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        if any(_same(edit.file, path) for edit in edits):
            return compiled(path, edits)
        return plain(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def _same(one: str, other: str) -> bool:
    return os.path.abspath(one) == os.path.abspath(other)
