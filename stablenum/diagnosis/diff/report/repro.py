"""A reproduction of a difference: a few short scripts, and the numbers that they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from stablenum._support.files import write_file, write_text
from stablenum.errors import bad_type

__all__ = ["Repro", "folder_of"]


@dataclass(frozen=True, slots=True)
class Repro:
    """Scripts and numbers.

    Attributes:
        scripts: the text of each script by the name of its file.
        arrays: what ``inputs.npz`` holds.
    """

    scripts: Mapping[str, str]
    arrays: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Write everything into a folder, which is made if there is none."""
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "inputs.npz", self._save)
        for name, text in self.scripts.items():
            write_text(folder / name, text)

    def _save(self, path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, **self.arrays)


def folder_of(folder: str | PathLike[str]) -> Path:
    """Return the folder that an argument names.

    Raises:
        TypeError: it is no path.
        ValueError: there is a file of that name.
    """
    if not isinstance(folder, str | PathLike):
        raise bad_type("folder", "the path of a folder", folder)
    path = Path(fspath(folder))
    if path.exists() and not path.is_dir():
        raise ValueError(f"folder must be a folder or a new name; {str(path)!r} is a file. Name another one.")
    return path
