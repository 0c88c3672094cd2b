"""How much work a checkpoint may ask for: in proportion to its files, and not to what they claim."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stablenum.commands.verify.contents import NotCheckedError

__all__ = ["Limits", "read_json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of all formats. Each is far above what trainings save, and may be raised.

    Attributes:
        depth: how deep dicts, lists and the like may lie in one another.
        parts: how many arrays and plain values there may be.
        description: the bytes of a description: a header, a manifest, a pickle.
        unpacked: the bytes that all arrays may have together, packed or repeated ones included.
        ratio: they may also have so many times the bytes of the files.
    """

    depth: int = 100
    parts: int = 1_000_000
    description: int = 2**28
    unpacked: int = 2**30
    ratio: int = 64

    @classmethod
    def parsed(cls, given: Iterable[str]) -> Limits:
        """Return the limits with those that are given as ``NAME=NUMBER``.

        Raises:
            ValueError: there is no such limit, or the number is none.

        Example:
            >>> Limits.parsed(["depth=500"]).depth
            500
        """
        found: dict[str, int] = {}
        names = [field.name for field in dataclasses.fields(cls)]
        for text in given:
            name, _, number = text.partition("=")
            if name not in names or not (number.isascii() and number.isdecimal()) or len(number) > 18:
                raise ValueError(
                    f"a limit must be NAME=NUMBER, where NAME is one of {', '.join(names)}; got {text!r}, "
                    "as in --limit depth=500."
                )
            found[name] = int(number)
        return cls(**found)

    def check(self, name: str, found: int, what: str) -> None:
        """Check a number against a limit.

        Args:
            name: that of the limit.
            found: the number.
            what: what has so many, as the subject of a sentence.

        Raises:
            NotCheckedError: it is larger.
        """
        if found > (limit := getattr(self, name)):
            raise _exceeded(what, found, limit, name)

    def check_bytes(self, found: int, stored: int, what: str = "what is in it") -> None:
        """Check the bytes that arrays have together, of which the files have ``stored``.

        Raises:
            NotCheckedError: they are too many.
        """
        if found > (limit := max(self.unpacked, self.ratio * stored)):
            raise _exceeded(f"the bytes of {what}, unpacked", found, limit, "unpacked")


def _exceeded(what: str, found: int, limit: int, name: str) -> NotCheckedError:
    shown = f"{found:,}" if found < 10**18 else "more than 10**18"
    return NotCheckedError(
        "unreadable", f"{what}: {shown}, where at most {limit:,} are read; --limit {name}=NUMBER raises that"
    )


def read_json(file: Path, limits: Limits) -> Any:
    """Return what is in a JSON file.

    Raises:
        OSError: it is no file, or cannot be read.
        ValueError: it is not JSON, or nested too deep.
        NotCheckedError: it is too long.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file.name} is not there, or is not a file")
    limits.check("description", file.stat().st_size, f"the bytes of {file.name}")
    try:
        return json.loads(file.read_bytes())
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
