"""What an interrupted run had measured, so that the next one goes on from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Kept", "sources_digest"]

ROOT = Path(__file__).parents[2]
_MEASURED = ("benchmarks", "stablenum", "stablenum_jax", "stablenum_torch")


def sources_digest() -> str:
    """Of every line of Python that is measured or measures."""
    digest = hashlib.sha256()
    for package in _MEASURED:
        for file in sorted((ROOT / package).rglob("*.py")):
            digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


class Kept:
    """Parts by name, in a file that is there only until the run is complete.

    Args:
        file: where. One of other circumstances, or that cannot be read, is begun anew.
        circumstances: all that the figures depend on: versions, machine, sources.
    """

    def __init__(self, file: Path, circumstances: Mapping[str, Any]) -> None:
        self._file, self._circumstances = file, json.loads(json.dumps(circumstances))
        self._parts: dict[str, Any] = {}
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            if found["circumstances"] == self._circumstances:
                self._parts = found["parts"]
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def part(self, name: str, measure: Callable[[], Any], *, say: Callable[[str], None]) -> Any:
        """The part, measured if it is not there."""
        if name in self._parts:
            say(f"{name}: kept from the interrupted run")
            return self._parts[name]
        say(f"measuring: {name} ...")
        self._parts[name] = measure()
        whole = {"circumstances": self._circumstances, "parts": self._parts}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".new")  # an interruption leaves the old file or the new one
        new.write_text(json.dumps(whole, allow_nan=False), encoding="utf-8")
        new.replace(self._file)
        return self._parts[name]

    def forget(self) -> None:
        """The run is complete."""
        self._file.unlink(missing_ok=True)
