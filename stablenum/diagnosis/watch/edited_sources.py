"""Run sources with changes that no file on the disk gets."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    def code_for(path: str) -> CodeType | None:
        return compiled(path, edits) if any(_same(edit.file, path) for edit in edits) else None

    _load_by(code_for)


@contextmanager
def edited(texts: Mapping[str, str]) -> Iterator[None]:
    """Give modules that are imported meanwhile other texts, by the real path of their file."""

    def code_for(path: str) -> CodeType | None:
        text = texts.get(os.path.realpath(path))
        return None if text is None else _compiled(text, path)

    undo = _load_by(code_for)
    try:
        yield
    finally:
        undo()


def _load_by(code_for: Callable[[str], CodeType | None]) -> Callable[[], None]:
    """Import modules with the code that is given for their file, if any, and return what ends that."""
    loader: Any = importlib.machinery.SourceFileLoader
    plain = loader.get_code

    def get_code(self: Any, fullname: str) -> Any:
        code = code_for(self.get_filename(fullname))
        return plain(self, fullname) if code is None else code

    loader.get_code = get_code

    def undo() -> None:
        loader.get_code = plain

    return undo


def _compiled(source: bytes | str, path: str) -> CodeType:
    # Without the __future__ imports of this file.
    return compile(source, path, "exec", dont_inherit=True)


def _same(one: str, other: str) -> bool:
    return os.path.abspath(one) == os.path.abspath(other)
