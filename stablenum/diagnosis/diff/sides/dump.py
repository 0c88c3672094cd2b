"""Named arrays that another program has written, such as an inference engine that cannot be recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Dump"]


@dataclass(frozen=True, slots=True)
class Dump:
    """Named arrays of a program, in the order in which they were written.

    Attributes:
        arrays: by name.
        path: the file.
    """

    arrays: Mapping[str, Any]
    path: str = ""

    def __repr__(self) -> str:
        return f"Dump(arrays={len(self.arrays)}, path={self.path!r})"
